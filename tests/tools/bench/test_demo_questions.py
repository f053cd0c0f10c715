"""The demo model's questions cover its skills."""

from __future__ import annotations

import random

import pytest

from jaxserve.tools.bench.demo_questions import make_questions

pytestmark = pytest.mark.thorough


def test_no_story_is_told_twice() -> None:
    questions = make_questions(100, random.Random(0))
    stories = [question.params.seed for question in questions if question.skill == "story"]
    assert len(stories) == 25 == len(set(stories)), "each is drawn with a seed of its own"
    assert all(question.params.is_greedy for question in questions if question.skill != "story")
    assert questions == make_questions(100, random.Random(0))

"""The demo runs to its table, its three ways serve the same load, and its plot shows what they did."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

from demo import make_questions
from demo_plot import COLORS, Curve, draw_curves

ROOT = Path(__file__).parents[2]
SVG = "{http://www.w3.org/2000/svg}"


def test_no_story_is_told_twice() -> None:
    questions = make_questions(100, random.Random(0))
    stories = [question.params.seed for question in questions if question.skill == "story"]
    assert len(stories) == 25 == len(set(stories)), "each is drawn with a seed of its own"
    assert all(question.params.is_greedy for question in questions if question.skill != "story")


def test_the_plot_has_a_step_for_every_request_of_every_way() -> None:
    curves = [
        Curve("one & one", [4.0, 1.0, 2.5]),
        Curve("in batches", [3.0, 3.0, 3.0]),
        Curve("at once", [0.5, 1.0, 0.7]),
    ]
    image = ElementTree.fromstring(draw_curves(curves, "three < four"))
    lines = [path for path in image.iter(f"{SVG}path") if path.get("stroke") in COLORS]
    assert [line.get("stroke") for line in lines] == list(COLORS)
    assert [line.get("d", "").count("V") for line in lines] == [3, 3, 3]
    texts = [text.text for text in image.iter(f"{SVG}text")]
    assert "three < four" in texts and "one & one: all after 4.0 s" in texts and "at once: all after 1.0 s" in texts
    ends = [float(line.get("d", "").split("H")[-1].split("V")[0]) for line in lines]
    assert ends[0] > ends[1] > ends[2], "the slowest ends farthest to the right"


def test_demo_shows_answers_and_one_table() -> None:
    command = [sys.executable, "scripts/demo.py", "--num-prompts", "12", "--num-requests", "6"]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=ROOT, env=os.environ | {"COLUMNS": "120"}
    )
    assert done.returncode == 0, done.stderr[-2000:]
    for text in ("nothing is compiled from here on", "12 of 12", "one at a time", "static batches of 32", "continuous"):
        assert text in done.stdout, text
    assert done.stdout.count("\n> ") >= 6, "some answers of each skill"

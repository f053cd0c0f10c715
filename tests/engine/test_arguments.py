"""What callers give beside prompts: one for all or one for each, seconds, and what a chat template is told."""

from __future__ import annotations

import math
import time
from typing import Any

import pytest

from jaxserve.engine.arguments import find_deadline, list_prompts, make_requests, read_chat_options, spread
from jaxserve.engine.prompts import RequestFactory
from jaxserve.errors import InvalidRequestError
from jaxserve.request import ServiceTier
from jaxserve.sampling_params import OutputKind, SamplingParams

NOTHING: dict[str, Any] = {
    "tools": None,
    "chat_template": None,
    "chat_template_kwargs": None,
    "add_generation_prompt": None,
    "continue_final_message": False,
}


@pytest.mark.parametrize(
    ("given", "prompts"),
    [
        ("text", ["text"]),
        ({"prompt": "text"}, [{"prompt": "text"}]),
        ([1, 2, 3], [[1, 2, 3]]),
        ((1, 2), [[1, 2]]),
        ([[1, 2, 3]], [[1, 2, 3]]),
        (["a", [1], {"prompt": "b"}], ["a", [1], {"prompt": "b"}]),
        ([], []),
    ],
)
def test_every_form_of_prompts_is_a_list(given: Any, prompts: list[Any]) -> None:
    assert list_prompts(given) == prompts


def test_one_value_is_for_all_and_several_are_one_for_each() -> None:
    assert spread(3, 2, "priority") == [3, 3]
    assert spread([3, 4], 2, "priority") == [3, 4]
    assert spread("flex", 2, "service_tier") == ["flex", "flex"]
    with pytest.raises(InvalidRequestError, match=r"priority: .* 2 prompts.*got 1"):
        spread([3], 2, "priority")


def test_prompts_become_requests_with_what_each_was_given() -> None:
    factory = RequestFactory(None, vocab_size=50, eos_token_ids=(), seed=0, max_model_len=64, max_logprobs=5)
    each = {"priority": [3, 4], "service_tier": "flex"}
    params = [SamplingParams(temperature=0), SamplingParams(temperature=0, max_tokens=7)]
    found = make_requests(factory.make, [[5], [6]], params, each, {"cache_salt": "s"})
    assert [request.prompt_token_ids for request in found] == [(5,), (6,)]
    assert [request.priority for request in found] == [3, 4]
    assert [request.params.max_tokens for request in found] == [16, 7]
    for request in found:
        assert request.service_tier is ServiceTier.FLEX and request.cache_salt == "s"
        assert request.params.output_kind is OutputKind.FINAL_ONLY
    with pytest.raises(InvalidRequestError, match=r"^service_tier: "):
        make_requests(factory.make, [[5], [6]], params, {"service_tier": ["flex"]}, {})


def test_seconds_become_a_deadline() -> None:
    before = time.monotonic()
    deadline = find_deadline(5)
    assert deadline is not None and before + 5 <= deadline <= time.monotonic() + 5
    assert find_deadline(None) is None


@pytest.mark.parametrize("timeout", [0, -1, math.inf, math.nan, True, "5"])
def test_bad_timeouts_are_named(timeout: Any) -> None:
    with pytest.raises(InvalidRequestError, match=r"^timeout: .*above 0"):
        find_deadline(timeout)


def test_an_answer_begins_unless_one_goes_on() -> None:
    assert read_chat_options(**NOTHING)["add_generation_prompt"] is True
    assert read_chat_options(**NOTHING | {"continue_final_message": True})["add_generation_prompt"] is False
    variables = {"enable_thinking": False, "priority": 1}
    assert read_chat_options(**NOTHING | {"chat_template_kwargs": variables})["variables"] == variables

"""Arguments beside prompts: one for all or one for each, seconds, and those of a chat template."""

from __future__ import annotations

import inspect
import math
import time
from typing import Any

import pytest

from jaxserve.engine.prompt_forms import list_prompts
from jaxserve.engine.prompts import RequestFactory
from jaxserve.engine.request_options import (
    ChatOptions,
    RequestOptions,
    check_options,
    find_deadline,
    make_requests,
    read_arguments,
    spread,
)
from jaxserve.errors import InvalidRequestError
from jaxserve.request import ServiceTier
from jaxserve.sampling_params import OutputKind, SamplingParams
from jaxserve.tokenizers.chat import encode_chat


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
    options = read_arguments("LLM.generate", {"priority": [3, 4], "service_tier": "flex", "cache_salt": "s"})
    params = [SamplingParams(temperature=0), SamplingParams(temperature=0, max_tokens=7)]
    found = make_requests(factory.make, [[5], [6]], options, params)
    assert [request.prompt_token_ids for request in found] == [(5,), (6,)]
    assert [request.priority for request in found] == [3, 4]
    assert [request.params.max_tokens for request in found] == [16, 7]
    for request in found:
        assert request.service_tier is ServiceTier.FLEX and request.cache_salt == "s"
        assert request.params.output_kind is OutputKind.FINAL_ONLY
    with pytest.raises(InvalidRequestError, match=r"^service_tier: "):
        make_requests(factory.make, [[5], [6]], {"service_tier": ["flex"]}, params)


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
    assert read_arguments("LLM.chat", {})["add_generation_prompt"] is True
    assert read_arguments("LLM.chat", {"continue_final_message": True})["add_generation_prompt"] is False
    both = read_arguments("AsyncLLM.chat", {"continue_final_message": True, "add_generation_prompt": True})
    assert both["add_generation_prompt"] is True


def test_variables_cannot_be_arguments() -> None:
    options = read_arguments("LLM.chat", {"chat_template_kwargs": {"priority": 1}, "tools": []})
    assert options == {"variables": {"priority": 1}, "tools": [], "add_generation_prompt": True}


@pytest.mark.parametrize(
    ("method", "argument"),
    [
        ("LLM.generate", "tools"),
        ("LLM.generate", "deadline"),
        ("LLM.generate", "tenant"),
        ("AsyncLLM.generate", "truncate_prompt_tokens"),
        ("LLM.embed", "priority"),
        ("LLM.beam_search", "cache_salt"),
        ("AsyncLLM.chat", "variables"),
    ],
)
def test_methods_know_their_own_arguments_alone(method: str, argument: str) -> None:
    with pytest.raises(TypeError, match=rf"^{method}\(\) got an unexpected keyword argument '{argument}'"):
        read_arguments(method, {argument: 1})


def test_every_option_of_a_request_is_one_of_its_factory() -> None:
    assert {*RequestOptions.__optional_keys__} == {*inspect.signature(check_options).parameters}
    named = {name for name, each in inspect.signature(encode_chat).parameters.items() if each.kind is each.KEYWORD_ONLY}
    assert {*ChatOptions.__optional_keys__ - RequestOptions.__optional_keys__} == named

"""Sampling parameters: defaults, ranges, and refusal of what is not supported."""

from __future__ import annotations

import dataclasses
import itertools
import math
import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve import OutputKind, RequestOutputKind, SamplingParams
from jaxserve.errors import InvalidRequestError


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", "1"),
        ("temperature", True),
        ("temperature", None),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("top_p", math.nan),
        ("min_p", -0.01),
        ("min_p", 1.5),
        ("top_k", -2),
        ("top_k", 1.5),
        ("seed", -(2**63) - 1),
        ("seed", 2**63),
        ("seed", 0.5),
        ("max_tokens", 0),
        ("max_tokens", -3),
        ("stop", ["a"] * 17),
        ("stop", [""]),
        ("stop", ""),
        ("stop", 5),
        ("stop", [3]),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", ["x"]),
        ("stop_token_ids", list(range(257))),
        ("ignore_eos", 1),
        ("n", 0),
        ("n", 129),
        ("n", 10**6),
        ("n", True),
        ("presence_penalty", 2.1),
        ("presence_penalty", math.nan),
        ("frequency_penalty", -math.inf),
        ("repetition_penalty", 0.001),
        ("repetition_penalty", 3),
        ("min_tokens", -1),
        ("min_tokens", 17),
        ("logprobs", -2),
        ("logprobs", 1.0),
        ("prompt_logprobs", -1),
        ("truncate_prompt_tokens", 0),
        ("logit_bias", [1]),
        ("logit_bias", {-1: 1.0}),
        ("logit_bias", {"x": 1.0}),
        ("logit_bias", {"9" * 400: 1.0}),
        ("logit_bias", {1: 101}),
        ("logit_bias", {1: math.nan}),
        ("logit_bias", dict.fromkeys(range(301), 0.5)),
        ("allowed_token_ids", []),
        ("allowed_token_ids", [-1]),
        ("allowed_token_ids", "12"),
        ("bad_words", "word"),
        ("bad_words", [" "]),
        ("bad_words", ["a"] * 33),
        ("bad_words", [[]]),
        ("bad_words", [[-1]]),
        ("bad_words", [["a"]]),
        ("bad_words", [[1] * 9]),
        ("bad_words", [[1]] * 65),
        ("bad_words", ["a"] * 32 + [[1]]),
        ("suppress_tokens", 3),
        ("suppress_tokens", [-1]),
        ("structured_outputs", {"regex": "a"}),
        ("spaces_between_special_tokens", 0),
        ("extra_args", [1]),
        ("extra_args", {"a": math.inf}),
        ("extra_args", {1: 1}),
        ("output_kind", "delta"),
    ],
)
def test_bad_values_name_the_field(name: str, value: object) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams(**{name: value})  # type: ignore[arg-type]
    assert caught.value.field == name


@pytest.mark.parametrize("name", ["guided_json", "nonsense"])
def test_parameters_that_do_not_exist_are_refused_not_ignored(name: str) -> None:
    with pytest.raises(InvalidRequestError, match="not a supported sampling parameter") as caught:
        SamplingParams(**{name: 1})
    assert caught.value.field == name


def test_a_typo_gets_a_hint() -> None:
    with pytest.raises(InvalidRequestError, match="'temperature'"):
        SamplingParams(temprature=0.5)  # type: ignore[call-arg]


def test_what_needs_state_on_the_device() -> None:
    assert not SamplingParams(temperature=0.3, top_k=4, seed=1, logprobs=3, stop="x").shapes_logits
    for options in (
        {"presence_penalty": 0.1},
        {"frequency_penalty": -0.1},
        {"repetition_penalty": 1.1},
        {"min_tokens": 1},
        {"logit_bias": {"3": 1}},
        {"allowed_token_ids": [1]},
        {"bad_words": ["no"]},
        {"bad_words": [[1, 2]] * 64},
        {"suppress_tokens": range(1000)},
    ):
        assert SamplingParams(**options).shapes_logits, options
    assert SamplingParams(logit_bias={"3": 1}).logit_bias == {3: 1.0}, "JSON has texts as keys"


def test_stop_takes_one_string_or_many() -> None:
    assert SamplingParams(stop="end").stop == ("end",)
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")
    assert SamplingParams().stop == () and SamplingParams().stop_token_ids == ()
    with pytest.raises(InvalidRequestError, match="detokenize"):
        SamplingParams(stop="end", detokenize=False)


def test_flags_take_both_values() -> None:
    flags = [f.name for f in dataclasses.fields(SamplingParams) if f.type == "bool"]
    assert "spaces_between_special_tokens" in flags and len(flags) == 5
    for name, value in itertools.product(flags, (True, False)):
        assert getattr(SamplingParams(**{name: value}), name) is value


@given(
    st.floats(0, 100),
    st.floats(0, 1, exclude_min=True),
    st.integers(-1, 2**31 - 1),
    st.floats(0, 1),
    st.one_of(st.none(), st.integers(0, 2**63 - 1)),
)
def test_good_values_survive_copies(
    temperature: float, top_p: float, top_k: int, min_p: float, seed: int | None
) -> None:
    params = SamplingParams(temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p, seed=seed)
    assert pickle.loads(pickle.dumps(params)) == params == dataclasses.replace(params)
    assert params.is_greedy == (temperature == 0)


def test_names_of_the_field() -> None:
    assert SamplingParams(seed=-1) == SamplingParams()
    assert RequestOutputKind.DELTA is OutputKind.DELTA
    assert SamplingParams(n=3, best_of=3) == SamplingParams(n=3)
    copy = SamplingParams(temperature=0, stop="a").clone(max_tokens=5)
    assert copy == SamplingParams(temperature=0, stop="a", max_tokens=5)
    assert dataclasses.replace(SamplingParams(n=2, best_of=2), n=3).n == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n": 2, "best_of": 3}, "best_of: .*n = 2, got 3"),
        ({"guided_decoding": 1}, "guided_decoding: .*structured_outputs=StructuredOutputsParams"),
        ({"use_beam_search": True}, "use_beam_search: .*LLM.beam_search"),
        ({"max_new_tokens": 5}, "max_new_tokens: .*max_tokens"),
        ({"seed": -1.0}, "seed: .*integer"),
    ],
)
def test_names_that_live_elsewhere_say_where(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        SamplingParams(**options)

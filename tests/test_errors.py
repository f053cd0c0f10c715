"""What errors repeat of the values that they refuse."""

from __future__ import annotations

from dataclasses import fields

import pytest

from jaxserve import SamplingParams
from jaxserve.errors import InvalidRequestError, shorten


def test_values_are_repeated_as_far_as_they_help() -> None:
    assert shorten(0.5) == "0.5" and shorten("ab") == "'ab'" and shorten([1, {"a": None}]) == "[1, {'a': None}]"
    assert shorten(-(2**64)) == "-18446744073709551616"


def test_long_values_are_cut() -> None:
    for value in ("x" * 10**6, b"x" * 10**6, list(range(10**6)), 10**150, 10**9999, {"a": "x" * 500}):
        assert len(shorten(value)) <= 100


@pytest.mark.parametrize("name", [field.name for field in fields(SamplingParams)])
def test_whatever_a_parameter_is_given_the_refusal_names_it(name: str) -> None:
    """Numbers too large to be floats or to be printed among them."""
    num_refused = 0
    for large in (10**400, -(10**9999)):
        for value in (large, [large], {5: large}, {large: 1.0}, {"a": large}, [[large]], object(), [None]):
            try:
                SamplingParams(**{name: value})  # type: ignore[arg-type]
            except InvalidRequestError as error:
                assert name in str(error) and len(str(error)) < 500
                num_refused += 1
    assert num_refused >= 10

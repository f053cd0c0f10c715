"""One number for how wrong an attention is: nothing that is wrong in one place hides behind the rest."""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.testing.compare import RELATIVE_TOLERANCE, relative_error

RIGHT = np.random.default_rng(0).standard_normal((256, 8, 64)).astype(np.float32) / 100  # as means of many values are


def test_rounding_is_right() -> None:
    assert relative_error(RIGHT, RIGHT, 256) == 0
    assert 0 < relative_error(jnp.asarray(RIGHT, jnp.bfloat16), RIGHT, 256) < RELATIVE_TOLERANCE / 3


def test_one_wrong_head_of_many_shows() -> None:
    out = RIGHT.copy()
    out[200, 3] *= 1.02
    assert relative_error(out, RIGHT, 256) == pytest.approx(0.02, rel=1e-3)
    assert np.linalg.norm(out - RIGHT) / np.linalg.norm(RIGHT) < RELATIVE_TOLERANCE, "over everything it does not"
    assert relative_error(np.zeros_like(RIGHT), RIGHT, 256) == pytest.approx(1)


def test_padding_is_not_compared() -> None:
    out = RIGHT.copy()
    out[7:] = np.nan
    assert relative_error(out, RIGHT, 7) == 0
    assert relative_error(out, RIGHT, 8) == math.inf
    assert relative_error(out, RIGHT, 0) == 0


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_not_finite_is_wrong(value: float) -> None:
    out = RIGHT.copy()
    out[5, 1, 9] = value
    assert relative_error(out, RIGHT, 256) == math.inf


def test_where_zero_is_expected() -> None:
    nothing = np.zeros_like(RIGHT)
    assert relative_error(nothing, nothing, 256) == 0
    assert relative_error(RIGHT, nothing, 256) == math.inf


def test_shapes_must_agree() -> None:
    with pytest.raises(ValueError, match=r"out is \[256, 64\], expected is \[256, 8, 64\]"):
        relative_error(RIGHT[:, 0], RIGHT, 256)

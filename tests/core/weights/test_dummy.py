"""Dummy parameters: repeatable, of the right size, and sane."""

from __future__ import annotations

import dataclasses
from functools import partial

import jax
import numpy as np
import pytest

from jaxserve.core.models.base import ParamSpec
from jaxserve.core.sharding import DEFAULT_RULES
from jaxserve.core.weights import dummy, make_dummy_params
from tests.core.weights.checkpoints import flatten_arrays, make_specs, one_device

BIG = {"w": ParamSpec((512, 300), "float32", (None, None), "normal")}


def make(specs: object, seed: int = 0) -> dict[str, np.ndarray]:
    return flatten_arrays(make_dummy_params(specs, mesh=one_device(), rules=DEFAULT_RULES, seed=seed))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_deterministic_per_seed_and_distinct_per_parameter(dtype: str) -> None:
    first, again, other = make(make_specs(dtype)), make(make_specs(dtype)), make(make_specs(dtype), seed=1)
    for name, value in first.items():
        assert str(value.dtype) == dtype
        np.testing.assert_array_equal(value, again[name])
        assert np.isfinite(value.astype(np.float32)).all()
        constant = name.endswith("norm")
        assert (value == 1).all() if constant else (value != other[name]).mean() > 0.9
    assert (first["layers.0.down"] != first["layers.1.down"]).mean() > 0.9


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_distribution(dtype: str) -> None:
    values = make({"w": dataclasses.replace(BIG["w"], dtype=dtype)})["w"].astype(np.float64)
    assert abs(values.mean()) < 2e-4 and abs(values.std() - 0.02) < 2e-4 and 0.06 < np.abs(values).max() < 0.15


def test_neighbours_and_streams_are_independent() -> None:
    values = make({"a": BIG["w"], "b": BIG["w"]})
    a, b = (values[name].astype(np.float64).ravel() / 0.02 for name in "ab")
    limit = 4 / np.sqrt(a.size)
    for other in (b, np.roll(a, 1), np.roll(a, 2), np.roll(a, 300), np.roll(b, 1)):
        assert abs((a * other).mean()) < limit
    assert np.linalg.matrix_rank(values["a"]) == 300


def test_streams_are_not_windows_of_one_sequence() -> None:
    """Large parameters would repeat each other if their streams were shifted or permuted copies."""
    first, second = (np.asarray(dummy._normal((4096,), np.uint32(stream))) for stream in (0, 1))
    assert len(np.intersect1d(first, second)) < 40  # 2 expected by chance among 2**23 values


def test_no_bits_give_infinity() -> None:
    ends = dummy._to_normal(np.array([0, 1, 2**32 - 1, 2**32 - 512], np.uint32))
    assert (np.abs(ends) < 0.11).all() and (np.abs(ends) > 0.09).all()


def test_no_temporaries() -> None:
    shape = BIG["w"].shape
    compiled = jax.jit(partial(dummy._initialise, BIG["w"])).lower(np.uint32(0)).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < np.prod(shape)


def test_init_kinds() -> None:
    zeros = dataclasses.replace(BIG["w"], init="zeros")
    assert (make({"w": zeros})["w"] == 0).all()
    with pytest.raises(ValueError, match="init: 'uniform' is not one of"):
        make({"w": dataclasses.replace(zeros, init="uniform")})


def test_takes_any_tree_of_specs() -> None:
    """Runtime trees have stacked layers; a leading axis is just another shape."""
    stacked = {"layers": {"w": ParamSpec((2, 4, 3), "float32", ("layers", None, None), "normal")}}
    values = make_dummy_params(stacked, mesh=one_device(), rules=DEFAULT_RULES, seed=0)["layers"]["w"]
    assert isinstance(values, jax.Array) and values.shape == (2, 4, 3)
    assert (values[0] != values[1]).all()


def test_one_program_per_kind_of_parameter(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    monkeypatch.setattr(jax, "jit", lambda *args, jit=jax.jit, **options: made.append(args) or jit(*args, **options))
    make(make_specs())
    assert len(made) == len(set(jax.tree.leaves(make_specs()))) == 4

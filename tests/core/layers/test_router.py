"""Routers against their definition in NumPy."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.core.layers.context import StepContext
from jaxserve.core.layers.router import ExpertGroups, RouterConfig, route
from tests.examples import scale_examples

D, TOKENS = 6, 5


def choose(config: RouterConfig, x: np.ndarray, leaf: dict[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Token by token, as the papers say it."""
    experts, weights = [], []
    for row in x @ leaf["weight"] + leaf.get("bias", 0):
        shifted = np.exp(row - row.max())
        scores = {"softmax": shifted / shifted.sum(), "sigmoid": 1 / (1 + np.exp(-row))}.get(config.scoring, row)
        judged = scores + leaf.get("correction", 0)
        if config.groups is not None:
            parts = np.split(judged, config.groups.count)
            marks = [np.sort(part)[-config.groups.judges :].sum() for part in parts]
            best = np.argsort(-np.array(marks), kind="stable")[: config.groups.chosen]
            size = len(judged) // config.groups.count
            judged = np.where(np.isin(np.arange(len(judged)) // size, best), judged, -np.inf)
        chosen = np.argsort(-judged, kind="stable")[: config.top_k]
        weight = scores[chosen]
        if config.scoring == "softmax_of_chosen":
            weight = np.exp(weight - weight.max()) / np.exp(weight - weight.max()).sum()
        experts.append(chosen)
        weights.append((weight / weight.sum() if config.normalize else weight) * config.scale)
    return np.array(experts), np.array(weights)


@st.composite
def routers(draw: st.DrawFn) -> RouterConfig:
    groups = draw(st.sampled_from([None, ExpertGroups(2, 1, 1), ExpertGroups(4, 2, 2), ExpertGroups(4, 3, 1)]))
    return RouterConfig(
        num_experts=8,
        top_k=draw(st.integers(1, 4)),
        scoring=draw(st.sampled_from(["softmax", "sigmoid", "softmax_of_chosen"])),
        normalize=draw(st.booleans()),
        scale=draw(st.sampled_from([1.0, 2.5])),
        bias=draw(st.booleans()),
        correction=draw(st.booleans()),
        groups=groups,
    )


@settings(max_examples=scale_examples(80), deadline=None)
@given(config=routers(), seed=st.integers(0, 2**32 - 1))
def test_experts_and_weights(config: RouterConfig, seed: int) -> None:
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((TOKENS, D)).astype(np.float32)
    leaf = {"weight": rng.standard_normal((D, 8)).astype(np.float32)}
    leaf |= {"bias": rng.standard_normal(8).astype(np.float32)} if config.bias else {}
    leaf |= {"correction": rng.standard_normal(8).astype(np.float32)} if config.correction else {}
    arrays = {name: jnp.asarray(value) for name, value in leaf.items()}
    experts, weights = route(config, arrays, jnp.asarray(x), StepContext(mesh=None))
    expected, expected_weights = choose(config, x, leaf)
    np.testing.assert_array_equal(experts, expected)
    assert weights.dtype == jnp.float32
    # a sum of raw logits may be near zero, which no model divides by
    if not (config.normalize and config.scoring == "softmax_of_chosen"):
        np.testing.assert_allclose(weights, expected_weights, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid", "softmax_of_chosen"])
def test_of_equals_the_lower_index(scoring: str) -> None:
    config = RouterConfig(num_experts=6, top_k=3, scoring=scoring)
    experts, _ = route(config, {"weight": jnp.zeros((D, 6))}, jnp.ones((2, D)), StepContext(mesh=None))
    assert experts.tolist() == [[0, 1, 2], [0, 1, 2]]


def test_a_router_in_sixteen_bits_keeps_float32_logits() -> None:
    """Two experts whose logits differ by less than bfloat16 can hold."""
    x = jnp.asarray([[256.0, 1.0]], jnp.bfloat16)
    weight = jnp.asarray([[1.0, 1.0], [0.0, 1.0]], jnp.bfloat16)
    experts, _ = route(RouterConfig(2, 1), {"weight": weight}, x, StepContext(mesh=None))
    assert experts.tolist() == [[1]]

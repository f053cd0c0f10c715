"""Frequencies against their closed forms in float64, and what a rotation must and must not change."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.core.layers.rope import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    RopeConfig,
    YarnScaling,
    rotary_table,
    rotate,
)
from jaxserve.core.models.decoder import CacheLayout, list_contexts
from jaxserve.core.models.rope_config import parse_rope
from jaxserve.errors import ConfigError
from jaxserve.families.registry import parse_config
from tests.examples import scale_examples
from tests.golden_cases import load_case

DIM = 64
PLAIN = 10000.0 ** -(np.arange(0, DIM, 2) / DIM)


def frequencies(scaling: object, max_model_len: int = 128, theta: float = 10000.0) -> np.ndarray:
    result = RopeConfig(rotary_dim=DIM, theta=theta, scaling=scaling).inverse_frequencies(max_model_len)
    assert result.dtype == np.float32 and result.shape == (DIM // 2,)
    return result


def test_plain_and_linear_frequencies():
    np.testing.assert_allclose(frequencies(None), PLAIN, rtol=2e-7)
    np.testing.assert_allclose(frequencies(LinearScaling(factor=8.0)), PLAIN / 8.0, rtol=2e-7)


def test_dynamic_frequencies_are_plain_up_to_the_trained_length():
    scaling = DynamicScaling(factor=4.0, trained_length=2048)
    for length in (1, 2047, 2048):
        np.testing.assert_array_equal(frequencies(scaling, length), frequencies(None))
    theta = 10000.0 * (4.0 * 4096 / 2048 - 3.0) ** (DIM / (DIM - 2))
    np.testing.assert_allclose(frequencies(scaling, 4096), theta ** -(np.arange(0, DIM, 2) / DIM), rtol=3e-7)


def test_llama3_frequencies_keep_short_waves_and_stretch_long_ones():
    scaling = Llama3Scaling(factor=8.0, trained_length=8192, low_freq_factor=1.0, high_freq_factor=4.0)
    plain = 500000.0 ** -(np.arange(0, DIM, 2) / DIM)
    wavelength = 2 * math.pi / plain
    got = frequencies(scaling, theta=500000.0)
    short, long = wavelength < 8192 / 4, wavelength > 8192
    assert short.any() and long.any() and (~short & ~long).any()
    np.testing.assert_allclose(got[short], plain[short], rtol=2e-7)
    np.testing.assert_allclose(got[long], plain[long] / 8.0, rtol=2e-7)
    share = (8192 / wavelength - 1.0) / 3.0
    blend = ((1 - share) / 8.0 + share) * plain
    np.testing.assert_allclose(got[~short & ~long], blend[~short & ~long], rtol=2e-6)


@pytest.mark.parametrize("truncate", [True, False])
def test_yarn_frequencies_blend_between_two_rotation_counts(truncate: bool):
    scaling = YarnScaling(factor=4.0, trained_length=4096, attention_factor=1.0, truncate=truncate)
    low, high = (DIM * math.log(4096 / (turns * 2 * math.pi)) / (2 * math.log(10000.0)) for turns in (32.0, 1.0))
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    ramp = np.clip((np.arange(DIM // 2) - low) / (high - low), 0, 1)
    np.testing.assert_allclose(frequencies(scaling), PLAIN * (1 - ramp) + PLAIN / 4.0 * ramp, rtol=1e-6)


def test_yarn_with_a_single_step_does_not_divide_by_zero():
    scaling = YarnScaling(factor=4.0, trained_length=8, attention_factor=1.0, beta_fast=1e9, beta_slow=1e8)
    assert np.isfinite(frequencies(scaling)).all()


def test_longrope_takes_one_list_of_factors_for_all_lengths():
    short, long = tuple(np.linspace(1, 2, DIM // 2)), tuple(np.linspace(3, 60, DIM // 2))
    scaling = LongRopeScaling(trained_length=4096, attention_factor=1.19, short_factor=short, long_factor=long)
    np.testing.assert_allclose(frequencies(scaling, 4096), PLAIN / short, rtol=3e-7)
    np.testing.assert_allclose(frequencies(scaling, 4097), PLAIN / long, rtol=3e-7)


def test_table_is_exact_at_far_positions_and_carries_the_attention_factor():
    scaling = YarnScaling(factor=4.0, trained_length=4096, attention_factor=1.25)
    rope = RopeConfig(rotary_dim=DIM, theta=10000.0, scaling=scaling)
    positions = np.array([0, 1, 2047, 65535, 131071], np.int32)
    cos, sin = rotary_table(rope, jnp.asarray(positions), 131072)
    assert cos.dtype == sin.dtype == jnp.float32
    angles = (positions[:, None].astype(np.float32) * rope.inverse_frequencies(131072)).astype(np.float64)
    np.testing.assert_allclose(cos, 1.25 * np.cos(angles), atol=2e-6)
    np.testing.assert_allclose(sin, 1.25 * np.sin(angles), atol=2e-6)


@settings(max_examples=scale_examples(20), deadline=None)
@given(position=st.integers(0, 4096), shift=st.integers(0, 4096), seed=st.integers(0, 99))
def test_products_depend_on_distance_only(position: int, shift: int, seed: int):
    rope = RopeConfig(rotary_dim=DIM, theta=10000.0)
    q, k = np.random.default_rng(seed).standard_normal((2, 1, 1, DIM)).astype(np.float32)

    def product(q_position: int, k_position: int) -> float:
        tables = [rotary_table(rope, jnp.array([p]), 8192) for p in (q_position, k_position)]
        return float(jnp.vdot(rotate(jnp.asarray(q), *tables[0]), rotate(jnp.asarray(k), *tables[1])))

    assert product(position + 7, position) == pytest.approx(product(position + shift + 7, position + shift), abs=2e-2)


def test_dimensions_beyond_the_rotary_ones_pass_through():
    rope = RopeConfig(rotary_dim=48, theta=10000.0)
    x = np.random.default_rng(0).standard_normal((3, 2, 64)).astype(np.float32)
    cos, sin = rotary_table(rope, jnp.array([0, 5, 900]), 1024)
    got = np.asarray(rotate(jnp.asarray(x), cos, sin))
    np.testing.assert_array_equal(got[..., 48:], x[..., 48:])
    np.testing.assert_array_equal(got[0], x[0])
    first, second = got[..., :24], got[..., 24:48]
    np.testing.assert_allclose(first, x[..., :24] * cos[:, None] - x[..., 24:48] * sin[:, None], atol=1e-6)
    np.testing.assert_allclose(second, x[..., 24:48] * cos[:, None] + x[..., :24] * sin[:, None], atol=1e-6)


def test_rotation_keeps_the_dtype():
    cos, sin = rotary_table(RopeConfig(rotary_dim=DIM, theta=1e4), jnp.arange(2), 8)
    assert rotate(jnp.ones((2, 1, DIM), jnp.bfloat16), cos, sin).dtype == jnp.bfloat16


@pytest.mark.parametrize("case", ["llama_gqa", "gemma3_text"])
def test_layers_share_the_tables_of_a_step(case: str) -> None:
    """XLA would put cosines into each fusion that rotates: as many as layers times heads."""
    config = parse_config(json.loads((load_case(case).path / "config.json").read_text()))
    num_ropes = len({kind.rope for kind in config.layers})
    assert num_ropes == (1 if case == "llama_gqa" else 2)
    layout = CacheLayout((0,) * config.num_layers, (0,) * config.num_layers, (0,))
    dim = config.attentions[0].head_dim

    def rotate_in_layers(x: jax.Array, positions: jax.Array) -> jax.Array:
        batch: Any = SimpleNamespace(positions=positions, query_start_loc=jnp.array([0, 16]))
        for context in list_contexts(config, (batch,), layout, None, only_stores=False):
            assert context.rotary is not None
            x = rotate(x, *context.rotary) @ jnp.ones((dim, dim))
        return x

    arguments = jnp.ones((16, 8, dim)), jnp.arange(16)
    program = jax.jit(rotate_in_layers).lower(*arguments).compile().as_text()
    assert program.count(" cosine(") == program.count(" sine(") == num_ropes


def test_equal_positions_of_an_image_have_the_bits_of_a_text() -> None:
    text, image = RopeConfig(64, 5e6), RopeConfig(64, 5e6, sections=(12, 10, 10))
    positions = jnp.asarray([0, 1, 77, 4095, 200_000])
    for plain, three in zip(
        rotary_table(text, positions, 2**18), rotary_table(image, jnp.stack([positions] * 3), 2**18), strict=True
    ):
        assert (np.asarray(plain) == np.asarray(three)).all()


def test_frequencies_take_turns_with_rows_and_columns() -> None:
    """Of every three, the second rotates by the row and the third by the column, as long as sections say."""
    rope = RopeConfig(20, 100.0, sections=(5, 3, 2))
    assert rope.list_axes().tolist() == [0, 1, 2, 0, 1, 2, 0, 1, 0, 0]
    positions = np.array([[3, 3], [5, 6], [9, 8]])
    cosines, _ = rotary_table(rope, jnp.asarray(positions), 64)
    wanted = np.cos(positions[rope.list_axes()].T * rope.inverse_frequencies(64).astype(np.float64))
    np.testing.assert_allclose(np.asarray(cosines), wanted, atol=1e-6)


def test_sections_are_read_where_frequencies_take_turns() -> None:
    given = {"rope_theta": 1e4, "mrope_section": [4, 2, 2]}
    assert parse_rope(given, head_dim=16, max_position_embeddings=64).sections is None, "in blocks: served as text"
    found = parse_rope({**given, "mrope_interleaved": True}, head_dim=16, max_position_embeddings=64)
    assert found.sections == (4, 2, 2)
    with pytest.raises(ConfigError, match="mrope_section"):
        parse_rope(
            {**given, "mrope_interleaved": True, "mrope_section": [4, 4]}, head_dim=16, max_position_embeddings=64
        )

from __future__ import annotations

import jax
import numpy as np

from jaxserve.core.sampling import draw_uniforms, row_keys
from jaxserve.core.sampling.randomness import draw_numbers
from tests.core.sampling.cases import make_inputs

S = 64


def key_data(seed: int, sequence_index, positions) -> np.ndarray:
    """u32[S, 2], with the seed split as the host splits it."""
    columns = np.broadcast_arrays(np.uint32(seed & 0xFFFFFFFF), np.uint32(seed >> 32), sequence_index, positions)
    columns = [np.atleast_1d(column) for column in columns]
    return np.asarray(jax.random.key_data(row_keys(*columns)))


def test_keys_are_jax_keys_folded_in_order() -> None:
    with jax.enable_x64(True):
        expected = jax.random.key((3 << 32) + 5)
    for number in (2, 17, 0):
        expected = jax.random.fold_in(expected, number)
    np.testing.assert_array_equal(key_data((3 << 32) + 5, 2, 17)[0], jax.random.key_data(expected))


def test_a_seed_draws_the_same_in_every_release() -> None:
    """The numbers that users' seeds depend on: the generator, the order of folding."""
    columns = ([1234, 1234, -1], [0, 5, 5], [0, 1, 0], [100, 7, 0])
    keys = row_keys(*(np.array(column, np.int32) for column in columns))
    np.testing.assert_array_equal(jax.vmap(jax.random.uniform)(keys), np.float32([1417765, 6487104, 3988105]) / 2**23)
    names = ("seed_low", "seed_high", "sequence_index", "positions")
    inputs = make_inputs(3, **{name: np.array(column) for name, column in zip(names, columns, strict=True)})
    for setting in (jax.enable_x64(True), jax.threefry_partitionable(False), jax.default_prng_impl("rbg")):
        with setting:  # of the process, and not our affair
            drawn = jax.jit(draw_uniforms)(inputs)
        assert drawn.dtype == np.float32
        np.testing.assert_array_equal(drawn, np.float32([1417765, 6487104, 3988105]) / 2**23)


def test_numbers_are_those_of_jax() -> None:
    positions = np.arange(1000, dtype=np.int32)
    zeros = np.zeros_like(positions)
    keys = row_keys(zeros, zeros, zeros, positions)
    np.testing.assert_array_equal(draw_numbers(keys), jax.vmap(jax.random.uniform)(keys))


def test_seed_halves_may_travel_as_int32_bits() -> None:
    seed = 2**63 - 2**31 - 7  # the low half does not fit int32
    low, high = np.array([seed & 0xFFFFFFFF], np.uint32), np.array([seed >> 32], np.uint32)
    zero = np.zeros(1, np.int32)
    as_bits = row_keys(low.view(np.int32), high.view(np.int32), zero, zero)
    np.testing.assert_array_equal(jax.random.key_data(as_bits), key_data(seed, 0, 0))


def test_every_part_of_a_key_makes_another_stream() -> None:
    seeds = (0, 1, 1 << 32, (1 << 32) + 1, 2**63 - 1)
    keys = np.stack([key_data(seed, index, np.arange(S)) for seed in seeds for index in range(12)])
    assert len(np.unique(keys.reshape(-1, 2), axis=0)) == len(keys) * S
    uniforms = np.asarray(jax.vmap(jax.random.uniform)(jax.random.wrap_key_data(keys.reshape(-1, 2)))).reshape(-1, S)
    correlation = np.corrcoef(uniforms) - np.eye(len(uniforms))
    assert np.abs(correlation).max() < 5 / np.sqrt(S)
    assert abs(uniforms.mean() - 0.5) < 5 * np.sqrt(1 / 12 / uniforms.size)


def test_generator_does_not_follow_the_process_default() -> None:
    expected = key_data(7, 0, np.arange(4))
    with jax.default_prng_impl("rbg"):
        np.testing.assert_array_equal(key_data(7, 0, np.arange(4)), expected)

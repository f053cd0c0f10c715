"""Stateless randomness: a key depends on seed, sequence and position alone, never on the step or the other rows."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32, Int, Key

_DRAW = 0  # folded in last; must not change, or all seeded outputs do


def row_keys(
    seed_low: Int[Array, " S"],
    seed_high: Int[Array, " S"],
    sequence_index: Int[Array, " S"],
    positions: Int[Array, " S"],
) -> Key[Array, " S"]:
    """Returns `fold_in(fold_in(fold_in(key(seed), sequence_index), position), 0)` for every row.

    `seed_low` and `seed_high` are the 32-bit halves of a 64-bit seed, as uint32 or as the same bits in int32; the key
    is that of `jax.random.key(seed)` with 64-bit types enabled. The generator is always Threefry, whatever
    `jax_default_prng_impl` says, so that a seed means the same draw in every process.
    """
    data = jnp.stack([seed_high, seed_low], axis=-1).astype(jnp.uint32)
    keys = jax.random.wrap_key_data(data, impl="threefry2x32")
    for number in (sequence_index, positions, jnp.full_like(positions, _DRAW)):
        keys = jax.vmap(jax.random.fold_in)(keys, number)
    return keys


def draw_numbers(keys: Key[Array, " S"]) -> Float32[Array, " S"]:
    """Returns a number in [0, 1) of 23 random bits per key: `jax.random.uniform` of it under JAX's default settings.

    The number is made from the bits of one more fold, because `jax.random.uniform` depends on the process's settings
    (`jax_enable_x64`, `jax_threefry_partitionable`).
    """
    words = jax.random.key_data(jax.vmap(jax.random.fold_in)(keys, jnp.zeros(len(keys), jnp.uint32)))
    return ((words[:, 0] ^ words[:, 1]) >> 9).astype(jnp.float32) * jnp.float32(2**-23)

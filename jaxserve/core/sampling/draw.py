"""Draws a row's token after its filters; on CPUs from the blocks with the largest tokens if these suffice."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Int32

from jaxserve.core.sampling.thresholds import (
    BLOCK,
    Filters,
    find_mass_target,
    find_threshold,
    search_fixed,
    search_until_exact,
    sum_weights,
)

NUM_CANDIDATE_BLOCKS = 128  # 16,384 tokens


class RowLogits(NamedTuple):
    """A row of logits, in blocks."""

    blocks: Float[Array, "n b"]  # `BLOCK` logits each; -inf where there is no token
    maxima: Float[Array, " n"]  # each block's largest logit
    scale: Float[Array, ""]  # 1 / temperature

    def rescale(self, logits: Float[Array, "*dims"]) -> Float32[Array, "*dims"]:
        """Returns some of the row's logits for `find_threshold`: (logits - the row's largest) / temperature."""
        return (logits - jnp.max(self.maxima)) * self.scale


def draw(row: RowLogits, filters: Filters, uniform: Float[Array, ""]) -> Int32[Array, ""]:
    """Returns the token at which the kept tokens' cumulative weights, in vocabulary order, pass `uniform` in [0, 1).

    `find_threshold` decides which tokens are kept.
    """
    # XLA:GPU copies the predicate of a branch or an open loop to the host and waits for it.
    return lax.platform_dependent(row, filters, uniform, cpu=draw_from_few, default=draw_in_fixed_passes)


def draw_in_fixed_passes(row: RowLogits, filters: Filters, uniform: Float[Array, ""]) -> Int32[Array, ""]:
    """`draw` for accelerators."""
    scaled = row.rescale(row.blocks)
    return invert_cumulative(scaled, _weigh_from(find_threshold(search_fixed, scaled, filters)), uniform)


def draw_from_few(row: RowLogits, filters: Filters, uniform: Float[Array, ""]) -> Int32[Array, ""]:
    """`draw` for CPUs: from the blocks with the largest tokens, if the filters keep no token outside them.

    These blocks hold all tokens above `floor`, the smallest of their maxima. So they suffice if min_p lies above
    `floor`, if k tokens lie above it, or if the tokens above it have the mass that top_p asks for.
    """

    def sum_all() -> Array:
        return sum_weights(row.rescale(row.blocks), filters.low)

    def draw_from_all() -> Array:
        scaled = row.rescale(row.blocks)
        return invert_cumulative(scaled, _weigh_from(find_threshold(search_until_exact, scaled, filters)), uniform)

    if len(row.blocks) <= NUM_CANDIDATE_BLOCKS:
        return draw_from_all()

    def narrow() -> Array:
        top, chosen = lax.top_k(row.maxima, NUM_CANDIDATE_BLOCKS)
        chosen, floor = jnp.sort(chosen), row.rescale(top[-1])  # in vocabulary order again
        few = row.rescale(row.blocks[chosen])
        is_enough = (filters.low > floor) | (jnp.sum(few > floor) >= filters.count)
        low = search_until_exact(few, jnp.ones_like, filters.count, filters.low)

        def find_mass() -> Array:
            return lax.cond(is_enough, lambda: sum_weights(few, low), sum_all)

        target = find_mass_target(filters, find_mass)
        above = jnp.sum(jnp.where(few > floor, jnp.exp(few), 0))
        is_enough |= ~filters.is_counted & (above >= target)

        def draw_from_candidates() -> Array:
            threshold = search_until_exact(few, jnp.exp, target, low)
            place = invert_cumulative(few, _weigh_from(threshold), uniform)
            return chosen[place // BLOCK] * BLOCK + place % BLOCK

        return lax.cond(is_enough, draw_from_candidates, draw_from_all)

    return lax.cond(filters.is_any_on, narrow, draw_from_all)


def _weigh_from(threshold: Float[Array, ""]) -> Callable[[Array], Array]:
    return lambda scaled: jnp.where(scaled >= threshold, jnp.exp(scaled), 0)


def invert_cumulative(
    lines: Float[Array, "n b"], weigh: Callable[[Array], Array], uniform: Float[Array, ""]
) -> Int32[Array, ""]:
    """Returns the flat index of the entry at which the cumulative weights, line by line, pass `uniform` of their sum.

    Searches the sums of lines first, then one line.
    """
    sums = jnp.sum(weigh(lines), axis=-1)
    line, rest = _invert(sums, uniform * jnp.sum(sums))
    column, _ = _invert(weigh(lines[line]), rest)
    return line * lines.shape[1] + column


def _invert(weights: Float[Array, " n"], target: Float[Array, ""]) -> tuple[Int32[Array, ""], Float32[Array, ""]]:
    """Returns the entry that `target` falls into, and how far into it.

    It is the last positive entry that begins at or below the target. There always is one, because the first positive
    entry begins at exactly zero. So no rounding can select an entry without weight.
    """
    begins = jnp.pad(jnp.cumsum(weights), (1, 0))[:-1]
    entries = jnp.arange(len(weights), dtype=jnp.int32)
    index = jnp.max(jnp.where((weights > 0) & (begins <= target), entries, 0))
    return index, jnp.maximum(target - begins[index], 0)

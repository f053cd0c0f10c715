"""Drawing one token of a row by its filters: everywhere the same token, on CPUs from as few of them as will do."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Int32

from jaxserve.sampling.thresholds import (
    BLOCK,
    Filters,
    find_mass_target,
    find_threshold,
    search_fixed,
    search_until_exact,
    sum_weights,
)

NUM_CANDIDATE_BLOCKS = 128  # so at least as many tokens, and 16,384 at most


class RowLogits(NamedTuple):
    """A row of logits as it is drawn from."""

    blocks: Float[Array, "n b"]  # the logits, `BLOCK` in each; -inf where there is no token
    maxima: Float[Array, " n"]  # the largest of each block
    scale: Float[Array, ""]  # 1 / temperature

    def rescale(self, logits: Float[Array, "*dims"]) -> Float32[Array, "*dims"]:
        """Some of its logits as `find_threshold` wants them: relative to the largest, divided by the temperature."""
        return (logits - jnp.max(self.maxima)) * self.scale


def draw(row: RowLogits, filters: Filters, uniform: Float[Array, ""]) -> Int32[Array, ""]:
    """Returns the token that `uniform` in [0, 1) falls on in the cumulative weights of the kept ones, in their order.

    What is kept is `find_threshold`'s affair.
    """
    # XLA:GPU copies the predicate of a branch or of an open loop to the host and waits for it, at every step.
    return lax.platform_dependent(row, filters, uniform, cpu=draw_from_few, default=draw_in_fixed_passes)


def draw_in_fixed_passes(row: RowLogits, filters: Filters, uniform: Float[Array, ""]) -> Int32[Array, ""]:
    """The form of `draw` for accelerators."""
    scaled = row.rescale(row.blocks)
    return invert_cumulative(scaled, _weigh_from(find_threshold(search_fixed, scaled, filters)), uniform)


def draw_from_few(row: RowLogits, filters: Filters, uniform: Float[Array, ""]) -> Int32[Array, ""]:
    """The form of `draw` for CPUs: from the blocks with the largest tokens, if the filters keep no token beside them.

    All tokens above `floor`, the smallest of these blocks' maxima, are in them. So nothing else counts if min_p lies
    above it, or there are k tokens above it, or their mass is what top_p wants.
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
    """Inverts the cumulative sum of the entries' weights, read line by line: first over lines, then within one."""
    sums = jnp.sum(weigh(lines), axis=-1)
    line, rest = _invert(sums, uniform * jnp.sum(sums))
    column, _ = _invert(weigh(lines[line]), rest)
    return line * lines.shape[1] + column


def _invert(weights: Float[Array, " n"], target: Float[Array, ""]) -> tuple[Int32[Array, ""], Float32[Array, ""]]:
    """Returns the entry that `target` falls into and how far into it.

    It is the last positive entry that begins at or below the target. The first positive one begins at exactly zero, so
    there always is one: no rounding, here or in the target, can select an entry without weight.
    """
    begins = jnp.pad(jnp.cumsum(weights), (1, 0))[:-1]
    entries = jnp.arange(len(weights), dtype=jnp.int32)
    index = jnp.max(jnp.where((weights > 0) & (begins <= target), entries, 0))
    return index, jnp.maximum(target - begins[index], 0)

"""The threshold at which min-p, top-k and top-p cut a row of logits, found without sorting it.

Each filter keeps the tokens above some value, so together they are one threshold per row, found by bisection with
masked sums over the vocabulary. The two forms of the search keep the same tokens; the platform decides which is used
(`draw.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Int

BLOCK = 128  # tokens per partial sum over the vocabulary, and a vector register's lanes on TPU

# Tokens below exp(-64) = 1.6e-28 times the weight of the likeliest are dropped: 23 random bits never reach them, and
# all other weights are normal float32, so a token is kept exactly if its weight is positive.
LOWEST = -64.0
_LEAST_TOP_P = 1e-30  # keeps the likeliest token only; 0 would keep none
_SPAN_BITS = 32  # bisection ends at 64 / 2**32 = 1.5e-8, a quarter of the rounding error of a weight near one
_BITS_PER_PASS = 4  # in the fixed search: 8 passes of 15 sums, few kernels that read the row once or twice

Weigh = Callable[[Array], Array]
Search = Callable[[Array, Weigh, Array, Array], Array]


class Filters(NamedTuple):
    """A row's filters, as targets of `find_threshold`."""

    low: Float32[Array, ""]  # log(min_p), at least LOWEST: no token below is kept
    count: Float32[Array, ""]  # top_k; infinity: off
    top_p: Float32[Array, ""]  # 1 or more: off

    @property
    def is_counted(self) -> Array:
        return self.count < jnp.inf

    @property
    def is_any_on(self) -> Array:
        return self.is_counted | (self.top_p < 1) | (self.low > LOWEST)


def make_filters(top_k: Int[Array, ""], top_p: Float[Array, ""], min_p: Float[Array, ""], vocab_size: int) -> Filters:
    """Returns a row's filters, off at `min_p` 0, `top_k` outside [1, vocab_size), `top_p` >= 1."""
    count = jnp.where((top_k > 0) & (top_k < vocab_size), top_k.astype(jnp.float32), jnp.inf)
    return Filters(jnp.maximum(jnp.log(min_p), LOWEST), count, jnp.maximum(top_p, _LEAST_TOP_P))


def find_threshold(search: Search, scaled: Float[Array, "n b"], filters: Filters) -> Float32[Array, ""]:
    """Returns the threshold t: tokens with `scaled >= t` are kept.

    `scaled` is (logits - their maximum) / temperature in lines of any length, -inf where there is no token: exp(scaled)
    is a token's weight relative to the likeliest. Filters apply in vLLM's order: min_p, top_k, then top_p over the mass
    that is left. The likeliest token always stays. Ties are kept whole, so more than k tokens may stay; tokens are tied
    if their `scaled` differ by less than 1.5e-8 or in the last bit only.
    """
    low = search(scaled, jnp.ones_like, filters.count, filters.low)
    return search(scaled, jnp.exp, find_mass_target(filters, lambda: sum_weights(scaled, low)), low)


def find_mass_target(filters: Filters, find_mass: Callable[[], Array]) -> Float32[Array, ""]:
    """Returns the mass that top_p keeps of `find_mass()`, which runs only if top_p is on; infinity: all of it."""
    return lax.cond(filters.top_p < 1, lambda: filters.top_p * find_mass(), lambda: jnp.float32(jnp.inf))


def sum_weights(scaled: Float[Array, "*dims"], low: Float[Array, ""]) -> Float32[Array, ""]:
    """Returns the mass of the tokens with `scaled >= low`."""
    return jnp.sum(jnp.where(scaled >= low, jnp.exp(scaled), 0))


def search_until_exact(scaled: Array, weigh: Weigh, target: Array, low: Array) -> Array:
    """Returns a t in [low, 0] that keeps the fewest tokens `scaled >= t` whose weights sum to `target`; else `low`.

    Stops when no token can be spared: the kept mass without a token at the threshold, the lightest possible, misses the
    target. That is long before t is known to the last bit.
    """

    def search() -> Array:
        weights = weigh(scaled)

        def can_shrink(state: tuple[Array, Array, Array, Array]) -> Array:
            passes, low, _, mass = state
            return (passes < _SPAN_BITS) & (mass - weigh(low) >= target)

        def halve(state: tuple[Array, Array, Array, Array]) -> tuple[Array, Array, Array, Array]:
            passes, low, width, mass = state
            width = width / 2
            middle = low + width
            mass_above = jnp.sum(jnp.where(scaled >= middle, weights, 0))
            enough = mass_above >= target
            return passes + 1, jnp.where(enough, middle, low), width, jnp.where(enough, mass_above, mass)

        mass = jnp.sum(jnp.where(scaled >= low, weights, 0))
        return lax.while_loop(can_shrink, halve, (jnp.int32(0), low, -low, mass))[1]

    return lax.cond(target < jnp.inf, search, lambda: low)


def search_fixed(scaled: Array, weigh: Weigh, target: Array, low: Array) -> Array:
    """`search_until_exact` in a fixed number of passes, each over several thresholds, without a branch."""

    def narrow(_: Array, state: tuple[Array, Array]) -> tuple[Array, Array]:
        low, width = state
        # Widths are powers of two, so their multiples are exact and a fused multiply-add rounds like a plain sum: the
        # returned threshold is bit for bit one whose mass was found sufficient.
        width = width / 2**_BITS_PER_PASS
        thresholds = [low + multiple * width for multiple in range(1, 2**_BITS_PER_PASS)]
        # Summing by lines first, then over all thresholds at once, takes 7 GPU kernels per pass instead of 20.
        sums = [jnp.sum(jnp.where(scaled >= threshold, weigh(scaled), 0), axis=-1) for threshold in thresholds]
        enough = jnp.sum(jnp.stack(sums), axis=-1) >= target
        return jnp.max(jnp.where(enough, jnp.stack(thresholds), low)), width

    return lax.fori_loop(0, _SPAN_BITS // _BITS_PER_PASS, narrow, (low, jnp.float32(-LOWEST)))[0]

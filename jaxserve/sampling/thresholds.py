"""Where min-p, top-k and top-p cut a row of logits, found without sorting it.

All three filters keep the tokens above some value, so together they are one threshold per row. It is found by
bisection: each pass is one masked sum over the vocabulary. There are two forms of the search, which keep the same
tokens; the platform alone decides which is used.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

BLOCK = 128  # tokens per partial sum over the vocabulary, and a vector register's lanes on TPU

# Tokens below exp(-64) = 1.6e-28 times the weight of the likeliest are dropped: 23 random bits never reach them, and
# above it every weight is a normal float32, so that "kept" and "weight > 0" are the same thing.
_LOWEST = -64.0
_SPAN_BITS = 32  # bisection ends at 64 / 2**32 = 1.5e-8, a quarter of the rounding error of a weight near one
_BITS_PER_PASS = 4  # of the fixed search: 15 sums in each of 8 passes, few kernels that read the row once or twice

_Weigh = Callable[[Array], Array]
_Search = Callable[[Array, _Weigh, Array, Array], Array]


def find_thresholds(
    scaled: Float[Array, "S V"],
    top_k: Int[Array, " S"],
    top_p: Float[Array, " S"],
    min_p: Float[Array, " S"],
) -> Float[Array, " S"]:
    """Returns for each row the threshold t such that the tokens with `scaled >= t` are kept.

    `scaled` is (logits - their maximum) / temperature, so that exp(scaled) is a token's weight relative to the
    likeliest; V is a multiple of `BLOCK`, padded by -inf. The filters apply in vLLM's order: min_p, then top_k, then
    top_p over the mass of what is left. A filter is off at `min_p` 0, `top_k` outside [1, V), `top_p` >= 1. The
    likeliest token always stays. Ties are kept whole, so more than k tokens may stay; tokens count as tied when their
    `scaled` differ by less than 1.5e-8 or in the last bit only.
    """
    size = scaled.shape[-1]
    count = jnp.where((top_k > 0) & (top_k < size), top_k.astype(jnp.float32), jnp.inf)
    low = jnp.maximum(jnp.log(min_p), _LOWEST)
    # XLA:GPU copies the predicate of a branch or of an open loop to the host and waits for it, at every step.
    return lax.platform_dependent(scaled, low, count, top_p, cpu=_search_each_row, default=_search_all_rows)


def _search_each_row(scaled: Array, low: Array, count: Array, top_p: Array) -> Array:
    """Rows one by one, each for as long as it needs: a row stays in the nearest cache, an unfiltered one is free."""

    def one_row(row: tuple[Array, Array, Array, Array]) -> Array:
        _, low, count, top_p = row
        filtered = jnp.isfinite(count) | (top_p < 1)
        return lax.cond(filtered, partial(_filter_row, _search_until_exact), lambda *_: low, *row)

    return lax.map(one_row, (scaled, low, count, top_p))


def _search_all_rows(scaled: Array, low: Array, count: Array, top_p: Array) -> Array:
    """All rows together in a fixed number of passes, without a branch."""
    return jax.vmap(partial(_filter_row, _search_fixed))(scaled, low, count, top_p)


def _filter_row(search: _Search, scaled: Array, low: Array, count: Array, top_p: Array) -> Array:
    """top_k from `low` upwards, then top_p from there. A target of infinity is never met: that filter is off."""
    low = search(scaled, jnp.ones_like, count, low)
    kept_mass = jnp.sum(jnp.where(scaled >= low, jnp.exp(scaled), 0))
    return search(scaled, jnp.exp, jnp.where(top_p < 1, top_p * kept_mass, jnp.inf), low)


def _search_until_exact(scaled: Array, weigh: _Weigh, target: Array, low: Array) -> Array:
    """The highest t in [low, 0] such that the weights of `scaled >= t` sum to `target`; `low` if none does.

    Stops when no token can be spared: the kept mass less a token at the threshold, the lightest there can be, misses
    the target. That is long before t is known to the last bit.
    """
    weights = weigh(scaled)
    mass = jnp.sum(jnp.where(scaled >= low, weights, 0))

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

    return lax.while_loop(can_shrink, halve, (jnp.int32(0), low, -low, mass))[1]


def _search_fixed(scaled: Array, weigh: _Weigh, target: Array, low: Array) -> Array:
    """As `_search_until_exact`, always in the same passes, each with several thresholds at once."""
    # Summing by blocks first and then all thresholds together makes 7 GPU kernels of a pass instead of 20.
    blocks = scaled.reshape(-1, BLOCK)

    def narrow(_: Array, state: tuple[Array, Array]) -> tuple[Array, Array]:
        low, width = state
        # Widths are powers of two, so their multiples are exact and a fused multiply-add rounds as a plain sum does:
        # the threshold returned is bit for bit one whose mass was found sufficient.
        width = width / 2**_BITS_PER_PASS
        thresholds = [low + multiple * width for multiple in range(1, 2**_BITS_PER_PASS)]
        sums = [jnp.sum(jnp.where(blocks >= threshold, weigh(blocks), 0), axis=-1) for threshold in thresholds]
        enough = jnp.sum(jnp.stack(sums), axis=-1) >= target
        return jnp.max(jnp.where(enough, jnp.stack(thresholds), low)), width

    return lax.fori_loop(0, _SPAN_BITS // _BITS_PER_PASS, narrow, (low, jnp.float32(-_LOWEST)))[0]

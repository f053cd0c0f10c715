"""The online softmax of the TPU kernels (Milakov and Gimelshein, 2018), in base 2, which TPUs compute natively."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.layout import LANES
from pallas_kernels.tpu.pages import Ref, Scalar

MASKED = -1e30  # finite, so that a query without keys stays finite
LOG2E = math.log2(math.e)


@dataclass(frozen=True)
class Accumulator:
    """The state of the online softmax, by group of query rows; `largest` and `total` fill the lanes of a tile.

    The sum of the weights is kept per lane, and added up once at the end.
    """

    largest: Ref  # [groups, rows, 128] f32, of scores in base 2
    total: Ref  # [groups, rows, 128] f32
    mixed: Ref  # [groups, rows, width] f32

    def reset(self, group: Any, sinks: jax.Array | None) -> None:
        """Starts anew, with `sinks` [rows, 128] f32 in base 2 as a first key without a value, if there are any."""
        largest, total = _begin(self.largest[group].shape, sinks)
        self.largest[group], self.total[group] = largest, total
        self.mixed[group] = jnp.zeros(self.mixed[group].shape, jnp.float32)

    def add(self, group: Any, scores: jax.Array, values: jax.Array) -> None:
        """Adds keys with `scores` [rows, E] f32 in base 2 and `values` [E, width]."""
        old, total, mixed = self.largest[group], self.total[group], self.mixed[group]
        self._store(group, old, total, mixed, scores, values)

    def add_first(self, group: Any, scores: jax.Array, values: jax.Array, sinks: jax.Array | None) -> None:
        """`reset` and `add` in one, without a round trip through memory."""
        largest, total = _begin((scores.shape[0], LANES), sinks)
        self._store(group, largest, total, None, scores, values)

    def _store(
        self,
        group: Any,
        old: jax.Array,
        total: jax.Array,
        mixed: jax.Array | None,
        scores: jax.Array,
        values: jax.Array,
    ) -> None:
        new = jnp.maximum(old, jnp.max(scores, axis=1, keepdims=True))
        weights = jnp.exp2(scores - widen(new, scores.shape[1]))
        shrink = jnp.exp2(old - new)
        self.largest[group] = new
        self.total[group] = total * shrink + _add_lanes(weights)
        added = multiply(weights.astype(values.dtype), values, transpose=False)
        self.mixed[group] = added if mixed is None else mixed * widen(shrink, mixed.shape[1]) + added

    def finish(self, group: Any, factor: jax.Array) -> jax.Array:
        """The weighted mean of the values, times `factor`: [rows, width] f32."""
        total = jnp.sum(self.total[group], axis=1, keepdims=True)
        return self.mixed[group] * (factor / total)


def _begin(shape: tuple[int, ...], sinks: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """The largest score and the sum of the weights before the first key."""
    if sinks is None:
        return jnp.full(shape, MASKED, jnp.float32), jnp.zeros(shape, jnp.float32)
    lane = lax.broadcasted_iota(jnp.int32, shape, 1)
    return sinks, jnp.where(lane == 0, 1.0, 0.0)


def _add_lanes(weights: jax.Array) -> jax.Array:
    """[rows, E] -> [rows, 128] with the same sum."""
    num_keys = weights.shape[1]
    if num_keys % LANES:
        lane = lax.broadcasted_iota(jnp.int32, (weights.shape[0], LANES), 1)
        return jnp.where(lane == 0, jnp.sum(weights, axis=1, keepdims=True), 0.0)
    return sum(weights[:, begin : begin + LANES] for begin in range(0, num_keys, LANES))


def widen(lanes: jax.Array, width: int) -> jax.Array:
    """[rows, 128] with equal columns -> [rows, width]."""
    if width < LANES:
        return lanes[:, :width]
    return lanes if width == LANES else jnp.concatenate([lanes] * (width // LANES), axis=1)


def keep_values(values: jax.Array, is_kept: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """Values [E, width] with zeros for tokens that are not kept, by their i32 indices. 16-bit values are two to a word:
    a mask of words costs half as much as one of halves."""
    shape = (values.shape[0] * values.dtype.itemsize // 4, values.shape[1])
    words = pltpu.bitcast(values, jnp.int32)
    tokens = lax.broadcasted_iota(jnp.int32, shape, 0) * (4 // values.dtype.itemsize)
    if values.dtype.itemsize == 4:
        words = jnp.where(is_kept(tokens), words, 0)
    else:
        low, high = (jnp.where(is_kept(tokens), 0xFFFF, 0), jnp.where(is_kept(tokens + 1), -0x10000, 0))
        words &= low | high
    return pltpu.bitcast(words, values.dtype)


def multiply(left: jax.Array, right: jax.Array, *, transpose: bool) -> jax.Array:
    """left @ right, or left @ right.T, in float32; float32 operands are not rounded to bfloat16."""
    axis = 1 if transpose else 0
    precision = lax.Precision.HIGHEST if left.dtype == jnp.float32 else None
    return lax.dot_general(
        left, right, (((1,), (axis,)), ((), ())), precision=precision, preferred_element_type=jnp.float32
    )


def bend(scores: jax.Array, factor: jax.Array, softcap: float | None) -> jax.Array:
    """Scores in base 2 from products of queries and keys; `factor` is `find_factor`'s."""
    scores = scores * factor
    return scores if softcap is None else jnp.tanh(scores) * (softcap * LOG2E)


def find_factor(scale: float, softcap: float | None) -> float:
    """The factor of products in `bend`."""
    return scale * LOG2E if softcap is None else scale / softcap


def run_heads(
    num_heads: int, together: int, score: Callable[[Scalar], jax.Array], add: Callable[[Scalar, jax.Array], None]
) -> None:
    """Calls `add(head, score(head))` for all heads, up to `together` in one stretch of code. There, the scores of a
    head come before the values of the previous one: their dependent steps fill each other's gaps."""
    together = max(n for n in range(1, min(together, num_heads) + 1) if num_heads % n == 0)

    def run_group(group: Scalar, carry: int) -> int:
        head, scores = group * together, score(group * together)
        for following in range(1, together):
            next_head = group * together + following
            next_scores = score(next_head)
            add(head, scores)
            head, scores = next_head, next_scores
        add(head, scores)
        return carry

    if together == num_heads:
        run_group(0, 0)
    else:
        lax.fori_loop(0, num_heads // together, run_group, 0)

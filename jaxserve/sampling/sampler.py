"""From logits to token ids, a row at a time in meaning and all rows at once in execution."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Int32

from jaxserve.sampling.randomness import Purpose, row_keys
from jaxserve.sampling.thresholds import BLOCK, find_thresholds

_GREEDY_BELOW = 1e-5  # a colder row is greedy (vLLM's limit): 1 / temperature must stay far from overflow


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SamplingInputs:
    """The sampling parameters of the rows of one step."""

    temperature: Float[Array, " S"]  # 0: greedy
    top_k: Int32[Array, " S"]  # outside [1, V): off
    top_p: Float[Array, " S"]  # 1: off
    min_p: Float[Array, " S"]  # 0: off
    seed_low: Int[Array, " S"]  # 32 bits, int32 or uint32
    seed_high: Int[Array, " S"]  # 32 bits, int32 or uint32
    sequence_index: Int32[Array, " S"]  # which of a request's n sequences
    positions: Int32[Array, " S"]  # of the token being sampled
    # Only `shape_logits` reads the rest, beside the row's line of the `SamplerState`; without it they may be None.
    presence: Float[Array, " S"] | None = None  # 0: off
    frequency: Float[Array, " S"] | None = None  # 0: off
    repetition: Float[Array, " S"] | None = None  # above 0; 1: off
    has_edits: Int[Array, " S"] | Bool[Array, " S"] | None = None  # 0: nothing but `sample` touches the row


def finite_rows(logits: Float[Array, "S V"]) -> Bool[Array, " S"]:
    """Returns whether each row can be sampled: no NaN, no +inf, and at least one token not masked by -inf."""
    # Not from the maximum alone: XLA:CPU's does not propagate NaN.
    return jnp.all(logits < jnp.inf, axis=-1) & (jnp.max(logits, axis=-1) > -jnp.inf)


def mask_padding(logits: Float[Array, "S V"], vocab_size: int | None) -> Float[Array, "S V"]:
    """Bans the ids from `vocab_size` on; None: there are none."""
    if vocab_size is None or vocab_size == logits.shape[-1]:
        return logits
    return jnp.where(jnp.arange(logits.shape[-1]) < vocab_size, logits, -jnp.inf)


def sample_greedy(logits: Float[Array, "S V"], *, vocab_size: int | None = None) -> Int32[Array, " S"]:
    """Returns the likeliest id of each row, the lowest on ties; ids from `vocab_size` on are padding, never chosen.

    A row that `finite_rows` refuses gets an arbitrary id below `vocab_size`.
    """
    last = (logits.shape[-1] if vocab_size is None else vocab_size) - 1
    logits = mask_padding(logits, vocab_size)
    # Two plain reductions: XLA:CPU runs them as vectors, and its argmax (a reduction of pairs) ten times slower.
    largest = jnp.max(logits, axis=-1, keepdims=True)
    ids = lax.broadcasted_iota(jnp.int32, logits.shape, 1)
    return jnp.min(jnp.where(logits == largest, ids, last), axis=-1)


def sample(logits: Float[Array, "S V"], inputs: SamplingInputs, *, vocab_size: int) -> Int32[Array, " S"]:
    """Returns one id per row, drawn from softmax(logits / temperature) after min_p, top_k and top_p.

    A row's id depends on its own logits (f32) and entries of `inputs` only, and is never a filtered or masked (-inf)
    token nor one from `vocab_size` on. Rows of temperature 0 get `sample_greedy`'s id, rows that `finite_rows` refuses
    an arbitrary one below `vocab_size`. Filters and their treatment of ties: `find_thresholds`.
    """
    logits = mask_padding(logits, vocab_size)
    logits = jnp.pad(logits, ((0, 0), (0, -logits.shape[-1] % BLOCK)), constant_values=-jnp.inf)
    greedy = inputs.temperature < _GREEDY_BELOW
    scale = 1 / jnp.where(greedy, 1, inputs.temperature)  # a greedy row stays free of NaN, though nobody reads it
    scaled = (logits - jnp.max(logits, axis=-1, keepdims=True)) * scale[:, None]
    # A greedy row needs no filter; on CPU it then costs no search.
    top_k, top_p = jnp.where(greedy, 0, inputs.top_k), jnp.where(greedy, 1, inputs.top_p)
    thresholds = find_thresholds(scaled, top_k, top_p, inputs.min_p)
    weights = jnp.where(scaled >= thresholds[:, None], jnp.exp(scaled), 0)
    keys = row_keys(inputs.seed_low, inputs.seed_high, inputs.sequence_index, inputs.positions, Purpose.SAMPLE)
    drawn = _draw(weights, jax.vmap(jax.random.uniform)(keys))
    return jnp.where(greedy, sample_greedy(logits, vocab_size=vocab_size), drawn)


def _draw(weights: Float[Array, "S V"], uniforms: Float[Array, " S"]) -> Int32[Array, " S"]:
    """Inverts the cumulative sum of `weights` in vocabulary order: first over blocks of tokens, then within one."""
    blocks = weights.reshape(len(weights), -1, BLOCK)
    sums = jnp.sum(blocks, axis=-1)
    block, rest = _invert(sums, uniforms * jnp.sum(sums, axis=-1))
    chosen = jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0]
    lane, _ = _invert(chosen, rest)
    return block * BLOCK + lane


def _invert(weights: Float[Array, "S n"], target: Float[Array, " S"]) -> tuple[Int32[Array, " S"], Float[Array, " S"]]:
    """Returns the entry of each row that `target` falls into and how far into it.

    It is the last positive entry that begins at or below the target. The first positive one begins at exactly zero, so
    there always is one: no rounding, here or in the target, can select an entry without weight.
    """
    begins = jnp.pad(jnp.cumsum(weights, axis=-1), ((0, 0), (1, 0)))[:, :-1]
    entries = lax.broadcasted_iota(jnp.int32, weights.shape, 1)
    index = jnp.max(jnp.where((weights > 0) & (begins <= target[:, None]), entries, 0), axis=-1)
    return index, jnp.maximum(target - jnp.take_along_axis(begins, index[:, None], axis=1)[:, 0], 0)

"""Log-probabilities of tokens under the model's logits, before anything shapes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Int, Int32

from jaxserve.core.sampling.sampler import mask_padding
from jaxserve.core.sampling.thresholds import BLOCK

PROMPT_BLOCK = 64  # prompt tokens whose logits exist at a time
_SELECTED_WIDTH = 2048  # for a narrower top_k XLA:TPU sorts, and takes seconds to compile it


class LogprobArrays(NamedTuple):
    """One row per token; column 0 is that token, then the k likeliest, in descending order."""

    values: Float32[Array, "S k+1"]  # log-probabilities
    ids: Int32[Array, "S k+1"]
    rank: Int32[Array, " S"]  # 1 + the number of tokens likelier than that in column 0


def compute_logprobs(logits: Float[Array, "S V"], *, vocab_size: int) -> Float32[Array, "S V"]:
    """Returns every token's log-probability; -inf from `vocab_size` on."""
    logits = mask_padding(logits.astype(jnp.float32), vocab_size)
    largest, log_sum = _normalize(logits)
    return (logits - largest) - log_sum


def gather_logprobs(logits: Float[Array, "S V"], ids: Int[Array, " S"], k: int, *, vocab_size: int) -> LogprobArrays:
    """Returns log-probabilities of each row's token `ids[s]` and its `k` likeliest, the lowest id first among equals.

    A token's value has the same bits in every column and in `compute_logprobs`. A row with NaN or +inf gets NaN.

    Raises:
        ValueError: `k` is not within [0, vocab_size].
    """
    if not 0 <= k <= vocab_size:
        raise ValueError(f"k: {k} likeliest tokens of a vocabulary of {vocab_size}")
    logits = mask_padding(logits.astype(jnp.float32), vocab_size)
    ids = ids.astype(jnp.int32)[:, None]
    chosen = jnp.take_along_axis(logits, ids, axis=1, mode="clip")
    rank = 1 + jnp.sum(logits > chosen, axis=-1, dtype=jnp.int32)
    likeliest, likeliest_ids = _find_likeliest(logits, k)
    largest, log_sum = _normalize(logits)
    values = (jnp.concatenate([chosen, likeliest], axis=1) - largest) - log_sum
    return LogprobArrays(values, jnp.concatenate([ids, likeliest_ids], axis=1), rank)


def gather_prompt_logprobs(
    hidden: Float[Array, "T D"],
    compute_logits: Callable[[Float[Array, "n D"]], Float[Array, "n V"]],
    targets: Int[Array, " T"],
    k: int,
    *,
    vocab_size: int,
) -> LogprobArrays:
    """Returns `gather_logprobs` of `targets` under the logits of `hidden`, T rows.

    The logits of `PROMPT_BLOCK` positions exist at a time, never [T, V]. `targets[t]` is the token after position t.
    """
    num_tokens = len(targets)
    block = min(PROMPT_BLOCK, num_tokens)
    missing = -num_tokens % block
    hidden = jnp.pad(hidden, ((0, missing), (0, 0))).reshape(-1, block, hidden.shape[-1])
    targets = jnp.pad(targets, (0, missing)).reshape(-1, block)

    def gather_block(inputs: tuple[Array, Array]) -> LogprobArrays:
        states, tokens = inputs
        return gather_logprobs(compute_logits(states), tokens, k, vocab_size=vocab_size)

    found = lax.map(gather_block, (hidden, targets))
    return jax.tree.map(lambda blocks: blocks.reshape(-1, *blocks.shape[2:])[:num_tokens], found)


def _normalize(logits: Float32[Array, "S V"]) -> tuple[Float32[Array, "S 1"], Float32[Array, "S 1"]]:
    """Returns each row's largest logit and log(sum(exp(logit - largest)))."""
    largest = jnp.max(logits, axis=-1, keepdims=True)
    sums = jnp.sum(_split(jnp.exp(logits - largest), 0), axis=-1)  # by blocks first: short sums round less
    return largest, jnp.log(jnp.sum(sums, axis=-1, keepdims=True))


def _find_likeliest(logits: Float32[Array, "S V"], k: int) -> tuple[Float32[Array, "S k"], Int32[Array, "S k"]]:
    """Returns the k largest logits and their ids, found in the k blocks with the largest maxima.

    A token outside these blocks ranks behind the largest token of each of them, so it is not among the k likeliest. A
    top_k of the whole row sorts it on some devices and takes ten times as long on CPU.
    """
    blocks = _split(logits, -jnp.inf)
    maxima = _drop_sign_of_zero(jnp.max(blocks, axis=-1))
    padding = max(0, _SELECTED_WIDTH - maxima.shape[1])
    maxima = jnp.pad(maxima, ((0, 0), (0, padding)), constant_values=-jnp.inf)
    _, chosen = lax.top_k(maxima, min(k, blocks.shape[1]))
    chosen = jnp.sort(chosen, axis=-1)  # vocabulary order: among equals the lowest id comes first
    candidates = jnp.take_along_axis(blocks, chosen[:, :, None], axis=1).reshape(len(logits), -1)
    values, places = lax.top_k(_drop_sign_of_zero(candidates), k)
    ids = jnp.take_along_axis(chosen, places // BLOCK, axis=1) * BLOCK + places % BLOCK
    return values, ids.astype(jnp.int32)


def _drop_sign_of_zero(values: Float32[Array, "S n"]) -> Float32[Array, "S n"]:
    """Returns -0.0 as 0.0: top_k ranks it below, though they are equal."""
    return jnp.where(values == 0, 0, values)


def _split(array: Array, fill: float) -> Array:
    """Reshapes [S, V] to [S, ceil(V / BLOCK), BLOCK]."""
    padded = jnp.pad(array, ((0, 0), (0, -array.shape[-1] % BLOCK)), constant_values=fill)
    return padded.reshape(len(array), -1, BLOCK)

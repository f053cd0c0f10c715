"""What changes logits before a token is drawn: masks, bad words, biases, penalties, in vLLM's order.

There is no branch, no sort and no loop over the vocabulary here. A row reads its own line of the state and its own
parameters only.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int, Int32, UInt32

from jaxserve.sampling.sampler import SamplingInputs, mask_padding
from jaxserve.sampling.state import ANY_TOKEN, WORD_BITS, SamplerState


def mask_logits(logits: Float[Array, "S V"], mask: UInt32[Array, "S N"]) -> Float[Array, "S V"]:
    """Bans the tokens whose bit is not set; bit i % 32 of word i // 32 belongs to token i, N is ceil(V / 32).

    A row of ones leaves its logits untouched. For grammars this comes first, on the logits as the model made them.
    """
    shifts = jnp.arange(WORD_BITS, dtype=jnp.uint32)
    bits = (mask[:, :, None] >> shifts) & 1
    return jnp.where(bits.reshape(len(mask), -1)[:, : logits.shape[-1]] == 1, logits, -jnp.inf)


def shape_logits(
    logits: Float[Array, "S V"],
    inputs: SamplingInputs,
    state: SamplerState,
    row_ids: Int[Array, " S"],
    *,
    vocab_size: int,
) -> Float[Array, "S V"]:
    """Returns the logits that the likeliest token or a draw is then chosen from.

    In vLLM's order: allowed tokens, bad words, banned and biased tokens, penalties. Rows whose switch is off keep their
    bits; in every row ids from `vocab_size` on become -inf. A row whose parameters together leave no token is all -inf:
    `finite_rows` of the result is then false, while it is true of `logits`.
    """
    lines = jax.tree.map(lambda field: field.at[row_ids].get(mode="clip"), state)
    shaped = mask_logits(logits, lines.allowed)
    shaped = _ban_bad_words(shaped, lines.bad_words, lines.recent)
    shaped = _add_edits(shaped, lines, inputs.positions)
    shaped = _penalize(shaped, lines.token_stats, inputs)
    return mask_padding(jnp.where(inputs.has_edits[:, None] != 0, shaped, logits), vocab_size)


def _ban_bad_words(
    logits: Float[Array, "S V"], bad_words: Int32[Array, "S W L"], recent: Int32[Array, "S H"]
) -> Float[Array, "S V"]:
    """Bans the last token of every word whose other tokens were just sampled; a word of one token has no others."""
    begin, last = bad_words[:, :, :-1], bad_words[:, :, -1]
    has_begun = jnp.all((begin == ANY_TOKEN) | (begin == recent[:, None, :]), axis=-1)
    return _add_at(logits, last, jnp.where(has_begun, -jnp.inf, -0.0))


def _add_edits(logits: Float[Array, "S V"], lines: SamplerState, positions: Int[Array, " S"]) -> Float[Array, "S V"]:
    banned = positions[:, None] < lines.edit_until
    return _add_at(logits, lines.edit_ids, jnp.where(banned, -jnp.inf, lines.edit_values))


def _add_at(
    logits: Float[Array, "S V"], ids: Int32[Array, "S n"], values: Float32[Array, "S n"]
) -> Float[Array, "S V"]:
    """Adds `values` to the logits of tokens that the state holds in order; else a TPU would sort them all first.

    Where several meet at one token, all but one of them are -inf or -0.0: a device may add them in any order.
    """
    rows = jnp.arange(len(logits))[:, None]
    return logits.at[rows, ids].add(values, mode="clip", indices_are_sorted=True)


def _penalize(
    logits: Float[Array, "S V"], token_stats: Int32[Array, "S V"], inputs: SamplingInputs
) -> Float[Array, "S V"]:
    """Repetition for tokens of prompt or output, then frequency and presence for those of the output."""
    repetition, frequency, presence = (
        column[:, None] for column in (inputs.repetition, inputs.frequency, inputs.presence)
    )
    count: Float32[Array, "S V"] = (token_stats >> 1).astype(jnp.float32)
    # One division per row; some devices would make it of a division per token anyway, and round accordingly.
    factor = jnp.where(logits > 0, 1 / repetition, repetition)
    logits = jnp.where(token_stats > 0, logits * factor, logits)
    return logits - frequency * count - jnp.where(count > 0, presence, 0)

"""Changes logits before a token is drawn, by masks, bad words, biases and penalties, in vLLM's order.

Nothing here sorts or loops over the vocabulary. Functions take one row, for `map_rows`. A row reads only its own line
of the state and its own parameters.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Int, Int32, UInt32

from jaxserve.core.sampling.sampler import SamplingInputs, mask_padding
from jaxserve.core.sampling.sampler_state import ANY_TOKEN, WORD_BITS, SamplerState


def mask_logits(logits: Float[Array, " V"], mask: UInt32[Array, " N"]) -> Float[Array, " V"]:
    """Returns the logits with -inf where a token's bit is 0: bit i % 32 of word i // 32 is token i, N is ceil(V / 32).

    Masks of grammars are applied first, to the model's logits.
    """
    bits = (mask[:, None] >> jnp.arange(WORD_BITS, dtype=jnp.uint32)) & 1
    return jnp.where(bits.reshape(-1)[: len(logits)] == 1, logits, -jnp.inf)


def shape_logits(
    logits: Float[Array, " V"],
    inputs: SamplingInputs,
    state: SamplerState,
    row_id: Int[Array, ""],
    *,
    vocab_size: int,
) -> Float[Array, " V"]:
    """Returns the logits that a token is then chosen from.

    The result is that of vLLM's order: allowed tokens, bad words, banned and biased tokens, penalties. If the switch is
    off, logits keep their bits. Ids from `vocab_size` on always become -inf. If a row's parameters leave no token, all
    are -inf: `is_finite` of the result is then false, while it is true of `logits`.
    """
    # Outside the branch: under vmap a branch that reads the whole state copies it for each row.
    line = jax.tree.map(lambda field: jnp.take(field, row_id, axis=0, mode="clip"), state)

    def shape() -> Array:
        shaped = _ban_bad_words(logits, line.bad_words, line.recent)
        shaped = _add_edits(shaped, line, inputs.positions)
        # Last, in one pass with the penalties: nothing brings a banned token back.
        return mask_logits(_penalize(shaped, line.token_stats, inputs), line.allowed)

    return mask_padding(lax.cond(inputs.has_edits != 0, shape, lambda: logits), vocab_size)


def _ban_bad_words(
    logits: Float[Array, " V"], bad_words: Int32[Array, "W L"], recent: Int32[Array, " H"]
) -> Float[Array, " V"]:
    """Bans the last token of every word whose other tokens, if any, were just sampled."""
    begin, last = bad_words[:, :-1], bad_words[:, -1]
    has_begun = jnp.all((begin == ANY_TOKEN) | (begin == recent), axis=-1)
    return _add_at(logits, last, jnp.where(has_begun, -jnp.inf, -0.0))


def _add_edits(logits: Float[Array, " V"], line: SamplerState, position: Int[Array, ""]) -> Float[Array, " V"]:
    is_banned = position < line.edit_until
    return _add_at(logits, line.edit_ids, jnp.where(is_banned, -jnp.inf, line.edit_values))


def _add_at(logits: Float[Array, " V"], ids: Int32[Array, " n"], values: Float32[Array, " n"]) -> Float[Array, " V"]:
    """Adds `values` at the sorted `ids`; a TPU would sort unsorted ones first.

    Of several values at one token all but one are -inf or -0.0, so a device may add them in any order.
    """
    return logits.at[ids].add(values, mode="clip", indices_are_sorted=True)


def _penalize(
    logits: Float[Array, " V"], token_stats: Int32[Array, " V"], inputs: SamplingInputs
) -> Float[Array, " V"]:
    """Applies repetition to tokens of prompt and output, then frequency and presence to those of the output."""
    count: Float32[Array, " V"] = (token_stats >> 1).astype(jnp.float32)
    # One division per row: some devices rewrite a division per token so, and round accordingly.
    factor = jnp.where(logits > 0, 1 / inputs.repetition, inputs.repetition)
    logits = jnp.where(token_stats > 0, logits * factor, logits)
    return logits - inputs.frequency * count - jnp.where(count > 0, inputs.presence, 0)

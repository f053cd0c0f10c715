"""Token embeddings and the output head."""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxserve.layers.linear import matmul_precision


@dataclass(frozen=True)
class EmbeddingConfig:
    """`tied`: the head is the embedding matrix. `scale` multiplies embeddings, `softcap` bounds logits.

    `shard_vocab` is off where the vocabulary does not divide by the mesh: the two matrices are then whole everywhere.
    """

    vocab_size: int
    tied: bool
    scale: float | None = None
    softcap: float | None = None
    shard_vocab: bool = True


def embed_tokens(
    config: EmbeddingConfig, table: Float[Array, "V D"], token_ids: Int[Array, " T"]
) -> Float[Array, "T D"]:
    """Returns the rows of `table`; ids outside the vocabulary (padding only) give some row, never a fault."""
    rows = table.at[token_ids].get(mode="clip", wrap_negative_indices=False)
    return rows if config.scale is None else rows * jnp.asarray(config.scale, table.dtype)


def project_to_vocab(
    config: EmbeddingConfig, table: Float[Array, "V D"], hidden: Float[Array, "S D"]
) -> Float[Array, "S V"]:
    """Returns float32 logits: `hidden` times `table` (head or tied embedding), soft-capped where the model does so."""
    logits = lax.dot_general(
        hidden,
        table,
        (((1,), (1,)), ((), ())),
        precision=matmul_precision(table.dtype),
        preferred_element_type=jnp.float32,
    )
    return logits if config.softcap is None else jnp.tanh(logits / config.softcap) * config.softcap

"""Token embeddings and the output head."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxserve.core.layers.context import StepContext
from jaxserve.core.layers.linear import PACKED, Leaf, linear
from jaxserve.core.layers.norm import NormConfig, normalize
from jaxserve.request import FIRST_IMAGE_ROW, TOKEN_TYPE
from pallas_kernels.cpu.packing import take_columns


@dataclass(frozen=True)
class AddedEmbeddings:
    """What encoders add to the embedding of a token, in front of a norm: its position's, and its type's.

    The first position of a text is row `first_position` of `num_positions`, 0 if they are not embedded. Where there are
    two types (`num_types`), a token is of type 1 if TOKEN_TYPE is added to its id; else all are of type 0.
    """

    num_positions: int = 0
    first_position: int = 0
    num_types: int = 0


@dataclass(frozen=True)
class EmbeddingConfig:
    """`tied`: the head is the embedding matrix. `scale` multiplies embeddings, `logit_scale` logits; `softcap` bounds
    logits.

    `shard_vocab` is off if the vocabulary does not divide by the mesh: both matrices are then whole on every device.
    """

    vocab_size: int
    tied: bool
    scale: float | None = None
    logit_scale: float | None = None
    softcap: float | None = None
    shard_vocab: bool = True
    added: AddedEmbeddings | None = None

    @property
    def head(self) -> str:
        """The name of the leaf that the head multiplies with."""
        return "embed" if self.tied else "lm_head"


def embed_tokens(config: EmbeddingConfig, leaf: Leaf, token_ids: Int[Array, " T"]) -> Float[Array, "T D"]:
    """Returns rows of the table [V, D], scaled; ids outside the vocabulary (padding only) are clipped."""
    table = leaf["weight"]
    if isinstance(table, Mapping):
        rows = take_columns(table[PACKED], jnp.clip(token_ids, 0, config.vocab_size - 1))
    else:
        rows = table.at[token_ids].get(mode="clip", wrap_negative_indices=False)
    return rows if config.scale is None else rows * jnp.asarray(config.scale, rows.dtype)


def embed_images(
    leaf: Leaf, token_ids: Int[Array, " T"], x: Float[Array, "T D"]
) -> tuple[Float[Array, "T D"], tuple[Float[Array, "T D"], ...]]:
    """Returns `x` with vectors of images in place of their placeholders', and what is added behind the first layers.

    `images` [rows, P, D] of the leaf are the vectors; steps that read none have no such array. The id of a placeholder
    is FIRST_IMAGE_ROW for row 0, and one less for each further row.
    """
    images = leaf.get("images")
    if images is None:
        return x, ()
    is_image = (token_ids <= FIRST_IMAGE_ROW)[:, None]
    own = images.at[FIRST_IMAGE_ROW - token_ids].get(mode="clip", wrap_negative_indices=False)
    added = (jnp.where(is_image, own[:, part], 0) for part in range(1, images.shape[1]))
    return jnp.where(is_image, own[:, 0], x), tuple(added)


def split_types(config: EmbeddingConfig, token_ids: Int[Array, " T"]) -> tuple[Int[Array, " T"], Int[Array, " T"]]:
    """Returns the token ids of a step, and the type of each token, 0 or 1."""
    if config.added is None or config.added.num_types < 2:
        return token_ids, jnp.zeros_like(token_ids)
    return token_ids & (TOKEN_TYPE - 1), (token_ids & TOKEN_TYPE) // TOKEN_TYPE


def add_embeddings(
    config: AddedEmbeddings,
    norm: NormConfig,
    params: Mapping[str, Any],
    x: Float[Array, "T D"],
    positions: Int[Array, " T"],
    types: Int[Array, " T"],
) -> Float[Array, "T D"]:
    """Returns `x` plus the rows of `embed_positions` [P, D] and `embed_types` [types, D], behind `embed_norm`."""
    if config.num_positions:
        table = params["embed_positions"]["weight"]
        x = x + table.at[positions + config.first_position].get(mode="clip", wrap_negative_indices=False)
    if config.num_types:
        table = params["embed_types"]["weight"]
        x = x + (table[0] if config.num_types == 1 else table[types])
    return normalize(norm, params["embed_norm"], x)


def project_to_vocab(
    ctx: StepContext, config: EmbeddingConfig, leaf: Leaf, hidden: Float[Array, "S D"]
) -> Float[Array, "S V"]:
    """Returns float32 logits: `hidden` times the table [V, D] (head or tied embedding), scaled and soft-capped.

    Each device computes whole logits of its share of the vocabulary, so nothing is reduced, and `ctx` has no mesh.
    """
    logits = linear(ctx, leaf, hidden, transposed=True, dtype=jnp.float32)
    if config.logit_scale is not None:
        logits = logits * config.logit_scale
    return logits if config.softcap is None else jnp.tanh(logits / config.softcap) * config.softcap

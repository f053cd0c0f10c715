"""The device side of every drafter with weights: its passes, its logits and its vocabulary.

With each step of the target a drafter computes the same tokens from the target's true hidden states, so that its keys
and values are never those of guesses (vLLM #14649). It drafts on its own states, one token a row and pass. Its layers
have pools of their own, under the page ids of the target's page tables. `batches` are for the drafter's attention heads
(pallas_kernels.batch), one per KV group of its config; `match_groups` says whose page tables they have.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from jaxserve.core.layers.embedding import embed_tokens, project_to_vocab
from jaxserve.core.layers.linear import linear
from jaxserve.core.models.base import DecoderConfig
from jaxserve.core.models.decoder import CacheLayout, Pools, compute_logits, forward, list_contexts
from jaxserve.features.speculation.drafters.base import DrafterModel
from jaxserve.features.speculation.drafters.kinds import KINDS
from pallas_kernels.spec import BatchMeta

Params = Mapping[str, Any]


def read_target(model: DrafterModel, params: Params, hidden: Float[Array, "T AD"] | None) -> Float[Array, "T D"] | None:
    """Returns the states that a drafter's pass begins with; None for a draft model, which reads nothing of the target.

    `hidden` is what `decoder.forward` captured of `model.aux_layers`.
    """
    drafter = KINDS.get(model.method)
    if drafter is None:
        return None
    if hidden is None:
        raise ValueError("hidden: a drafter reads the target's hidden states; forward captures them with aux_layers")
    return drafter.read_target(model, params, hidden)


def run_pass(
    model: DrafterModel,
    params: Params,
    target_params: Params,
    target_config: DecoderConfig,
    states: Float[Array, "T D"] | None,
    token_ids: Int[Array, " T"],
    pools: Pools,
    batches: tuple[BatchMeta, ...],
    *,
    layout: CacheLayout,
    mesh: Mesh | None,
    only_stores: bool = False,
) -> tuple[Float[Array, "T D"], Pools]:
    """Returns the drafter's states after its layers, and its pools with their keys and values.

    With `model.takes_next`, the token at p + 1 goes with the state at p: the target's, of `read_target`, or that of a
    pass before. A draft model reads no `states`. `token_ids` are of the target's vocabulary. With `only_stores` the
    states mean nothing, and the last layer computes no more than its keys and values.
    """
    config, drafter = model.config, KINDS.get(model.method)
    if drafter is None:
        where = {"layout": layout, "mesh": mesh}
        states, pools, _ = forward(config, params, token_ids, pools, batches, only_stores=only_stores, **where)
        return states, pools
    if states is None:
        raise ValueError("states: a drafter begins with those of read_target")
    x = states
    embeds = _embed(model, params, target_params, target_config, token_ids)
    (pages,) = pools
    for index, ctx in enumerate(list_contexts(config, batches, layout, mesh, only_stores=only_stores)):
        own = dataclasses.replace(ctx, pool=pages)
        x, pages = drafter.run_layer(model, index, params["layers"][index], embeds, x, own)
    return drafter.finish(model, params, x), (pages,)


def draft_logits(
    model: DrafterModel,
    params: Params,
    target_params: Params,
    target_config: DecoderConfig,
    states: Float[Array, "S D"],
) -> Float[Array, "S Vd"]:
    """Returns float32 logits of the next draft over the draft vocabulary (`map_drafts` maps its ids)."""
    drafter = KINDS.get(model.method)
    if drafter is None:
        return compute_logits(model.config, params, states)
    normed = drafter.normalize(model, params, states)
    if model.has_head:
        return linear(model.config.local, params["lm_head"], normed, transposed=True, dtype=jnp.float32)
    embedding = target_config.embedding
    return project_to_vocab(model.config.local, embedding, target_params[embedding.head], normed)


def map_drafts(model: DrafterModel, params: Params, ids: Int[Array, " S"]) -> Int[Array, " S"]:
    """Returns ids of the draft vocabulary as ids of the target's. `d2t` [Vd] holds their differences."""
    return ids + params["d2t"]["weight"][ids] if model.maps_vocab else ids


def expand_logits(
    model: DrafterModel, params: Params, logits: Float[Array, "S Vd"], vocab_size: int
) -> Float[Array, "S V"]:
    """Returns logits over the target's vocabulary, minus infinity where the draft vocabulary has no token."""
    if not model.maps_vocab:
        return logits
    ids = map_drafts(model, params, jnp.arange(model.draft_vocab_size, dtype=jnp.int32))
    empty = jnp.full((logits.shape[0], vocab_size), -jnp.inf, logits.dtype)
    return empty.at[:, ids].set(logits, mode="drop", unique_indices=True)


def _embed(
    model: DrafterModel,
    params: Params,
    target_params: Params,
    target_config: DecoderConfig,
    token_ids: Int[Array, " T"],
) -> Float[Array, "T D"]:
    """Returns plain rows of the table: heads are trained without a target's factor on embeddings."""
    if model.has_embed:
        return embed_tokens(model.config.embedding, params["embed"], token_ids)
    plain = dataclasses.replace(target_config.embedding, scale=None)
    return embed_tokens(plain, target_params["embed"], token_ids)

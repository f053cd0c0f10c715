"""THE two functions that run on the device in every step.

forward: unpack the inputs, bring the rows up to date, run the layers (writing and reading KV), take one logits row per
row of the step. sample: choose the tokens. Everything before them is numpy, everything after is host.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import flax.struct
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from jaxserve.models.base import DecoderConfig
from jaxserve.models.decoder import CacheLayout, compute_logits
from jaxserve.models.decoder import forward as run_layers
from jaxserve.runtime.inputs import KEEP, ON_DEVICE, InputLayout, StepInputs
from jaxserve.runtime.rows import SAMPLING_FIELDS
from jaxserve.runtime.state import KVCache, RowState
from jaxserve.sampling import SamplingInputs, finite_rows, sample, sample_greedy
from jaxserve.scheduler.sequence import NON_FINITE
from pallas_kernels.spec import prepare_batch

_FLOAT_FIELDS = ("temperature", "top_p", "min_p")


@dataclass(frozen=True)
class StepModel:
    """What is static about the step: the model, where its pages lie, the devices and the kernels."""

    config: DecoderConfig
    layout: CacheLayout
    page_size: int
    mesh: Mesh | None  # None on a single device
    impl: str | None


@flax.struct.dataclass
class SampleInputs:
    """What `forward` hands to `sample`: a row bucket's shapes only, so that the programs add up, not multiply."""

    logits: Float[Array, "S V"]
    row_ids: Int[Array, " S"]
    samples: Int[Array, " S"]
    sampling: Int[Array, "S F"]


def forward(
    params: Any, cache: KVCache, rows: RowState, packed: Int[Array, " I"], *, model: StepModel, layout: InputLayout
) -> tuple[KVCache, RowState, SampleInputs]:
    """One step of one bucket up to the logits. `cache` and `rows` are donated."""
    inputs = layout.views(packed)
    rows, seq_lens = _advance(rows, inputs)
    groups, num_rows, width = rows.page_table.shape
    table = rows.page_table.reshape(-1).at[inputs.page_entries].set(inputs.page_ids)
    page_table = table.reshape(groups, num_rows, width)
    batches = tuple(
        prepare_batch(
            page_table[group, inputs.row_ids],
            seq_lens,
            inputs.query_start_loc,
            inputs.distribution,
            num_tokens=layout.bucket.tokens,
            page_size=model.page_size,
            max_query_len=1 if layout.bucket.is_decode else None,
        )
        for group in range(groups)
    )
    tokens = _token_ids(rows, inputs)
    hidden, cache = run_layers(
        model.config, params, tokens, cache, batches, layout=model.layout, mesh=model.mesh, impl=model.impl
    )
    last = jnp.maximum(inputs.query_start_loc[1:] - 1, 0)
    logits = compute_logits(model.config, params, hidden[last])
    selected = SampleInputs(logits, inputs.row_ids, inputs.samples, inputs.sampling)
    return cache, replace(rows, page_table=page_table), selected


def choose_tokens(
    rows: RowState, selected: SampleInputs, *, model: StepModel, greedy: bool
) -> tuple[RowState, Int[Array, " S"]]:
    """Samples one id per row; returns them, with NON_FINITE for rows whose logits are not. `rows` is donated.

    The plain program (`greedy`) and the full one give a greedy row the same id.
    """
    logits, vocab_size = selected.logits, model.config.vocab_size
    if greedy:
        ids = sample_greedy(logits, vocab_size=vocab_size)
    else:
        positions = rows.num_computed[selected.row_ids]  # of the token that follows what is computed
        ids = sample(logits, _unpack_sampling(selected.sampling, positions), vocab_size=vocab_size)
    kept = jnp.where(selected.samples == 1, ids, rows.last_token[selected.row_ids])
    rows = replace(rows, last_token=rows.last_token.at[selected.row_ids].set(kept))
    return rows, jnp.where(finite_rows(logits), ids, NON_FINITE)


def _advance(rows: RowState, inputs: StepInputs) -> tuple[RowState, Int[Array, " S"]]:
    """Returns the rows after this step's tokens, and how long each row of the step then is [S]."""
    computed = jnp.where(inputs.starts == KEEP, rows.num_computed[inputs.row_ids], inputs.starts)
    seq_lens = computed + jnp.diff(inputs.query_start_loc)
    return replace(rows, num_computed=rows.num_computed.at[inputs.row_ids].set(seq_lens)), seq_lens


def _token_ids(rows: RowState, inputs: StepInputs) -> Int[Array, " T"]:
    """Fills in the tokens that only the device knows: a decode row's one token is what it sampled last."""
    num_rows, num_tokens = inputs.row_ids.shape[0], inputs.token_ids.shape[0]
    last = rows.last_token[inputs.row_ids]  # decode rows come first, so row s of the step is token s
    last = jnp.pad(last, (0, max(0, num_tokens - num_rows)))[:num_tokens]
    return jnp.where(inputs.token_ids == ON_DEVICE, last, inputs.token_ids)


def _unpack_sampling(bits: Int[Array, "S F"], positions: Int[Array, " S"]) -> SamplingInputs:
    columns = {name: bits[:, index] for index, name in enumerate(SAMPLING_FIELDS)}
    floats = {name: lax.bitcast_convert_type(columns[name], jnp.float32) for name in _FLOAT_FIELDS}
    return SamplingInputs(**(columns | floats), positions=positions)

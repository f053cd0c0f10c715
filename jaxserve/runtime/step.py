"""The two functions that run on the device in every step, and those that only some steps need.

forward: unpacks the inputs, advances the rows, runs the layers (writing and reading KV) and computes one line of logits
per row. sample: chooses the tokens, from plain or shaped logits. Everything before and after them runs on the host.
Log-probabilities of tokens, those of prompts, and embeddings are programs of their own.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import flax.struct
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int, UInt32

from jaxserve.layers.linear import Leaf
from jaxserve.layers.norm import normalize
from jaxserve.logits_processor import LogitsProcessor
from jaxserve.models.base import DecoderConfig
from jaxserve.models.decoder import CacheLayout, compute_logits
from jaxserve.models.decoder import forward as run_layers
from jaxserve.runtime.device_state import KVCache, RowState
from jaxserve.runtime.inputs import KEEP, ON_DEVICE, InputLayout, StepInputs
from jaxserve.runtime.rows import EXTRA_FIELDS, FLOAT_FIELDS, SAMPLING_FIELDS, SampleVariant
from jaxserve.sampling import (
    LogprobArrays,
    SamplerState,
    SamplingInputs,
    compute_logprobs,
    draw_uniforms,
    gather_logprobs,
    gather_prompt_logprobs,
    is_finite,
    map_rows,
    mask_logits,
    record,
    sample,
    sample_greedy,
    shape_logits,
)
from jaxserve.scheduler.sequence import MASK_LATE, NO_TOKEN_LEFT, NON_FINITE
from pallas_kernels.batch import prepare_batch
from pallas_kernels.spec import AttnShape

_LEAST_LENGTH = 1e-12  # an embedding is divided by at least this: zeros stay zeros


@dataclass(frozen=True)
class StepModel:
    """The static arguments of a step: the model, where its pages lie, the devices and the kernels."""

    config: DecoderConfig
    layout: CacheLayout
    shapes: tuple[AttnShape, ...]  # per KV group, on one device
    mesh: Mesh | None  # None on a single device
    impl: str
    processor: LogitsProcessor | None = None
    aux_layers: tuple[int, ...] = ()  # whose inputs a drafter reads


@flax.struct.dataclass
class HiddenStates:
    """The residual stream before the final norm, for the programs that only some steps need."""

    last: Float[Array, "S D"]  # each row's last token
    every: Float[Array, "T D"] | None  # all tokens of a mixed bucket, for prompts' log-probabilities
    aux: Float[Array, "T AD"] | None = None  # the inputs of `aux_layers`, side by side, for a drafter


@flax.struct.dataclass
class SampleInputs:
    """What `forward` hands to `sample`. Shapes depend on rows only, so that the programs add up, not multiply."""

    logits: Float[Array, "S V"]
    row_ids: Int[Array, " S"]
    samples: Int[Array, " S"]
    sampling: Int[Array, "S F"]


def forward(
    params: Any, cache: KVCache, rows: RowState, packed: Int[Array, " I"], *, model: StepModel, layout: InputLayout
) -> tuple[KVCache, RowState, SampleInputs, HiddenStates]:
    """Runs a step up to the logits; returns the cache and the rows after it. `cache` and `rows` are donated."""
    return run_forward(params, cache, rows, layout.views(packed), model=model, layout=layout)


def run_forward(
    params: Any, cache: KVCache, rows: RowState, inputs: StepInputs, *, model: StepModel, layout: InputLayout
) -> tuple[KVCache, RowState, SampleInputs, HiddenStates]:
    """`forward` on unpacked inputs."""
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
            shape=model.shapes[group],
            max_query_len=1 if layout.bucket.is_decode else None,
            impl=model.impl,
        )
        for group in range(groups)
    )
    tokens = _token_ids(rows, inputs)
    (pool,) = cache
    hidden, pool, aux = run_layers(
        model.config,
        params,
        tokens,
        pool,
        batches,
        layout=model.layout,
        mesh=model.mesh,
        aux_layers=model.aux_layers,
    )
    last = hidden[jnp.maximum(inputs.query_start_loc[1:] - 1, 0)]
    logits = compute_logits(model.config, params, last)
    selected = SampleInputs(logits, inputs.row_ids, inputs.samples, inputs.sampling)
    states = HiddenStates(last, None if layout.bucket.is_decode else hidden, aux)
    return (pool,), replace(rows, page_table=page_table), selected, states


def sample_tokens(
    rows: RowState, selected: SampleInputs, *, model: StepModel, greedy: bool
) -> tuple[RowState, Int[Array, " S"]]:
    """Returns the rows and one sampled id per row, or NON_FINITE if its logits are not finite. `rows` is donated.

    Every sample program gives a greedy row the same id.
    """
    vocab_size = model.config.vocab_size

    if greedy:
        ids, are_finite = map_rows(partial(sample_greedy, vocab_size=vocab_size), selected.logits)
    else:
        inputs = _unpack_sampling(rows, selected)
        function = partial(sample, vocab_size=vocab_size)
        ids, are_finite = map_rows(function, selected.logits, inputs, draw_uniforms(inputs))
    return _keep(rows, selected, ids), jnp.where(are_finite, ids, NON_FINITE)


def sample_shaped_tokens(
    rows: RowState,
    sampler: SamplerState,
    selected: SampleInputs,
    mask: UInt32[Array, "S W"] | None,
    *,
    model: StepModel,
) -> tuple[RowState, SamplerState, Int[Array, " S"]]:
    """`sample_tokens` on logits shaped by masks, biases and penalties. `rows` and `sampler` are donated.

    A row's id is NO_TOKEN_LEFT if its parameters forbid every token, and MASK_LATE if its line of `mask` is 0: it then
    samples nothing and keeps its last token.
    """
    vocab_size = model.config.vocab_size
    inputs = _unpack_sampling(rows, selected)

    def sample_row(line: SampleInputs, mask: Array | None, inputs: SamplingInputs, uniform: Array) -> tuple[Array, ...]:
        shaped = line.logits if mask is None else mask_logits(line.logits, mask)
        shaped = shape_logits(shaped, inputs, sampler, line.row_ids, vocab_size=vocab_size)
        if model.processor is not None:
            shaped = _process(shaped, line, model.processor)
        return *sample(shaped, inputs, uniform, vocab_size=vocab_size), is_finite(line.logits)

    ids, are_left, are_finite = map_rows(sample_row, selected, mask, inputs, draw_uniforms(inputs))
    brought = jnp.where(are_left, ids, NO_TOKEN_LEFT)
    if mask is not None:
        is_late = ~jnp.any(mask != 0, axis=1)
        brought = jnp.where(is_late, MASK_LATE, brought)
        selected = replace(selected, samples=jnp.where(is_late, 0, selected.samples))
    sampler = record(sampler, selected.row_ids, ids, (selected.samples == 1) & (inputs.has_edits == 1))
    return _keep(rows, selected, ids), sampler, jnp.where(are_finite, brought, NON_FINITE)


def compute_step_logprobs(
    selected: SampleInputs, token_ids: Int[Array, " S"], *, model: StepModel, max_logprobs: int
) -> LogprobArrays | Float[Array, "S V"]:
    """Returns log-probabilities of the sampled and the `max_logprobs` likeliest tokens; of all tokens if it is -1."""
    vocab_size = model.config.vocab_size
    if max_logprobs < 0:
        return compute_logprobs(selected.logits, vocab_size=vocab_size)
    return gather_logprobs(selected.logits, token_ids, max_logprobs, vocab_size=vocab_size)


def compute_prompt_logprobs(
    params: Any, hidden: Float[Array, "T D"], targets: Int[Array, " T"], *, model: StepModel, max_logprobs: int
) -> LogprobArrays:
    """Returns log-probabilities of `targets[t]` and the `max_logprobs` likeliest tokens after each token of a step."""
    logits = partial(compute_logits, model.config, params)
    return gather_prompt_logprobs(hidden, logits, targets, max_logprobs, vocab_size=model.config.vocab_size)


def pool_last(norm: Leaf, last: Float[Array, "S D"], *, model: StepModel) -> Float[Array, "S D"]:
    """Returns the rows' embeddings, f32 of length 1: the last token's hidden state after the final norm."""
    pooled = normalize(model.config.norm, norm, last).astype(jnp.float32)
    return pooled / jnp.maximum(jnp.linalg.norm(pooled, axis=1, keepdims=True), _LEAST_LENGTH)


def head_params(params: Any) -> dict[str, Any]:
    """Returns the parameters that logits need."""
    return {name: leaf for name, leaf in params.items() if name in ("embed", "lm_head", "final_norm")}


def _keep(rows: RowState, selected: SampleInputs, ids: Int[Array, " S"]) -> RowState:
    """Writes the id of each row that samples to `last_token`."""
    kept = jnp.where(selected.samples == 1, ids, rows.last_token[selected.row_ids])
    return replace(rows, last_token=rows.last_token.at[selected.row_ids].set(kept))


def decode_loop(
    params: Any,
    cache: KVCache,
    rows: RowState,
    sampler: SamplerState,
    packed: Int[Array, " I"],
    *,
    model: StepModel,
    layout: InputLayout,
    num_steps: int,
    variant: SampleVariant,
) -> tuple[KVCache, RowState, SamplerState, Int[Array, "K S"]]:
    """Runs `num_steps` steps of a decode bucket; returns the state after them and the ids of each step.

    `cache`, `rows` and `sampler` are donated. A row that has computed all but its last token is padding from then on:
    its ids mean nothing, and it writes to no page of its own.
    """
    inputs = layout.views(packed)
    limits = inputs.sampling[:, SAMPLING_FIELDS.index("max_num_tokens")]
    padding = layout.state.padding_row

    def run_step(carry: tuple[KVCache, RowState, SamplerState], _: None) -> tuple[Any, Array]:
        cache, rows, sampler = carry
        is_open = rows.num_computed[inputs.row_ids] + 1 < limits
        open_inputs = inputs._replace(
            row_ids=jnp.where(is_open, inputs.row_ids, padding), samples=jnp.where(is_open, inputs.samples, 0)
        )
        rows = replace(rows, num_computed=rows.num_computed.at[padding].set(0))
        cache, rows, selected, _ = run_forward(params, cache, rows, open_inputs, model=model, layout=layout)
        if variant is SampleVariant.FULL:
            rows, sampler, ids = sample_shaped_tokens(rows, sampler, selected, None, model=model)
        else:
            rows, ids = sample_tokens(rows, selected, model=model, greedy=variant is SampleVariant.GREEDY)
        return (cache, rows, sampler), ids

    (cache, rows, sampler), ids = lax.scan(run_step, (cache, rows, sampler), length=num_steps)
    return cache, rows, sampler, ids


def _advance(rows: RowState, inputs: StepInputs) -> tuple[RowState, Int[Array, " S"]]:
    """Returns the rows after this step's tokens, and the length of each row of the step [S]."""
    computed = jnp.where(inputs.starts == KEEP, rows.num_computed[inputs.row_ids], inputs.starts)
    seq_lens = computed + jnp.diff(inputs.query_start_loc)
    return replace(rows, num_computed=rows.num_computed.at[inputs.row_ids].set(seq_lens)), seq_lens


def _token_ids(rows: RowState, inputs: StepInputs) -> Int[Array, " T"]:
    """Returns the token ids, with each decode row's last sampled token, which only the device knows."""
    num_rows, num_tokens = inputs.row_ids.shape[0], inputs.token_ids.shape[0]
    last = rows.last_token[inputs.row_ids]  # decode rows come first, so row s of the step is token s
    last = jnp.pad(last, (0, max(0, num_tokens - num_rows)))[:num_tokens]
    return jnp.where(inputs.token_ids == ON_DEVICE, last, inputs.token_ids)


def _process(logits: Float[Array, " V"], line: SampleInputs, processor: LogitsProcessor) -> Float[Array, " V"]:
    """Runs the engine's logits processor on a row that asks for it."""
    fields = dict(zip(SAMPLING_FIELDS, line.sampling, strict=True))
    columns = [lax.bitcast_convert_type(fields[name], jnp.float32) for name in EXTRA_FIELDS]
    arguments = dict(zip(processor.arguments, columns, strict=False))
    # No branch: under vmap a branch would copy the function's arrays for each row.
    processed = processor.function(logits, arguments).astype(logits.dtype)
    return jnp.where(fields["has_extra"] == 1, processed, logits)


def _unpack_sampling(rows: RowState, selected: SampleInputs) -> SamplingInputs:
    names = [name for name in SAMPLING_FIELDS if name in SamplingInputs.__dataclass_fields__]
    columns = {name: selected.sampling[:, SAMPLING_FIELDS.index(name)] for name in names}
    floats = {name: lax.bitcast_convert_type(columns[name], jnp.float32) for name in FLOAT_FIELDS}
    positions = rows.num_computed[selected.row_ids]  # the position of the token to be sampled
    return SamplingInputs(**(columns | floats), positions=positions)

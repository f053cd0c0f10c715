"""A drafter with weights, which follows each step of the model and drafts what may come next.

It follows inside the forward program, since a program of its own would cost more than this work: it computes the tokens
that the model computes, from the model's true states, so its pages have no holes. Drafting, which most steps do not ask
for, is a program of its own (`draft`): one token of each row at a time, from the last computed one on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from jaxserve.core.models.base import DecoderConfig
from jaxserve.core.models.decoder import CacheLayout, Pools
from jaxserve.core.runtime.arguments import abstract_params
from jaxserve.core.runtime.batches import bound_pages, prepare_batches
from jaxserve.core.runtime.buckets import BucketTable
from jaxserve.core.runtime.device_state import KVCache, RowState
from jaxserve.core.runtime.feature import DeviceState, FeatureHost, ForwardedStep, SampledStep, StepFeature
from jaxserve.core.runtime.identity import describe_value
from jaxserve.core.runtime.inputs import KEEP
from jaxserve.core.runtime.memory import AttachedPages, CachePlan, params_bytes
from jaxserve.core.runtime.program_inputs import ProgramInputs
from jaxserve.core.runtime.programs import Program, ProgramKey
from jaxserve.core.runtime.rows import SAMPLING_FIELDS
from jaxserve.core.runtime.sizes import Sizes, attention_shapes, choose_layouts, make_specs
from jaxserve.core.runtime.step import head_params
from jaxserve.core.runtime.step_arrays import RowLines, SampledTokens, SelectedLines, unpack_sampling
from jaxserve.core.runtime.step_counts import StepCounts
from jaxserve.core.sampling import draw_uniforms, map_rows, sample, sample_greedy
from jaxserve.core.sampling.drafts import NO_DRAFT, count_reach
from jaxserve.features.speculation.drafters import DrafterModel, drafter_param_specs, match_groups
from jaxserve.features.speculation.drafters.passes import (
    draft_logits,
    expand_logits,
    map_drafts,
    read_target,
    run_pass,
)
from jaxserve.features.speculation.row_drafts import set_drafts
from pallas_kernels.backends import find_backend
from pallas_kernels.spec import AttnShape, KVSpec

_AUX = "aux"  # the column of what a head reads of the model at each row's last computed token


@dataclass(frozen=True)
class DraftPasses:
    """The static arguments of a drafter's passes, once its pools have a size."""

    target: DecoderConfig
    mesh: Mesh | None  # None on a single device
    layout: CacheLayout
    shapes: tuple[AttnShape, ...]  # per KV group of the drafter, on one device
    groups: tuple[int, ...]  # per KV group of the drafter, the model's whose page table it reads
    impl: str
    first_pool: int  # of its own


@dataclass(frozen=True)
class Drafter(StepFeature):
    """A method of speculative_config with weights. Its layers have pools of their own, under the model's page ids."""

    model: DrafterModel
    samples_drafts: bool  # drafts are drawn as the row's tokens are, not the likeliest ones
    max_drafts: int  # K
    most_rows: int  # the first rows of a step draft, since no program verifies more
    hidden: tuple[int, str]  # the size and the dtype of the model's states
    passes: DraftPasses | None = None  # of a bound drafter

    @property
    def limits(self) -> Mapping[str, Any]:
        """See `StepFeature.limits`."""
        return {"has_draft_passes": True, "num_lookahead_tokens": self.model.count_ahead(self.max_drafts)}

    @property
    def note(self) -> str:
        """See `StepFeature.note`."""
        return self.model.method

    @property
    def aux_layers(self) -> tuple[int, ...]:
        """See `StepFeature.aux_layers`."""
        return self.model.aux_layers

    @property
    def num_pools(self) -> int:
        """See `StepFeature.num_pools`."""
        return self._bound.layout.num_pools

    @property
    def _bound(self) -> DraftPasses:
        assert self.passes is not None
        return self.passes

    @property
    def _aux_size(self) -> int:
        """The numbers that it reads of the model at each token."""
        return len(self.model.aux_layers) * self.hidden[0]

    def choose_impl(self, sizes: Sizes) -> str:
        """Returns the attention of its layers: the model's, or portable attention if that cannot run their shape."""
        find_obstacle = find_backend(sizes.impl).module.find_obstacle
        return "xla" if any(map(find_obstacle, self._list_shapes(sizes, sizes.impl))) else sizes.impl

    def _make_specs(self, sizes: Sizes, impl: str) -> tuple[KVSpec, ...]:
        config = self.model.config
        return choose_layouts(impl, make_specs(config, sizes.page_size, config.dtype), sizes.platform)

    def _list_shapes(self, sizes: Sizes, impl: str) -> tuple[AttnShape, ...]:
        return attention_shapes(self.model.config, self._make_specs(sizes, impl), sizes.num_devices)

    def pages(self, sizes: Sizes) -> AttachedPages:
        """See `StepFeature.pages`."""
        config, specs = self.model.config, self._make_specs(sizes, self.choose_impl(sizes))
        groups = match_groups(self.model, sizes.model)
        return AttachedPages(specs, config.layer_groups, config.page_owners, groups, "drafter")

    def bind(self, sizes: Sizes, plan: CachePlan, mesh: Mesh, first_pool: int) -> Drafter:
        """See `StepFeature.bind`."""
        attached, impl = self.pages(sizes), self.choose_impl(sizes)
        layout = attached.lay_out(plan.num_pages)
        where = sizes.model, mesh if mesh.size > 1 else None
        passes = DraftPasses(*where, layout, self._list_shapes(sizes, impl), attached.sources, impl, first_pool)
        # Its products are those of the model, which have been tested by now.
        config = replace(self.model.config, few_rows=sizes.model.few_rows)
        return replace(self, model=replace(self.model, config=config), passes=passes)

    def column_specs(self, num_rows: int) -> Mapping[str, jax.ShapeDtypeStruct]:
        """See `StepFeature.column_specs`."""
        return {_AUX: self.handed_specs(num_rows)} if self._aux_size else {}

    def handed_specs(self, num_lines: int) -> Any:
        """See `StepFeature.handed_specs`."""
        return jax.ShapeDtypeStruct((num_lines, self._aux_size), self.hidden[1]) if self._aux_size else None

    def params_specs(self, sizes: Sizes, mesh: Mesh) -> Any:
        """See `StepFeature.params_specs`."""
        return abstract_params(drafter_param_specs(self.model), sizes, mesh)

    def params_bytes(self, sizes: Sizes) -> int:
        """See `StepFeature.params_bytes`."""
        return params_bytes(drafter_param_specs(self.model), sizes.num_devices, sizes.platform)

    def describe(self, sizes: Sizes) -> Mapping[str, Any]:
        """See `StepFeature.describe`."""
        return {"drafter": describe_value(self.model), "draws": self.samples_drafts}

    def list_programs(self, buckets: BucketTable) -> Iterator[ProgramKey]:
        """See `StepFeature.list_programs`."""
        yield from (("draft", rows) for rows in sorted({bucket.rows for bucket in buckets.buckets}))

    def list_largest(self, buckets: BucketTable) -> Iterator[ProgramKey]:
        """See `StepFeature.list_largest`."""
        yield "draft", max(buckets.row_counts)

    def make_program(self, kind: str, key: Any, inputs: ProgramInputs, state: Any, params: Any) -> Program | None:
        """See `StepFeature.make_program`."""
        if kind != "draft":
            return None
        arguments = head_params(inputs.params), params, inputs.cache, inputs.rows, inputs.lines(key)
        return Program(self.draft_tokens, arguments, results=(inputs.replicated,), donated=(2, 3), has_products=True)

    def follow_forward(
        self,
        params: Any,
        pools: KVCache,
        rows: RowState,
        step: ForwardedStep,
    ) -> tuple[RowState, KVCache, Any]:
        """Writes the drafter's keys and values of the step, and keeps the model's state at each row's last token."""
        pools = self._store_step(params, pools, step)
        aux = step.captured
        if aux is None or step.bucket.width > 1:  # a verify step knows only after sampling which token is the last
            return rows, pools, aux
        kept = step.before.columns[_AUX].at[step.inputs.row_ids].set(aux[step.ends])
        return replace(rows, columns={**rows.columns, _AUX: kept}), pools, None

    def follow_sample(
        self, rows: RowState, kept: Any, read: Any, step: SampledStep
    ) -> tuple[RowState, Any, Int[Array, "S K"] | None]:
        """Keeps the model's state at the last token that a verify step left each row."""
        if step.handed is None:
            return rows, kept, None
        of_last = step.handed.reshape(*step.runs.shape, -1)[jnp.arange(len(step.runs)), step.num_kept - 1]
        aux = rows.columns[_AUX].at[step.lines.row_ids].set(of_last)
        return replace(rows, columns={**rows.columns, _AUX: aux}), kept, None

    def _store_step(self, params: Any, pools: Pools, step: ForwardedStep) -> Pools:
        """Returns the drafter's pools with its keys and values of a step.

        What a head keeps at a position is made of the model's state there and the token behind it. So the entry of a
        row's last token is written by the row's next step, from the state in the row's column. If the row ends there,
        nobody writes it; whoever finds that page in the prefix cache reads one stale key, which can spoil drafts alone.
        """
        passes, drafter, lens, distribution = self._bound, self.model, step.seq_lens, step.inputs.distribution
        token_ids, aux = step.token_ids, step.captured
        if drafter.takes_next:
            token_ids, aux, lens = _pair_with_next(step)
            distribution = distribution[jnp.array([0, 0, 2])]  # chunks begin a token before their edge
        batches = prepare_batches(
            step.tables[jnp.array(passes.groups)],
            lens,
            step.inputs.query_start_loc,
            distribution,
            num_tokens=step.bucket.tokens,
            max_query_len=step.bucket.max_query_len,
            shapes=passes.shapes,
            impl=passes.impl,
        )
        _, pools = run_pass(
            drafter,
            params,
            step.params,
            step.config,
            read_target(drafter, params, aux),
            token_ids,
            pools,
            batches,
            layout=passes.layout,
            mesh=step.mesh,
            only_stores=True,
        )
        return pools

    def draft_tokens(
        self,
        target_params: Any,
        params: Any,
        cache: KVCache,
        rows: RowState,
        lines: RowLines,
    ) -> tuple[KVCache, RowState, Int[Array, "S K"]]:
        """Drafts what may follow the tokens of the step just sampled; returns the state and each row's drafts.

        One token of each row that sampled is computed at a time, on the drafter's own guesses. `cache` and `rows` are
        donated.
        """
        passes, drafter, few = self._bound, self.model, slice(self.most_rows)
        is_open, row_ids, sampling = lines.is_sampled[few] == 1, lines.row_ids[few], lines.sampling[few]
        limits = sampling[:, SAMPLING_FIELDS.index("max_num_tokens")]
        tables = rows.page_table[jnp.array(passes.groups)][:, row_ids]
        # Drafts lie behind those of the step before, of which more may have been accepted than the row may keep.
        tables = bound_pages(tables, limits, passes.shapes[0].spec.page_size, count_reach(self.max_drafts))
        tables = jnp.where(is_open[:, None], tables, 0)  # a row that has not sampled computes tokens of the null page
        computed = jnp.where(is_open, rows.num_computed[row_ids], 1)
        target, count = (target_params, passes.target), len(row_ids)
        choose = self._make_choice(params, target_params, sampling)

        def draft_next(carry: tuple[Pools, Array | None, Array], index: Array) -> tuple[tuple[Any, ...], Array]:
            pools, states, token_ids = carry
            batches = prepare_batches(
                tables,
                computed + index + (not drafter.takes_next),
                jnp.arange(count + 1, dtype=jnp.int32),
                jnp.full(3, count, jnp.int32),
                num_tokens=count,
                max_query_len=1,
                shapes=passes.shapes,
                impl=passes.impl,
            )
            where = {"layout": passes.layout, "mesh": passes.mesh}
            states, pools = run_pass(drafter, params, *target, states, token_ids, pools, batches, **where)
            token_ids = choose(states, computed + index + 1)
            return (pools, states if drafter.takes_next else None, token_ids), token_ids

        own = slice(passes.first_pool, passes.first_pool + self.num_pools)
        aux = rows.columns[_AUX][row_ids] if _AUX in rows.columns else None
        begin = cache[own], read_target(drafter, params, aux), rows.last_token[row_ids]
        (pools, *_), drafts = lax.scan(draft_next, begin, jnp.arange(self.max_drafts, dtype=jnp.int32))
        rows, drafts = set_drafts(rows, lines.row_ids, jnp.where(is_open[:, None], drafts.T, NO_DRAFT))
        return (*cache[: own.start], *pools, *cache[own.stop :]), rows, drafts

    def _make_choice(
        self, params: Any, target_params: Any, sampling: Int[Array, "P F"]
    ) -> Callable[[Float[Array, "P D"], Int[Array, " P"]], Int[Array, " P"]]:
        """Returns the function that chooses drafts from states and the positions that they are for."""
        target = self._bound.target
        vocab_size = target.vocab_size

        def choose(states: Float[Array, "P D"], positions: Int[Array, " P"]) -> Int[Array, " P"]:
            logits = draft_logits(self.model, params, target_params, target, states)
            if not self.samples_drafts:
                return map_drafts(self.model, params, map_rows(sample_greedy, logits)[0])
            inputs = unpack_sampling(sampling, positions)
            whole = expand_logits(self.model, params, logits, vocab_size)

            def draw(logits: Array, inputs: Any, uniform: Array) -> Array:
                return sample(logits, inputs, uniform, vocab_size=vocab_size)[0]

            return map_rows(draw, whole, inputs, draw_uniforms(inputs))

        return choose

    def open(self, sizes: Sizes, params: Any, counts: StepCounts) -> DrafterHost:
        """See `StepFeature.open`."""
        return DrafterHost(params)


class DrafterHost(FeatureHost):
    """The parameters of a drafter, and its call behind a step that is to have drafts."""

    def __init__(self, params: Any) -> None:
        self.params = params

    def draft(self, device: DeviceState, params: Any, selected: SelectedLines, sampled: SampledTokens) -> SampledTokens:
        """See `FeatureHost.draft`."""
        program = device.programs.get("draft", len(selected.lines))
        arguments = head_params(params), self.params, device.cache, device.rows, selected.lines
        device.cache, device.rows, drafts = program(*arguments)
        return replace(sampled, drafts=drafts)


def _pair_with_next(
    step: ForwardedStep,
) -> tuple[Int[Array, " T"], Float[Array, "T AD"], Int[Array, " S"]]:
    """Returns token ids and the states before them, and the length of each row's run of such pairs.

    A row that goes on has the state before its first token: its pairs lie one position before its tokens. Any other
    row's begin at its first token, so that its last one wants a token that nobody knows yet. Whatever is taken for it,
    the row's next step writes that entry anew.
    """
    assert step.captured is not None
    rows, inputs, bucket = step.before, step.inputs, step.bucket
    before = rows.columns[_AUX][inputs.row_ids]
    goes_on = (inputs.starts == KEEP) | ((inputs.continues == 1) & (inputs.starts == rows.num_computed[inputs.row_ids]))
    if bucket.is_decode:
        shifted, each_goes_on = before, goes_on
    else:
        lens = jnp.diff(inputs.query_start_loc)
        firsts = jnp.where(lens > 0, inputs.query_start_loc[:-1], bucket.tokens)
        shifted = jnp.roll(step.captured, 1, axis=0).at[firsts].set(before, mode="drop")
        each_goes_on = jnp.repeat(goes_on, lens, total_repeat_length=bucket.tokens)
    token_ids = jnp.where(each_goes_on, step.token_ids, jnp.roll(step.token_ids, -1))
    return token_ids, jnp.where(each_goes_on[:, None], shifted, step.captured), step.seq_lens - goes_on

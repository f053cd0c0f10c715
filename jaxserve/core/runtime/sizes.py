"""The static sizes and choices of an engine."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import jax.numpy as jnp

from jaxserve.config import EngineConfig
from jaxserve.core.layers.memory import StateArray
from jaxserve.core.layers.stack import StackMode
from jaxserve.core.models.base import DecoderConfig
from jaxserve.core.pages.manager import CHUNK_EDGE
from jaxserve.core.runtime.batches import MUTUAL_IMPL
from jaxserve.core.runtime.buckets import BucketTable, choose_verify_sizes, make_buckets
from jaxserve.core.runtime.experts import ExpertChoice, choose_experts
from jaxserve.core.runtime.inputs import StateShape
from jaxserve.core.runtime.products import choose_products
from jaxserve.core.runtime.recurrence import RecurrenceChoice, choose_recurrence
from jaxserve.core.runtime.restrictions import find_snapshot_grid, find_state_edge, restrict_options
from jaxserve.core.runtime.rows import SampleVariant, list_variants
from jaxserve.core.sampling.drafts import count_reach
from jaxserve.core.sharding import DEFAULT_RULES
from jaxserve.errors import ConfigError
from jaxserve.files import find_other_writer
from jaxserve.logits_processor import LogitsProcessor
from pallas_kernels.backends import choose_layout, find_backend, find_table_obstacle, resolve_impl
from pallas_kernels.cpu.library import find_obstacle as find_library_obstacle
from pallas_kernels.cpu.library import has_tiles, max_product_rows
from pallas_kernels.cpu.library import load as load_cpu_kernels
from pallas_kernels.cpu.packing import DTYPES as PACKED_DTYPES
from pallas_kernels.platform import name_platform
from pallas_kernels.spec import AttnShape, KVSpec

_KV_DTYPES = {"fp8": "float8_e4m3fn"}  # by users' names


@dataclass(frozen=True)
class Sizes:
    """The static sizes and choices of one engine but for its features, before memory is planned."""

    config: EngineConfig  # resolved
    model: DecoderConfig
    platform: str
    num_devices: int
    buckets: BucketTable
    state: StateShape
    specs: tuple[KVSpec, ...]  # pages of each KV group, for the whole model
    impl: str
    impl_reason: str  # for users
    fell_back: bool = False  # to portable attention on an accelerator, without being asked
    processor: LogitsProcessor | None = None
    experts: ExpertChoice | None = None
    recurrence: RecurrenceChoice | None = None
    must_cache_prefixes: bool = False  # enable_prefix_caching was given, not chosen

    @property
    def attention(self) -> tuple[AttnShape, ...]:
        """The attention shape of each KV group, on one device."""
        is_fixed = self.config.scheduler.deterministic
        return attention_shapes(self.model, self.specs, self.num_devices, fixed_splits=is_fixed)

    @property
    def page_size(self) -> int:
        """Tokens of a page."""
        return self.specs[0].page_size

    @property
    def prompt_impl(self) -> tuple[str, str] | None:
        """Returns the implementation of steps that compute prompts and the reason, if it is another than `impl`."""
        if not self.model.mutual_images or find_backend(self.impl).takes_last_keys:
            return None
        return MUTUAL_IMPL, "portable attention: tokens of one image see each other, which kernels have no mask for"

    def with_impl(self, impl: str, reason: str) -> Self:
        """Returns the sizes with another attention implementation, and pages in the layout that it wants."""
        return replace(self, impl=impl, impl_reason=reason, specs=choose_layouts(impl, self.specs, self.platform))

    @property
    def chunk_edges(self) -> tuple[int, ...]:
        """See `SchedulerLimits`; where bits count, all cuts are at multiples of the first."""
        edge = find_state_edge(self.model)
        return (edge,) if self.config.scheduler.deterministic else tuple(dict.fromkeys((edge, CHUNK_EDGE)))

    @property
    def snapshot_grid(self) -> int:
        """Tokens; snapshots of recurrent states lie at their multiples. 0: there are none."""
        return find_snapshot_grid(self.config, self.model)

    @property
    def state_bytes(self) -> int:
        """Bytes of a row's recurrent states on each device."""
        return sum(layers * self._count_bytes(state.arrays) for state, layers in self.model.states)

    @property
    def pending_bytes(self) -> int:
        """Bytes on each device of what recurrent layers read of the tokens of a verify step."""
        token = sum(layers * self._count_bytes(state.streams) for state, layers in self.model.states)
        return self.state.max_pending * token

    def _count_bytes(self, arrays: Sequence[StateArray]) -> int:
        total = 0
        for array in arrays:
            size = math.prod(array.shape) * jnp.dtype(array.dtype).itemsize
            is_shared = any(axis is not None for axis in DEFAULT_RULES.spec(array.axes))
            total += size // (self.num_devices if is_shared else 1)
        return total

    @property
    def generates(self) -> bool:
        """See `DecoderConfig.generates`."""
        return self.model.generates

    @property
    def calls_library(self) -> bool:
        """Whether programs may call the CPU's library, which is then loaded."""
        return _calls_library(self.config, self.platform)

    @property
    def stack_mode(self) -> StackMode:
        """Stacked on a TPU alone: few leaves take little to dispatch.

        A CPU would copy slices of stacked arrays in each step. On a GPU the slice is part of a product's kernel, so
        each layer's product would be a kernel of its own, to be tuned and compiled: minutes of a start.
        """
        return "stacked" if self.platform == "tpu" else "unrolled"

    @property
    def variants(self) -> dict[SampleVariant, SampleVariant]:
        """For each sample variant that a step can need, the one that it runs; none if no step samples."""
        if not self.generates:
            return {}
        return list_variants(deterministic=self.config.scheduler.deterministic)

    @property
    def sample_programs(self) -> list[SampleVariant]:
        """The sample variants that steps run."""
        return sorted(set(self.variants.values()))

    @property
    def chooses_widths(self) -> bool:
        """Whether the scheduler chooses how many drafts steps verify, for which it needs their costs."""
        speculative = self.config.speculation.speculative_config
        return speculative is not None and speculative.num_speculative_tokens_per_batch_size is None


def make_specs(model: DecoderConfig, page_size: int, dtype: str) -> tuple[KVSpec, ...]:
    """Returns the pages of each KV group, for the whole model, in the plain layout."""
    heads = [group.memory for group in model.kv_groups]
    return tuple(KVSpec(h.num_kv_heads, h.head_dim, page_size, dtype, value_dim=h.value_dim) for h in heads)


def choose_layouts(impl: str, specs: Sequence[KVSpec], platform: str) -> tuple[KVSpec, ...]:
    """Returns the specs with the page layouts that an implementation wants."""
    return tuple(replace(spec, layout=choose_layout(impl, spec, platform=platform)) for spec in specs)


def attention_shapes(
    model: DecoderConfig, specs: Sequence[KVSpec], num_devices: int, *, fixed_splits: bool = False
) -> tuple[AttnShape, ...]:
    """Returns the attention shape of each KV group, on one device."""
    shares = (replace(spec, num_kv_heads=spec.num_kv_heads // num_devices) for spec in specs)
    return tuple(
        AttnShape(
            group.memory.num_heads // num_devices, share, model.dtype, group.window, fixed_splits, group.memory.causal
        )
        for group, share in zip(model.kv_groups, shares, strict=True)
    )


def make_sizes(config: EngineConfig, model: DecoderConfig, platform: str, device_kind: str) -> Sizes:
    """Returns the static sizes of an engine.

    Args:
        model: expanded for the devices, with its final `max_model_len`.

    Raises:
        ConfigError: the options do not fit together or the attention implementation cannot run here.
    """
    platform, must_cache = name_platform(platform), bool(config.cache.enable_prefix_caching)
    config = restrict_options(config, model, platform)
    scheduler, page_size = config.scheduler, config.cache.page_size
    assert scheduler.max_num_seqs and scheduler.max_num_batched_tokens and page_size
    sizes = config.compile.precompile_bs_paddings, config.compile.precompile_token_paddings
    buckets = make_buckets(platform, scheduler.max_num_seqs, scheduler.max_num_batched_tokens, *sizes)
    buckets = buckets.take_largest() if scheduler.deterministic else buckets
    specs, impl, reason = _choose_attention(config, model, platform, device_kind)  # loads what the others may call
    buckets = _add_verify(config, model, buckets, platform)
    speculative = config.speculation.speculative_config
    max_drafts = 0 if speculative is None else speculative.num_speculative_tokens
    groups, pages_per_row = len(model.kv_groups), -(-model.max_model_len // page_size)
    rows = max(buckets.row_counts)
    # For running rows, in one step.
    new_pages = rows * -(-count_reach(max_drafts) // page_size) + -(-scheduler.max_num_batched_tokens // page_size)
    state = StateShape(
        groups=groups,
        rows=rows + 1,
        pages_per_row=pages_per_row,
        max_page_updates=groups * (new_pages + pages_per_row),  # and for admitted prefixes
        max_drafts=max_drafts,
        max_pending=max((count * width for count, width in buckets.verify_sizes), default=0) if model.states else 0,
        max_state_copies=2 * rows if find_snapshot_grid(config, model) else 0,  # each row from one and to one
    )
    obstacle = find_table_obstacle(impl, rows, pages_per_row)
    if obstacle is not None:
        raise ConfigError(f"{obstacle}; or use attention_impl='xla'", field="max_num_seqs", value=rows)
    fell_back = impl == "xla" and config.compile.attention_impl == "auto" and platform != "cpu"
    num_devices = config.parallel.tensor_parallel_size
    model = choose_products(model, num_devices, platform, device_kind)
    few_rows = _choose_few_rows(config, model, platform)
    model = replace(model, few_rows=few_rows, packed=_packs_weights(config, model, platform))
    model, experts = choose_experts(model, num_devices, platform, device_kind)
    largest = buckets.largest
    model, recurrence = choose_recurrence(
        model, num_devices, platform, device_kind, largest.tokens, max(buckets.row_counts)
    )
    return Sizes(
        config,
        model,
        platform,
        num_devices,
        buckets,
        state,
        specs,
        impl,
        reason,
        fell_back,
        experts=experts,
        recurrence=recurrence,
        must_cache_prefixes=must_cache,
    )


def _add_verify(config: EngineConfig, model: DecoderConfig, buckets: BucketTable, platform: str) -> BucketTable:
    """Returns the buckets with those that verify drafts; ConfigError: more drafts than a step or a sequence holds."""
    chosen, budget = config.speculation.speculative_config, config.scheduler.max_num_batched_tokens
    if chosen is None:
        return buckets
    assert budget is not None
    most_drafts = chosen.num_speculative_tokens
    for name, most in (("max_model_len", model.max_model_len), ("max_num_batched_tokens", budget)):
        if most_drafts >= most:
            message = f"must be below {name}={most}, got {most_drafts}"
            raise ConfigError(message, field="speculative_config.num_speculative_tokens", value=most_drafts)
    fixed = chosen.num_speculative_tokens_per_batch_size
    return buckets.with_verify(choose_verify_sizes(platform, buckets.row_counts, budget, most_drafts, fixed))


def _choose_few_rows(config: EngineConfig, model: DecoderConfig, platform: str) -> int:
    """Returns the most rows of products that the CPU's library makes; compilers cannot split them over a mesh."""
    return max_product_rows(model.dtype) if _calls_library(config, platform) else 0


def _packs_weights(config: EngineConfig, model: DecoderConfig, platform: str) -> bool:
    """Whether matrices are packed for the CPU's library: where the processor has tiles, which make that worth it."""
    return _calls_library(config, platform) and has_tiles() and model.dtype in PACKED_DTYPES


def _calls_library(config: EngineConfig, platform: str) -> bool:
    """Whether programs of one device may call the CPU's library, which is then loaded."""
    is_whole = config.parallel.tensor_parallel_size == 1
    return is_whole and _uses_cpu_kernels(config, platform) and find_library_obstacle() is None


def _uses_cpu_kernels(config: EngineConfig, platform: str) -> bool:
    """Whether the library of CPU kernels is asked for; it may still be impossible to build."""
    return platform == "cpu" and config.compile.attention_impl in ("auto", "cpu")


def _choose_attention(
    config: EngineConfig, model: DecoderConfig, platform: str, device_kind: str
) -> tuple[tuple[KVSpec, ...], str, str]:
    """Returns the page specs, the attention implementation and the reason for it.

    All layers have the same implementation: portable attention, if another cannot do the shape of one of them. For a
    CPU, its library of kernels is loaded first, and compiled if the compile cache does not have it.
    """
    wanted = config.compile.attention_impl
    assert config.cache.page_size is not None  # resolved
    dtype = _KV_DTYPES.get(config.cache.kv_cache_dtype, config.cache.kv_cache_dtype)
    dtype = model.dtype if dtype == "auto" else dtype
    specs = make_specs(model, config.cache.page_size, dtype)
    name = None if wanted == "auto" else wanted
    if _uses_cpu_kernels(config, platform):
        kept = config.compile.cache_dir
        load_cpu_kernels(kept if kept is None or not kept.is_dir() or find_other_writer(kept) is None else None)
    try:
        found = [
            resolve_impl(name, shape, platform=platform, device_kind=device_kind)
            for shape in attention_shapes(model, specs, config.parallel.tensor_parallel_size)
        ]
    except ValueError as error:
        raise ConfigError(str(error), field="attention_impl", value=wanted) from error
    impl, reason = next((each for each in found if each[0] == "xla"), found[0])
    return choose_layouts(impl, specs, platform), impl, reason

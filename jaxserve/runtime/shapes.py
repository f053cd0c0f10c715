"""The static sizes and choices of an engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from jaxserve.config import EngineConfig
from jaxserve.errors import ConfigError
from jaxserve.layers.stack import StackMode
from jaxserve.logits_processor import LogitsProcessor
from jaxserve.models.base import DecoderConfig
from jaxserve.models.drafters import DrafterModel, match_groups
from jaxserve.runtime.buckets import BucketTable, choose_verify_sizes, make_buckets
from jaxserve.runtime.experts import ExpertChoice, choose_experts
from jaxserve.runtime.inputs import StateShape
from jaxserve.runtime.memory import DrafterPages
from jaxserve.runtime.page_copies import COPY_PAGES
from jaxserve.runtime.products import choose_products
from jaxserve.runtime.rows import SampleVariant, list_variants
from jaxserve.runtime.step_model import Drafting
from jaxserve.scheduler import SchedulerLimits
from jaxserve.speculation import LOOKUP_METHODS, make_lookup_drafter
from pallas_kernels.backends import choose_layout, find_backend, find_table_obstacle, resolve_impl
from pallas_kernels.cpu.library import find_obstacle as find_library_obstacle
from pallas_kernels.cpu.library import load as load_cpu_kernels
from pallas_kernels.cpu.library import max_product_rows
from pallas_kernels.platform import name_platform
from pallas_kernels.spec import AttnShape, KVSpec

_KV_DTYPES = {"fp8": "float8_e4m3fn"}  # by users' names


@dataclass(frozen=True)
class DrafterChoice:
    """A drafter with weights."""

    model: DrafterModel
    draws: bool  # drafts are drawn as the row's tokens are


@dataclass(frozen=True)
class Shapes:
    """The static sizes and choices of one engine, before memory is planned."""

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
    drafting: Drafting | None = None  # without the drafter's layout, which depends on the pools
    drafter: DrafterChoice | None = None
    experts: ExpertChoice | None = None

    @property
    def attention(self) -> tuple[AttnShape, ...]:
        """The attention shape of each KV group, on one device."""
        is_fixed = self.config.scheduler.deterministic
        return _attention_shapes(self.model, self.specs, self.num_devices, fixed_splits=is_fixed)

    @property
    def page_size(self) -> int:
        """Tokens of a page."""
        return self.specs[0].page_size

    def with_impl(self, impl: str, reason: str) -> Shapes:
        """Returns the shapes with another attention implementation, and pages in the layout that it wants."""
        return replace(self, impl=impl, impl_reason=reason, specs=_choose_layouts(impl, self.specs, self.platform))

    @property
    def aux_size(self) -> int:
        """The numbers that a drafter reads of the model at each token."""
        return 0 if self.drafter is None else len(self.drafter.model.aux_layers) * self.model.hidden_size

    @property
    def drafter_impl(self) -> str:
        """The attention of the drafter's layers: the model's, or portable attention if it cannot run their shape."""
        assert self.drafter is not None
        find_obstacle = find_backend(self.impl).module.find_obstacle
        return "xla" if any(map(find_obstacle, self._list_drafter_shapes(self.impl))) else self.impl

    @property
    def drafter_attention(self) -> tuple[AttnShape, ...]:
        """The attention shape of each KV group of the drafter, on one device."""
        return self._list_drafter_shapes(self.drafter_impl)

    @property
    def drafter_pages(self) -> DrafterPages | None:
        """The pages of the drafter's layers."""
        if self.drafter is None:
            return None
        config = self.drafter.model.config
        specs = self._make_drafter_specs(self.drafter_impl)
        return DrafterPages(
            specs, config.layer_groups, config.page_owners, match_groups(self.drafter.model, self.model)
        )

    def _make_drafter_specs(self, impl: str) -> tuple[KVSpec, ...]:
        assert self.drafter is not None
        config = self.drafter.model.config
        return _choose_layouts(impl, _make_specs(config, self.page_size, config.dtype), self.platform)

    def _list_drafter_shapes(self, impl: str) -> tuple[AttnShape, ...]:
        assert self.drafter is not None
        return _attention_shapes(self.drafter.model.config, self._make_drafter_specs(impl), self.num_devices)

    @property
    def stack_mode(self) -> StackMode:
        """Stacked on a TPU alone: few leaves take little to dispatch.

        A CPU would copy slices of stacked arrays in each step. On a GPU the slice is part of a product's kernel, so
        each layer's product would be a kernel of its own, to be tuned and compiled: minutes of a start.
        """
        return "stacked" if self.platform == "tpu" else "unrolled"

    @property
    def variants(self) -> dict[SampleVariant, SampleVariant]:
        """For each sample variant that a step can need, the one that it runs."""
        return list_variants(deterministic=self.config.scheduler.deterministic)

    @property
    def sample_programs(self) -> list[SampleVariant]:
        """The sample variants that steps run."""
        return sorted(set(self.variants.values()))

    @property
    def max_copies(self) -> int:
        """Pages that a step loads from the host at most: as many as it can compute."""
        scheduler = self.config.scheduler
        assert scheduler.max_num_batched_tokens is not None
        return max(COPY_PAGES, -(-scheduler.max_num_batched_tokens // self.page_size))

    @property
    def chooses_widths(self) -> bool:
        """Whether the scheduler chooses how many drafts steps verify, for which it needs their costs."""
        speculative = self.config.speculation.speculative_config
        return speculative is not None and speculative.num_speculative_tokens_per_batch_size is None

    @property
    def _draft_limits(self) -> dict[str, Any]:
        drafting, speculative = self.drafting, self.config.speculation.speculative_config
        if drafting is None or speculative is None:
            return {}
        lookup, choice = drafting.lookup, self.drafter
        return {
            "max_drafts": drafting.max_drafts,
            "fixed_drafts": speculative.num_speculative_tokens_per_batch_size,
            "draft_costs": choice is not None,
            "num_lookahead_tokens": 0 if choice is None else choice.model.count_ahead(drafting.max_drafts),
            "looks_up": lookup is not None,
            "remembers": lookup is not None and lookup.remembers,
        }

    @property
    def limits(self) -> SchedulerLimits:
        scheduler, updates = self.config.scheduler, self.state.groups * self.state.pages_per_row
        assert scheduler.max_num_seqs is not None and scheduler.max_num_batched_tokens is not None
        return SchedulerLimits(
            max_num_seqs=scheduler.max_num_seqs,
            max_num_batched_tokens=scheduler.max_num_batched_tokens,
            max_model_len=self.model.max_model_len,
            max_prefix_updates=updates,
            row_sizes=self.buckets.row_counts,
            loop_rows=self.buckets.loop_rows,
            token_sizes=self.buckets.token_counts,
            verify_widths=self.buckets.verify_sizes,
            **self._draft_limits,
            # On accelerators small steps take as long as reading the weights, whatever their padding.
            pads_cheaply=self.platform != "cpu",
            options=scheduler,
        )


def _make_specs(model: DecoderConfig, page_size: int, dtype: str) -> tuple[KVSpec, ...]:
    """Returns the pages of each KV group, for the whole model, in the plain layout."""
    heads = [group.heads for group in model.kv_groups]
    return tuple(KVSpec(h.num_kv_heads, h.head_dim, page_size, dtype, value_dim=h.value_dim) for h in heads)


def _choose_layouts(impl: str, specs: Sequence[KVSpec], platform: str) -> tuple[KVSpec, ...]:
    return tuple(replace(spec, layout=choose_layout(impl, spec, platform=platform)) for spec in specs)


def _attention_shapes(
    model: DecoderConfig, specs: Sequence[KVSpec], num_devices: int, *, fixed_splits: bool = False
) -> tuple[AttnShape, ...]:
    """Returns the attention shape of each KV group, on one device."""
    shares = (replace(spec, num_kv_heads=spec.num_kv_heads // num_devices) for spec in specs)
    return tuple(
        AttnShape(group.heads.num_heads // num_devices, share, model.dtype, group.window, fixed_splits)
        for group, share in zip(model.kv_groups, shares, strict=True)
    )


def make_shapes(
    config: EngineConfig, model: DecoderConfig, platform: str, device_kind: str, drafter: DrafterModel | None = None
) -> Shapes:
    """Returns all static sizes.

    Args:
        model: expanded for the devices, with its final `max_model_len`.
        drafter: expanded, too, if speculative_config names one with weights.

    Raises:
        ConfigError: the options do not fit together or the attention implementation cannot run here.
    """
    platform = name_platform(platform)
    config = config.resolve(platform)
    scheduler, page_size = config.scheduler, config.cache.page_size
    assert scheduler.max_num_seqs and scheduler.max_num_batched_tokens and page_size
    sizes = config.compile.precompile_bs_paddings, config.compile.precompile_token_paddings
    buckets = make_buckets(platform, scheduler.max_num_seqs, scheduler.max_num_batched_tokens, *sizes)
    buckets = buckets.take_largest() if scheduler.deterministic else buckets
    specs, impl, reason = _choose_attention(config, model, platform, device_kind)  # loads what the others may call
    buckets, drafting = _plan_drafting(config, model, buckets, platform)
    reach = 2 * drafting.max_drafts + 1 if drafting is not None else 1  # a row's drafts, and those behind them
    groups, pages_per_row = len(model.kv_groups), -(-model.max_model_len // page_size)
    rows = max(buckets.row_counts)
    # For running rows, in one step.
    new_pages = rows * -(-reach // page_size) + -(-scheduler.max_num_batched_tokens // page_size)
    state = StateShape(
        groups=groups,
        rows=rows + 1,
        pages_per_row=pages_per_row,
        max_page_updates=groups * (new_pages + pages_per_row),  # and for admitted prefixes
        corpus=None if drafting is None or drafting.lookup is None else drafting.lookup.corpus_shape,
    )
    obstacle = find_table_obstacle(impl, rows, pages_per_row)
    if obstacle is not None:
        raise ConfigError(f"{obstacle}; or use attention_impl='xla'", field="max_num_seqs", value=rows)
    fell_back = impl == "xla" and config.compile.attention_impl == "auto" and platform != "cpu"
    num_devices = config.parallel.tensor_parallel_size
    model = choose_products(model, num_devices, platform, device_kind)
    model = replace(model, few_rows=_choose_few_rows(config, model, platform))
    model, experts = choose_experts(model, num_devices, platform, device_kind)
    return Shapes(
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
        drafting=drafting,
        drafter=_choose_drafter(config, drafter),
        experts=experts,
    )


def _plan_drafting(
    config: EngineConfig, model: DecoderConfig, buckets: BucketTable, platform: str
) -> tuple[BucketTable, Drafting | None]:
    """Returns the buckets with those that verify drafts, and how drafts are made but for a drafter with weights."""
    chosen, budget = config.speculation.speculative_config, config.scheduler.max_num_batched_tokens
    if chosen is None:
        return buckets, None
    assert budget is not None
    most_drafts = chosen.num_speculative_tokens
    for name, most in (("max_model_len", model.max_model_len), ("max_num_batched_tokens", budget)):
        if most_drafts >= most:
            message = f"must be below {name}={most}, got {most_drafts}"
            raise ConfigError(message, field="speculative_config.num_speculative_tokens", value=most_drafts)
    fixed = chosen.num_speculative_tokens_per_batch_size
    sizes = choose_verify_sizes(platform, buckets.row_counts, budget, most_drafts, fixed)
    most_rows = max((rows for rows, _ in sizes), default=1)
    lookup = None
    if chosen.method in LOOKUP_METHODS:
        lookup = make_lookup_drafter(chosen, in_library=_calls_library(config, platform))
    return buckets.with_verify(sizes), Drafting(most_drafts, most_rows, lookup)


def _choose_drafter(config: EngineConfig, drafter: DrafterModel | None) -> DrafterChoice | None:
    chosen, size = config.speculation.speculative_config, config.cache.kv_offloading_size
    if drafter is None or chosen is None:
        return None
    if size is not None:
        message = "the host tier keeps no pages of a drafter with weights; leave one of the two out"
        raise ConfigError(message, field="kv_offloading_size", value=size)
    return DrafterChoice(drafter, chosen.draft_sample_method == "probabilistic")


def _choose_few_rows(config: EngineConfig, model: DecoderConfig, platform: str) -> int:
    """Returns the most rows of products that the CPU's library makes; compilers cannot split them over a mesh."""
    return max_product_rows(model.dtype) if _calls_library(config, platform) else 0


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
    specs = _make_specs(model, config.cache.page_size, dtype)
    name = None if wanted == "auto" else wanted
    if _uses_cpu_kernels(config, platform):
        load_cpu_kernels(config.compile.cache_dir)
    try:
        found = [
            resolve_impl(name, shape, platform=platform, device_kind=device_kind)
            for shape in _attention_shapes(model, specs, config.parallel.tensor_parallel_size)
        ]
    except ValueError as error:
        raise ConfigError(str(error), field="attention_impl", value=wanted) from error
    impl, reason = next((each for each in found if each[0] == "xla"), found[0])
    return _choose_layouts(impl, specs, platform), impl, reason

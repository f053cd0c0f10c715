"""The static sizes and choices of an engine."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from jaxserve.config import EngineConfig
from jaxserve.errors import ConfigError
from jaxserve.layers.stack import StackMode
from jaxserve.logits_processor import LogitsProcessor
from jaxserve.models.base import DecoderConfig, KVGroup
from jaxserve.runtime.buckets import BucketTable, choose_verify_sizes, make_buckets
from jaxserve.runtime.inputs import StateShape
from jaxserve.runtime.page_copies import COPY_PAGES
from jaxserve.runtime.rows import SampleVariant, list_variants
from jaxserve.runtime.step_model import Drafting
from jaxserve.scheduler import SchedulerLimits
from jaxserve.speculation import make_lookup_drafter
from pallas_kernels.backends import choose_layout, find_backend, resolve_impl
from pallas_kernels.spec import AttnShape, KVSpec

_KV_DTYPES = {"fp8": "float8_e4m3fn"}  # by users' names


@dataclass(frozen=True)
class Shapes:
    """The static sizes and choices of one engine, before memory is planned."""

    config: EngineConfig  # resolved
    model: DecoderConfig
    platform: str
    num_devices: int
    buckets: BucketTable
    state: StateShape
    spec: KVSpec  # pages of the whole model
    impl: str
    impl_reason: str  # for users
    fell_back: bool = False  # to portable attention on an accelerator, without being asked
    processor: LogitsProcessor | None = None
    drafting: Drafting | None = None

    @property
    def attention(self) -> tuple[AttnShape, ...]:
        """The attention shape of each KV group, on one device."""
        return tuple(_attention_shape(self.model, self.spec, group, self.num_devices) for group in self.model.kv_groups)

    @property
    def stack_mode(self) -> StackMode:
        """Unrolled on CPU, which copies slices of stacked arrays in each step; accelerators want few leaves."""
        return "unrolled" if self.platform == "cpu" else "stacked"

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
        return max(COPY_PAGES, -(-scheduler.max_num_batched_tokens // self.spec.page_size))

    @property
    def _draft_limits(self) -> dict[str, Any]:
        drafting, speculative = self.drafting, self.config.speculation.speculative_config
        if drafting is None or speculative is None:
            return {}
        lookup, head = drafting.lookup, drafting.head
        return {
            "max_drafts": drafting.max_drafts,
            "fixed_drafts": speculative.num_speculative_tokens_per_batch_size,
            "draft_costs": head is not None,
            "num_lookahead_tokens": 0 if head is None else head.model.count_passes(drafting.max_drafts),
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


def _attention_shape(model: DecoderConfig, spec: KVSpec, group: KVGroup, num_devices: int) -> AttnShape:
    share = replace(spec, num_kv_heads=spec.num_kv_heads // num_devices)
    return AttnShape(model.attention.num_heads // num_devices, share, model.dtype, group.window)


def make_shapes(config: EngineConfig, model: DecoderConfig, platform: str, device_kind: str) -> Shapes:
    """Returns all static sizes. `model` must be expanded for the devices and have its final `max_model_len`.

    Raises:
        ConfigError: the options do not fit together or the attention implementation cannot run here.
    """
    config = config.resolve(platform)
    scheduler, page_size = config.scheduler, config.cache.page_size
    assert scheduler.max_num_seqs and scheduler.max_num_batched_tokens and page_size
    sizes = config.compile.precompile_bs_paddings, config.compile.precompile_token_paddings
    buckets = make_buckets(platform, scheduler.max_num_seqs, scheduler.max_num_batched_tokens, *sizes)
    buckets = buckets.take_largest() if scheduler.deterministic else buckets
    groups, pages_per_row = len(model.kv_groups), -(-model.max_model_len // page_size)
    rows = max(buckets.row_counts)
    new_pages = rows + -(-scheduler.max_num_batched_tokens // page_size)  # for running rows, in one step
    state = StateShape(
        groups=groups,
        rows=rows + 1,
        pages_per_row=pages_per_row,
        max_page_updates=groups * (new_pages + pages_per_row),  # and for admitted prefixes
    )
    spec, impl, reason = _choose_attention(config, model, platform, device_kind)
    drafting = None
    if (speculative := config.speculation.speculative_config) is not None:
        drafts, fixed = speculative.num_speculative_tokens, speculative.num_speculative_tokens_per_batch_size
        budget = scheduler.max_num_batched_tokens
        buckets = buckets.with_verify(choose_verify_sizes(platform, buckets.row_counts, budget, drafts, fixed))
        most_rows = max(rows for rows, _ in buckets.verify_sizes)
        drafting = Drafting(drafts, most_rows, make_lookup_drafter(speculative))
    fell_back = impl == "xla" and config.compile.attention_impl == "auto" and platform != "cpu"
    num_devices = config.parallel.tensor_parallel_size
    return Shapes(
        config, model, platform, num_devices, buckets, state, spec, impl, reason, fell_back, drafting=drafting
    )


def _choose_attention(
    config: EngineConfig, model: DecoderConfig, platform: str, device_kind: str
) -> tuple[KVSpec, str, str]:
    """Returns the page spec, the attention implementation and the reason for it."""
    attention, wanted = model.attention, config.compile.attention_impl
    assert config.cache.page_size is not None  # resolved
    dtype = _KV_DTYPES.get(config.cache.kv_cache_dtype, config.cache.kv_cache_dtype)
    dtype = model.dtype if dtype == "auto" else dtype
    spec = KVSpec(attention.num_kv_heads, attention.head_dim, config.cache.page_size, dtype)
    shape = _attention_shape(model, spec, model.kv_groups[0], config.parallel.tensor_parallel_size)
    try:
        impl, reason = resolve_impl(
            None if wanted == "auto" else wanted, shape, platform=platform, device_kind=device_kind
        )
    except ValueError as error:
        raise ConfigError(str(error), field="attention_impl", value=wanted) from error
    if config.scheduler.deterministic and find_backend(impl).splits_by_load:
        impl, reason = _replace_splitting(impl, by_name=wanted != "auto")
    return replace(spec, layout=choose_layout(impl, attention.head_dim)), impl, reason


def _replace_splitting(impl: str, *, by_name: bool) -> tuple[str, str]:
    """Returns the implementation in place of one that splits keys by load, and the reason; ConfigError if `by_name`."""
    if by_name:
        message = (
            f"impl {impl!r} splits keys by the load of the step, so a row's bits depend on the rows beside it; with "
            "deterministic use 'xla' or 'auto', which then takes it"
        )
        raise ConfigError(message, field="attention_impl", value=impl)
    return "xla", f"portable attention: the {impl} kernels split keys by load, which deterministic excludes"

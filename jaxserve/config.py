"""The options of an engine: nested frozen dataclasses, each validating itself. Only this module reads the environment.

Names are vLLM's where it has the option. Flags and the keys of TOML files are these fields, so an option exists
everywhere or nowhere.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from jaxserve.errors import ConfigError, shorten
from jaxserve.lora_options import LoraOptions
from jaxserve.media_options import MediaOptions
from jaxserve.model_options import ModelOptions
from jaxserve.options import build_config, check_at_least, check_choices, option
from jaxserve.parallel_options import NodeOptions, ParallelOptions, ReplicaOptions
from jaxserve.pooling_options import PoolingOptions
from jaxserve.scheduler_options import MIN_CHUNK, SchedulerOptions
from jaxserve.speculative_config import SpeculativeConfig, read_speculative_config
from jaxserve.vllm_options import drop_harmless

ATTENTION_IMPLS = (
    "auto",
    "xla",
    "cpu",
    "gpu",
    "ampere",
    "tpu",
    "gpu_interpret",
    "ampere_interpret",
    "tpu_interpret",
)
_PINNED_LIMIT = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"
_PINNED_DEFAULT, _PINNED_OTHERS = 64, 16  # GiB: XLA's own limit, and what other transfers may take


@dataclass(frozen=True, slots=True)
class CacheOptions:
    """The KV cache."""

    page_size: int | None = option(None, "tokens of a KV page; default: cpu 32, gpu 64, tpu 128", "block_size")
    kv_cache_dtype: str = option(
        "auto",
        "auto: the model's dtype; fp8: e4m3, with the checkpoint's scales if it has any",
        choices=("auto", "float32", "bfloat16", "float16", "fp8"),
        synonyms={"fp8_e4m3": "fp8"},
    )
    enable_prefix_caching: bool | None = option(
        None, "reuse the KV of equal prompt beginnings; default: on, in models that can share it"
    )
    num_kv_pages_override: int | None = option(
        None, "pages of the largest pool, in place of the memory plan's", "num_gpu_blocks_override"
    )
    device_memory_utilization: float = option(
        0.9, "share of a device's memory that the engine may use", "gpu_memory_utilization"
    )
    kv_cache_memory_bytes: int | None = option(
        None, "bytes of KV pools per device, with snapshots of recurrent states, in place of the memory plan's"
    )
    kv_offloading_size: float | None = option(
        None, "GiB of host memory, for all devices together, that keeps KV pages evicted from them; default: none"
    )
    kv_offloading_backend: str = option(
        "native", "what keeps them; native: pinned memory of this process", choices=("native",)
    )
    mamba_ssm_cache_dtype: str = option(
        "auto",
        "of the states of recurrent layers; auto: float32",
        choices=("auto", "float32", "bfloat16"),
    )
    mamba_cache_mode: str = option(
        "align",
        "snapshots of recurrent states, of which a cached prefix needs one; align: at multiples of mamba_block_size",
        choices=("none", "align"),
    )
    mamba_block_size: int | None = option(
        None, "tokens between snapshots of recurrent states; default: the least multiple of page_size and their tiles"
    )

    @property
    def fixes_pages(self) -> bool:
        """Whether the pools' size is given, so that no memory is planned for them."""
        return self.num_kv_pages_override is not None or self.kv_cache_memory_bytes is not None

    def __post_init__(self) -> None:
        check_choices(self)
        check_at_least(self, num_kv_pages_override=2, kv_cache_memory_bytes=1, mamba_block_size=1)
        if self.page_size is not None and (self.page_size < 8 or self.page_size & (self.page_size - 1)):
            raise ConfigError(
                f"must be a power of two, at least 8, got {self.page_size}", field="page_size", value=self.page_size
            )
        share = self.device_memory_utilization
        if not isinstance(share, int | float) or not 0 < share <= 1:
            raise ConfigError(
                f"must be in (0, 1], got {shorten(share)}", field="device_memory_utilization", value=share
            )
        size = self.kv_offloading_size
        if size is not None and not 0 < size < math.inf:
            raise ConfigError(f"must be above 0, got {shorten(size)}", field="kv_offloading_size", value=size)
        if size is not None and self.enable_prefix_caching is False:
            message = "needs enable_prefix_caching: pages on the host are found by their content"
            raise ConfigError(message, field="kv_offloading_size", value=size)


@dataclass(frozen=True, slots=True)
class CompileOptions:
    """Which programs exist, and where compiled ones are kept."""

    compile: str = option(
        "auto",
        "all: every program before the engine is ready, none later; used: each when a step first needs it; auto: used "
        "for LLM and the commands generate and chat, else all",
        choices=("auto", "all", "used"),
    )
    attention_impl: str = option(
        "auto", "attention kernel; a name that cannot run here is refused", choices=ATTENTION_IMPLS
    )
    compilation_cache_dir: str | None = option(
        None, "directory of JAX's persistent cache; default: ~/.cache/jaxserve/xla; '' for none"
    )
    max_logprobs: int = option(
        20, "most log-probabilities per token that a request may ask for; -1: up to the whole vocabulary"
    )
    bundle: str | None = option(
        None, "directory made by jaxserve build: its programs are loaded, and none is compiled; default: none"
    )
    compile_threads: int = option(0, "programs compiled at once; 0: one per core, at most 8")
    precompile_bs_paddings: tuple[int, ...] | None = option(
        None, "padded rows of steps that only decode; the last must hold max_num_seqs; default: about equal ratios"
    )
    precompile_token_paddings: tuple[int, ...] | None = option(
        None,
        "padded tokens of the other steps; the last must hold max_num_batched_tokens; default: about equal ratios; "
        "jaxserve tune-buckets chooses both for a trace",
    )

    def __post_init__(self) -> None:
        check_choices(self)
        check_at_least(self, compile_threads=0, max_logprobs=-1)
        if "://" in (url := self.compilation_cache_dir or ""):
            message = f"must be a directory, got {shorten(url)}; mount a bucket (gcsfuse BUCKET DIR) and give that"
            raise ConfigError(message, field="compilation_cache_dir", value=url)
        for name in ("precompile_bs_paddings", "precompile_token_paddings"):
            sizes = getattr(self, name)
            if sizes is not None and (not sizes or sizes[0] < 1 or any(a >= b for a, b in pairwise(sizes))):
                message = f"must be ascending sizes of at least 1, got {shorten(list(sizes))}"
                raise ConfigError(message, field=name, value=sizes)

    def require_sizes(self, max_num_seqs: int, max_num_batched_tokens: int, *, deterministic: bool) -> None:
        """Raises ConfigError if no padded size holds a full step, or a size is one that no step can use."""
        rows, tokens = self.precompile_bs_paddings, self.precompile_token_paddings
        for name, sizes, limit, most in (
            ("precompile_bs_paddings", rows, "max_num_seqs", max_num_seqs),
            ("precompile_token_paddings", tokens, "max_num_batched_tokens", max_num_batched_tokens),
        ):
            if sizes is not None and sizes[-1] < most:
                raise ConfigError(f"the last must hold {limit}={most}, got {sizes[-1]}", field=name, value=sizes)
            if sizes is not None and deterministic and len(sizes) > 1:
                message = f"must be one size with deterministic, which pads every step alike, got {list(sizes)}"
                raise ConfigError(message, field=name, value=sizes)
        most_rows = max_num_seqs if rows is None else rows[-1]
        if tokens is not None and tokens[0] <= most_rows:
            message = f"each must be above {most_rows}, the rows that every such step has, got {tokens[0]}"
            raise ConfigError(message, field="precompile_token_paddings", value=tokens)

    @property
    def cache_dir(self) -> Path | None:
        """The directory of compiled programs; None if they are not kept, by choice or for lack of a home directory."""
        if self.compilation_cache_dir is not None:
            return Path(self.compilation_cache_dir) if self.compilation_cache_dir else None
        try:
            home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        except RuntimeError:  # a container's user without a name has no home directory
            return None
        return Path(home) / "jaxserve" / "xla"


@dataclass(frozen=True, slots=True)
class SpeculationOptions:
    """How tokens are drafted and verified."""

    speculative_config: SpeculativeConfig | None = option(  # noqa: RUF009 - declares a field, as everywhere
        None,
        "who drafts tokens that a step then verifies, in vLLM's keys (docs/speculation.md); default: nobody",
        "sc",
        read=read_speculative_config,
    )


@dataclass(frozen=True, slots=True)
class ObservabilityOptions:
    """What an engine writes down about its work."""

    record_steps: str | None = option(
        None, "new file in which every step is recorded, for jaxserve replay; it holds all prompts and answers"
    )


def allow_pinned_memory(size: float | None) -> None:
    """Raises XLA's limit of pinned host memory for `size` GiB, unless the user has set one.

    CUDA only; it has an effect before JAX has started its devices.
    """
    if size is not None:
        os.environ.setdefault(_PINNED_LIMIT, str(max(_PINNED_DEFAULT, int(size) + 1 + _PINNED_OTHERS)))


def read_api_keys() -> tuple[str, ...]:
    """Returns a server's API keys from the environment: JAXSERVE_API_KEY, separated by commas."""
    return tuple(key for key in os.environ.get("JAXSERVE_API_KEY", "").split(",") if key)


def read_client_key() -> str:
    """Returns the key that a client of an OpenAI server sends, from OPENAI_API_KEY; "": none."""
    return os.environ.get("OPENAI_API_KEY", "")


def read_compiler_flags() -> dict[str, str]:
    """Returns the variables by which users change what compilers make."""
    return {name: os.environ.get(name, "") for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS")}


def read_gpu_share() -> float:
    """Returns the share of a GPU's memory that JAX hands out; ConfigError if its variable is no share."""
    for name in ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"):
        if text := os.environ.get(name):
            try:
                share = float(text)
            except ValueError:
                share = 0.0
            if not 0 < share <= 1:
                raise ConfigError(f"must be above 0 and at most 1, got {shorten(text)}", field=name, value=text)
            return share
    return 0.75  # JAX's default


def read_environment() -> dict[str, str]:
    """Returns all variables, for processes that are started."""
    return dict(os.environ)


def set_variables(variables: Mapping[str, str]) -> None:
    """Sets variables that compilers for other devices read when they are loaded."""
    os.environ.update(variables)


def read_cluster_token() -> str | None:
    """Returns what the nodes of one engine prove to each other: JAXSERVE_CLUSTER_TOKEN."""
    return os.environ.get("JAXSERVE_CLUSTER_TOKEN") or None


def fill_nodes(options: NodeOptions) -> NodeOptions:
    """Returns the options with those of a LeaderWorkerSet's pod in place of missing ones.

    Raises:
        ConfigError: a variable is not a number, or out of range.
    """
    found: dict[str, Any] = {}
    for name, variable in _POD_VARIABLES.items():
        text = os.environ.get(variable)
        if getattr(options, name) is None and text:
            if name != "master_addr" and not text.isdecimal():
                raise ConfigError(f"must be a number, got {shorten(text)}", field=variable, value=text)
            found[name] = text if name == "master_addr" else int(text)
    return replace(options, **found)


_POD_VARIABLES = {
    "nnodes": "LWS_GROUP_SIZE",
    "node_rank": "LWS_WORKER_INDEX",
    "master_addr": "LWS_LEADER_ADDRESS",
}
_PLATFORM_DEFAULTS = {
    "cpu": {"page_size": 32, "max_num_seqs": 32, "max_num_batched_tokens": 512},
    "gpu": {"page_size": 64, "max_num_seqs": 256, "max_num_batched_tokens": 2048},
    "tpu": {"page_size": 128, "max_num_seqs": 128, "max_num_batched_tokens": 2048},
}


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """All options of one engine."""

    model: ModelOptions = field(default_factory=ModelOptions)
    cache: CacheOptions = field(default_factory=CacheOptions)
    scheduler: SchedulerOptions = field(default_factory=SchedulerOptions)
    parallel: ParallelOptions = field(default_factory=ParallelOptions)
    nodes: NodeOptions = field(default_factory=NodeOptions)
    replicas: ReplicaOptions = field(default_factory=ReplicaOptions)
    compile: CompileOptions = field(default_factory=CompileOptions)
    speculation: SpeculationOptions = field(default_factory=SpeculationOptions)
    pooling: PoolingOptions = field(default_factory=PoolingOptions)
    lora: LoraOptions = field(default_factory=LoraOptions)
    media: MediaOptions = field(default_factory=MediaOptions)
    observability: ObservabilityOptions = field(default_factory=ObservabilityOptions)

    def __post_init__(self) -> None:
        drafts, scheduler = self.speculation.speculative_config, self.scheduler
        if drafts is None:
            return
        if scheduler.deterministic:
            message = "must be left out with deterministic: rows would verify drafts in other programs than they decode"
            raise ConfigError(message, field="speculative_config", value=drafts)
        if scheduler.max_decode_steps > 1:
            steps = scheduler.max_decode_steps
            message = f"must be left out with max_decode_steps={steps}: a loop of steps verifies no drafts"
            raise ConfigError(message, field="speculative_config", value=drafts)

    @classmethod
    def from_options(cls, **options: Any) -> EngineConfig:
        """Returns the config of flat options by name or alias; vLLM's that have no effect here are accepted as well.

        Raises:
            ConfigError: an option is unknown (the nearest name is suggested), given twice, mistyped or out of range.
        """
        return build_config(cls, _drop_equal_split(drop_harmless(options)))

    def with_compile(self, choice: str) -> EngineConfig:
        """Returns the config with `compile` set to `choice` ("all" or "used") if it is "auto"."""
        if self.compile.compile != "auto":
            return self
        return replace(self, compile=replace(self.compile, compile=choice))

    def resolve(self, platform: str) -> EngineConfig:
        """Returns the config with the defaults of a platform ("cpu", "gpu", "tpu") filled in.

        Raises:
            ConfigError: options contradict each other.
        """
        defaults = _PLATFORM_DEFAULTS[platform] | {"enable_prefix_caching": True}
        scheduler = _fill(self.scheduler, defaults)
        rows = scheduler.max_num_seqs
        if self.scheduler.max_num_batched_tokens is None:
            scheduler = replace(
                scheduler, max_num_batched_tokens=max(scheduler.max_num_batched_tokens, rows + MIN_CHUNK)
            )
        if scheduler.max_num_batched_tokens < rows + MIN_CHUNK:
            least = f"max_num_seqs + {MIN_CHUNK} = {rows + MIN_CHUNK}"
            message = f"must be at least {least}, so that prompts progress beside a full batch"
            raise ConfigError(message, field="max_num_batched_tokens", value=scheduler.max_num_batched_tokens)
        self.compile.require_sizes(rows, scheduler.max_num_batched_tokens, deterministic=scheduler.deterministic)
        return replace(self, cache=_fill(self.cache, defaults), scheduler=scheduler)


def _drop_equal_split(options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options without a `draft_tensor_parallel_size` that is the model's own, as every drafter's is."""
    found, name = dict(options), "draft_tensor_parallel_size"
    for key in ("speculative_config", "sc"):
        drafts = found.get(key)
        own = found.get("tensor_parallel_size", found.get("tp")) or 1
        if isinstance(drafts, Mapping) and drafts.get(name) == own:
            found[key] = {each: value for each, value in drafts.items() if each != name}
    return found


def _fill(options: Any, defaults: Mapping[str, int]) -> Any:
    missing = {
        f.name: defaults[f.name] for f in fields(options) if f.name in defaults and getattr(options, f.name) is None
    }
    return dataclasses.replace(options, **missing)

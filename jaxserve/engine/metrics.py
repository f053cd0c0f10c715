"""The engine's counters and gauges under vLLM's names: the tables behind `/metrics` and `get_metrics`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxserve.engine.stats import EngineStats, PoolStats

_PREFIX = "jaxserve:"


@dataclass(frozen=True, slots=True)
class Metric:
    """A number that the engine keeps, named as in `/metrics`."""

    name: str
    labels: dict[str, str]


@dataclass(frozen=True, slots=True)
class Counter(Metric):
    """A metric that only grows. Its name has no `_total`, as in vLLM's Python API."""

    value: float


@dataclass(frozen=True, slots=True)
class Gauge(Metric):
    """A metric that goes up and down."""

    value: float


@dataclass(frozen=True, slots=True)
class Vector(Metric):
    """Counters by position, as in vLLM's Python API."""

    values: list[int]


# Rows of (name without prefix, help, getter). Names of counters end in `_total`.
type Table[Source] = tuple[tuple[str, str, Callable[[Source], Any]], ...]


def find_usage(stats: EngineStats) -> float:
    """Returns the share (0 to 1) of the largest KV pool's pages held by running requests; 0 without pools."""
    pool: PoolStats | None = max(stats.pools, key=lambda pool: pool.total, default=None)
    return pool.used / pool.total if pool is not None and pool.total else 0.0


ENGINE_GAUGES: Table[EngineStats] = (
    ("num_requests_running", "Sequences that hold a row of the batch.", lambda s: s.num_running),
    ("num_requests_waiting", "Sequences that wait for a row or for pages.", lambda s: s.num_waiting),
    ("num_queued_tokens", "Prompt tokens of the sequences that wait.", lambda s: s.num_queued_tokens),
    ("kv_cache_usage_perc", "Share (0 to 1) of the largest KV pool's pages that running requests hold.", find_usage),
    ("gpu_cache_usage_perc", "Old name of kv_cache_usage_perc, with the same value.", find_usage),
    (
        "kv_offload_usage_perc",
        "Share (0 to 1) of the host KV tier's pages with content; 0 without one.",
        lambda s: s.host.cached / s.host.total if s.host.total else 0.0,
    ),
    ("state_snapshots", "Snapshots of recurrent states that are cached.", lambda s: s.num_snapshots),
    ("programs", "Compiled programs that steps can use.", lambda s: s.num_programs),
)
ENGINE_COUNTERS: Table[EngineStats] = (
    (
        "num_preemptions_total",
        "Sequences that gave up their pages and are computed again.",
        lambda s: s.num_preemptions,
    ),
    (
        "tier_misses_total",
        "Steps that took longer than priority_itl_ms while a request of the tier priority decoded.",
        lambda s: s.num_tier_misses,
    ),
    ("prefix_cache_queries_total", "Prompt tokens looked up in the prefix cache.", lambda s: s.prefix_queries),
    ("prefix_cache_hits_total", "Prompt tokens whose KV came from the prefix cache.", lambda s: s.prefix_hits),
    (
        "state_snapshot_misses_total",
        "Prompt tokens whose KV was cached, but that lay behind the last snapshot of a recurrent state.",
        lambda s: s.snapshot_misses,
    ),
    ("kv_offload_hits_total", "Prompt tokens whose KV was loaded from the host tier.", lambda s: s.host.hits),
    (
        "kv_offload_misses_total",
        "Prompt tokens that were looked up in the host tier, too, and had to be computed.",
        lambda s: s.host.misses,
    ),
    ("kv_offload_evictions_total", "KV pages whose content the host tier dropped.", lambda s: s.host.evictions),
    (
        "kv_offload_failures_total",
        "Copies of KV pages from or to the host that failed; each is a miss.",
        lambda s: s.host.failures,
    ),
    (
        "spec_decode_num_drafts_total",
        "Chains of drafts that steps verified: one for each row with drafts in a step.",
        lambda s: s.drafts.num_drafts,
    ),
    ("spec_decode_num_draft_tokens_total", "Drafts that steps verified.", lambda s: s.drafts.num_tokens),
    ("spec_decode_num_accepted_tokens_total", "Drafts that were right.", lambda s: s.drafts.num_accepted),
    ("image_queries_total", "Images of prompts that were first admitted.", lambda s: s.images.num_admitted),
    ("image_page_hits_total", "Those of them that lay in cached pages.", lambda s: s.images.page_hits),
    ("image_row_hits_total", "Others of them, whose vectors the device had.", lambda s: s.images.row_hits),
    ("tower_images_total", "Images that the tower computed.", lambda s: s.images.num_computed),
    ("tower_patches_total", "Patches of the images that the tower computed.", lambda s: s.images.num_computed_patches),
    (
        "tower_step_seconds_total",
        "Seconds of the steps in front of which the tower ran, with its own.",
        lambda s: s.images.step_seconds,
    ),
    ("useful_tokens_total", "Tokens that steps computed for requests.", lambda s: s.useful_tokens),
    ("padded_tokens_total", "Tokens of padding that steps computed beside them.", lambda s: s.padded_tokens),
    (
        "compiles_total",
        "Programs compiled after the server was ready; anything but 0 is a fault.",
        lambda s: s.num_compiles,
    ),
    (
        "step_faults_total",
        "Steps that failed on the device; their requests ended with an error.",
        lambda s: s.num_faults,
    ),
    ("device_wait_seconds_total", "Seconds that the host waited for the device.", lambda s: s.wait_seconds),
    (
        "host_busy_seconds_total",
        "Seconds that the host worked on steps, most while the device runs.",
        lambda s: s.busy_seconds,
    ),
)
# A gauge with the labels `impl` and `reason`.
ATTENTION_FALLBACK = (
    "attention_fallback",
    "1: portable attention runs on an accelerator, where nobody asked for it; reason says why.",
)


# A counter with the label `position`, from 0.
ACCEPTED_BY_POSITION = (
    "spec_decode_num_accepted_tokens_per_pos_total",
    "Drafts that were right, by position in their chain.",
)

# A counter with the label `direction`: (name, help, label -> getter).
OFFLOAD_BYTES: tuple[str, str, dict[str, Callable[[EngineStats], int]]] = (
    "kv_offload_bytes_total",
    "Bytes of KV pages copied to the host tier (save) and back (load).",
    {"save": lambda s: s.host.bytes_saved, "load": lambda s: s.host.bytes_loaded},
)


def list_metrics(stats: EngineStats, model_name: str) -> list[Metric]:
    """Returns the engine's gauges, then its counters; accepted drafts by position once there are any, as a vector."""
    labels = {"model_name": model_name, "engine": "0"}
    gauges = [Gauge(f"{_PREFIX}{name}", labels, read(stats)) for name, _, read in ENGINE_GAUGES]
    if (attention := stats.attention) is not None:
        how = labels | {"impl": attention.impl, "reason": attention.reason}
        gauges.append(Gauge(f"{_PREFIX}{ATTENTION_FALLBACK[0]}", how, float(attention.fell_back)))
    counters = [
        Counter(f"{_PREFIX}{name.removesuffix('_total')}", labels, read(stats)) for name, _, read in ENGINE_COUNTERS
    ]
    name, _, directions = OFFLOAD_BYTES
    counters += [
        Counter(f"{_PREFIX}{name.removesuffix('_total')}", labels | {"direction": direction}, read(stats))
        for direction, read in directions.items()
    ]
    vectors = []
    if by_position := stats.drafts.accepted_by_position:
        name = ACCEPTED_BY_POSITION[0].removesuffix("_total")
        vectors = [Vector(f"{_PREFIX}{name}", labels, list(by_position))]
    return [*gauges, *counters, *vectors]

"""What Prometheus reads: every name, from known events; and what the dashboard asks for."""

from __future__ import annotations

import json
import random
import re
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text
from prometheus_client.samples import Sample

from jaxserve.engine.engine_counts import AttentionStats
from jaxserve.errors import ConfigError, DeviceStepError, NonFiniteLogitsError
from jaxserve.request import CompletionOutput, Request, RequestMetrics, RequestOutput, ServiceTier, Tenant
from jaxserve.sampling_params import SamplingParams
from jaxserve.server.metrics import EVENTS, STATES, Histogram, RecentHistogram, ServerMetrics
from jaxserve.server.metrics.exposition import render
from jaxserve.server.server_state import Phase
from tests.server.engine_stats import make_stats

DASHBOARD = Path(__file__).parents[2] / "configs" / "grafana.json"
# What dashboards and alerts made for other servers ask for, by kind.
KNOWN_NAMES = {
    "gauge": "num_requests_running num_requests_waiting kv_cache_usage_perc gpu_cache_usage_perc cache_config_info",
    "counter": "prompt_tokens_total generation_tokens_total request_success_total num_preemptions_total "
    "prefix_cache_queries_total prefix_cache_hits_total spec_decode_num_drafts_total "
    "spec_decode_num_draft_tokens_total spec_decode_num_accepted_tokens_total "
    "spec_decode_num_accepted_tokens_per_pos_total",
    "histogram": "time_to_first_token_seconds inter_token_latency_seconds time_per_output_token_seconds "
    "request_time_per_output_token_seconds e2e_request_latency_seconds request_queue_time_seconds "
    "request_prefill_time_seconds request_decode_time_seconds request_inference_time_seconds request_prompt_tokens "
    "request_generation_tokens request_max_num_generation_tokens request_params_n request_params_max_tokens "
    "iteration_tokens_total",
}


REQUEST = Request("r", (1, 2, 3), SamplingParams(n=2))


class Clock:
    """Time that passes when the test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def read(metrics: ServerMetrics, stats: Any = None, state: str = "ready") -> list[Sample]:
    """Returns all samples of the plain text format."""
    body, content_type = render(metrics, None, stats, state)
    assert content_type.startswith("text/plain; version=0.0.4")
    return [sample for family in parse_text(body.decode()) for sample in family.samples]


def pick(samples: list[Sample], name: str, **labels: str) -> float:
    (value,) = [s.value for s in samples if s.name == name and labels.items() <= s.labels.items()]
    return value


def make_output(*lengths: int, reasons: tuple[str, ...] = ("stop",), **changes: Any) -> RequestOutput:
    """An output of a request that arrived at 10, ran at 11, had its first token at 13 and ended at 17."""
    reasons = reasons * len(lengths) if len(reasons) == 1 else reasons
    outputs = [
        CompletionOutput(i, "", [7] * n, finish_reason=r) for i, (n, r) in enumerate(zip(lengths, reasons, strict=True))
    ]
    times = changes.pop("metrics", RequestMetrics(10.0, 11.0, 13.0, 17.0))
    return RequestOutput("r", None, [1, 2, 3], outputs, True, metrics=times, **changes)


def finish(
    metrics: ServerMetrics, output: RequestOutput, max_tokens: int | None, n: int, num_streamed: int = 0
) -> None:
    counts = [len(completion.token_ids) for completion in output.outputs]
    tally = metrics.find_tally(REQUEST)
    metrics.finish_request(tally, output, max_tokens, n, num_tokens=counts, num_streamed=num_streamed)


def observe_everything(metrics: ServerMetrics) -> None:
    metrics.cache_config = {"page_size": 32, "num_pages": 100, "dtype": "bfloat16"}
    tally = metrics.find_tally(REQUEST)
    metrics.start_request(tally, REQUEST)
    metrics.observe_first_token(tally, 0.5, 3, 1)
    metrics.observe_gap(tally, 0.01, 2)
    finish(metrics, make_output(5, 4), 16, 2, num_streamed=3)
    metrics.observe_http("/v1/completions", "POST", 200, 0.3)
    metrics.count_texts("rerank", 2, 9)
    for event in EVENTS:
        metrics.count(event)


def test_histogram_counts_by_bound() -> None:
    histogram = Histogram((1, 2, 5))
    for value in (0, 1, 1.5, 2, 5, 6):
        histogram.observe(value)
    assert histogram.counts == [2, 2, 1, 1]
    assert histogram.total == 15.5


def test_quantiles_are_those_of_the_values() -> None:
    bounds = [0.001 * 1.2**i for i in range(60)]
    histogram = RecentHistogram(bounds, Clock())
    rng = random.Random(0)
    values = [rng.lognormvariate(-3, 1) for _ in range(20_000)]
    for value in values:
        histogram.observe(value)
    exact = statistics.quantiles(values, n=100)
    found = histogram.find_quantiles(0.5, 0.99)
    assert found == [pytest.approx(exact[49], rel=0.05), pytest.approx(exact[98], rel=0.1)]


def test_quantiles_at_the_edges() -> None:
    histogram = RecentHistogram((1.0, 2.0), Clock())
    assert histogram.find_quantiles(0.5, 0.99) == [None, None]
    histogram.observe(1.5)
    assert histogram.find_quantiles(0.0, 0.5, 1.0) == [1.0, 1.5, 2.0]
    for _ in range(9):
        histogram.observe(100.0)
    assert histogram.find_quantiles(0.99) == [2.0], "what is above the last bound counts as that bound"


def test_quantiles_forget() -> None:
    clock = Clock()
    histogram = RecentHistogram((1.0, 2.0, 3.0), clock)
    histogram.observe(0.5)
    clock.now += 35
    histogram.observe(2.5)
    assert histogram.find_quantiles(0.0) == [0.0], "both windows count"
    clock.now += 30
    assert histogram.find_quantiles(0.0) == [2.0], "the first is forgotten"
    clock.now += 3600
    assert histogram.find_quantiles(0.5) == [None], "after a pause, also when nobody looked"
    clock.now += 3600
    histogram.observe(0.5)
    assert histogram.find_quantiles(1.0) == [1.0]
    assert histogram.counts == [2, 0, 1, 0], "what Prometheus reads is never forgotten"


def test_every_known_name_is_there_with_its_kind() -> None:
    metrics = ServerMetrics("demo")
    observe_everything(metrics)
    body, _ = render(metrics, None, make_stats(), "ready")
    text = body.decode()
    for kind, names in KNOWN_NAMES.items():
        for name in names.split():
            assert f"# TYPE jaxserve:{name} {kind}\n" in text, name
            assert re.search(rf'^jaxserve:{name}(_bucket)?\{{.*model_name="demo"', text, re.MULTILINE), name
    assert "lora" not in text, "names of features that do not exist"


def drop_process(samples: dict[Any, float]) -> dict[Any, float]:
    return {key: value for key, value in samples.items() if not key[0].startswith("process_")}


def test_the_process_is_measured_by_the_names_that_everyone_knows() -> None:
    values = {sample.name: sample.value for sample in read(ServerMetrics("demo"))}
    assert values["process_resident_memory_bytes"] > 10e6 and values["process_open_fds"] >= 3
    assert values["process_cpu_seconds_total"] > 0 and values["process_max_fds"] > values["process_open_fds"]


def test_both_formats_say_the_same() -> None:
    metrics = ServerMetrics("demo")
    observe_everything(metrics)
    stats = make_stats()
    body, content_type = render(metrics, "application/openmetrics-text;version=1.0.0;q=0.8,*/*;q=0.1", stats, "ready")
    assert content_type.startswith("application/openmetrics-text; version=1.0.0")
    text = body.decode()
    assert text.endswith("# EOF\n")
    families = list(parse_openmetrics(text))
    strict = {(s.name, *sorted(s.labels.items())): s.value for f in families for s in f.samples}
    plain = {(s.name, *sorted(s.labels.items())): s.value for s in read(metrics, stats)}
    assert drop_process(strict) == drop_process(plain)  # the process goes on between the two readings


@pytest.mark.parametrize(
    "accept", ["application/openmetrics-text; version=x; escaping=y", "text/plain;version=;", ";", "\x00"]
)
def test_made_up_accept_headers_break_nothing(accept: str) -> None:
    body, content_type = render(ServerMetrics("demo"), accept, None, "ready")
    assert b"server_state" in body
    assert "y" not in content_type.partition("escaping=")[2]


def test_every_family_has_help_and_the_labels_of_its_server() -> None:
    metrics = ServerMetrics('we"ird\nmodel', prefix="vllm")
    observe_everything(metrics)
    body, _ = render(metrics, None, make_stats(), "ready")
    families = list(parse_text(body.decode()))
    assert len({family.name for family in families}) == len(families)
    for family in families:
        assert len(family.documentation) > 10 and family.documentation.endswith("."), family.name
        assert family.samples, family.name
        if family.name.startswith(("http_", "process_")):
            continue
        assert family.name.startswith("vllm:")
        for sample in family.samples:
            assert sample.labels["model_name"] == 'we"ird\nmodel' and sample.labels["engine"] == "0"


def test_values_of_a_streamed_request() -> None:
    metrics = ServerMetrics("demo")
    tally = metrics.find_tally(REQUEST)
    metrics.start_request(tally, REQUEST)
    metrics.observe_first_token(tally, 0.5, 3, 1)
    metrics.observe_gap(tally, 0.01, 2)
    metrics.observe_gap(tally, 0.03)
    metrics.finish_request(tally, make_output(1, 1), 16, 2, num_tokens=[5, 4], num_streamed=4)
    samples = read(metrics)
    counts = {"requests_total": 1, "prompt_tokens_total": 3, "generation_tokens_total": 9}
    sums = {
        "time_to_first_token_seconds": 0.5,
        "inter_token_latency_seconds": 0.04,
        "time_per_output_token_seconds": 0.04,
        "request_time_per_output_token_seconds": 1.0,  # (17 - 13) / (5 - 1)
        "e2e_request_latency_seconds": 7,
        "request_queue_time_seconds": 1,
        "request_prefill_time_seconds": 2,
        "request_decode_time_seconds": 4,
        "request_inference_time_seconds": 6,
        "request_prompt_tokens": 3,
        "request_generation_tokens": 9,
        "request_max_num_generation_tokens": 5,
        "request_params_n": 2,
        "request_params_max_tokens": 16,
    }
    for name, value in counts.items():
        assert pick(samples, f"jaxserve:{name}") == value, name
    for name, value in sums.items():
        assert pick(samples, f"jaxserve:{name}_sum") == pytest.approx(value), name
        expected = 2 if name in ("inter_token_latency_seconds", "time_per_output_token_seconds") else 1
        assert pick(samples, f"jaxserve:{name}_count") == expected, name
    assert pick(samples, "jaxserve:inter_token_latency_seconds_bucket", le="0.01") == 1
    assert pick(samples, "jaxserve:inter_token_latency_seconds_bucket", le="+Inf") == 2


def test_a_request_that_was_not_streamed() -> None:
    metrics = ServerMetrics("demo")
    finish(metrics, make_output(5), None, 1)
    samples = read(metrics)
    assert pick(samples, "jaxserve:time_to_first_token_seconds_sum") == 3
    assert pick(samples, "jaxserve:prompt_tokens_total") == 3
    assert pick(samples, "jaxserve:generation_tokens_total") == 5
    assert pick(samples, "jaxserve:request_params_max_tokens_count") == 0


def test_one_token_has_no_time_between_tokens() -> None:
    metrics = ServerMetrics("demo")
    finish(metrics, make_output(1), 1, 1)
    samples = read(metrics)
    assert pick(samples, "jaxserve:request_time_per_output_token_seconds_count") == 0
    assert pick(samples, "jaxserve:e2e_request_latency_seconds_count") == 1


def test_requests_count_once_by_their_worst_completion() -> None:
    metrics = ServerMetrics("demo")
    finish(metrics, make_output(1, 2), 4, 2)
    finish(metrics, make_output(1, 2, reasons=("length", "stop")), 4, 2)
    finish(metrics, make_output(1, 2, reasons=("abort", "length")), 4, 2)
    finish(metrics, make_output(1, 2, reasons=("abort", "error")), 4, 2)
    finish(metrics, make_output(1, 2, reasons=("length", "timeout"), error=DeviceStepError("")), 4, 2)
    finish(metrics, make_output(1, error=NonFiniteLogitsError("row 3")), 4, 1)
    metrics.end_request("abort")
    samples = read(metrics)
    found = {r: pick(samples, "jaxserve:request_success_total", finished_reason=r) for r in metrics.finished}
    assert found == {"stop": 1, "length": 1, "abort": 2, "timeout": 1, "error": 2}
    assert pick(samples, "jaxserve:e2e_request_latency_seconds_count") == 2, "only of answers that came to their end"
    assert pick(samples, "jaxserve:non_finite_logits_total") == 1


def test_requests_that_never_ran() -> None:
    metrics = ServerMetrics("demo")
    finish(metrics, make_output(0, reasons=("length",), metrics=RequestMetrics(1.0, None, None, 3.0)), 4, 1)
    finish(metrics, make_output(0, reasons=("stop",), metrics=RequestMetrics(1.0, 2.0, None, None)), 4, 1)
    finish(metrics, make_output(metrics=None), 4, 1)
    samples = read(metrics)
    assert pick(samples, "jaxserve:e2e_request_latency_seconds_sum") == 2
    for name in ("time_to_first_token", "request_decode_time", "request_queue_time"):
        assert pick(samples, f"jaxserve:{name}_seconds_count") == 0, name
    assert pick(samples, "jaxserve:prompt_tokens_total") == 0


def test_the_engines_counters() -> None:
    stats = make_stats()
    samples = read(ServerMetrics("demo"), stats)
    expected = {
        "num_requests_running": stats.num_running,
        "num_requests_waiting": stats.num_waiting,
        "num_queued_tokens": stats.num_queued_tokens,
        "kv_cache_usage_perc": 0.25,  # of the larger pool
        "gpu_cache_usage_perc": 0.25,
        "programs": stats.num_programs,
        "num_preemptions_total": stats.num_preemptions,
        "tier_misses_total": stats.num_tier_misses,
        "prefix_cache_queries_total": stats.prefix_queries,
        "prefix_cache_hits_total": stats.prefix_hits,
        "state_snapshot_misses_total": 192,
        "state_snapshots": 17,
        "kv_offload_hits_total": 31,
        "kv_offload_misses_total": 750,
        "kv_offload_evictions_total": 33,
        "kv_offload_failures_total": 5,
        "spec_decode_num_drafts_total": 600,
        "spec_decode_num_draft_tokens_total": 2400,
        "spec_decode_num_accepted_tokens_total": 1301,
        "image_queries_total": 61,
        "image_page_hits_total": 13,
        "image_row_hits_total": 19,
        "tower_images_total": 37,
        "tower_patches_total": 4736,
        "tower_step_seconds_total": 8.75,
        "useful_tokens_total": stats.useful_tokens,
        "padded_tokens_total": stats.padded_tokens,
        "compiles_total": stats.num_compiles,
        "step_faults_total": stats.num_faults,
        "device_wait_seconds_total": stats.wait_seconds,
        "host_busy_seconds_total": stats.busy_seconds,
    }
    for name, value in expected.items():
        assert pick(samples, f"jaxserve:{name}") == value, name
    assert len(set(expected.values())) == len(expected) - 1, "equal values would hide a mix-up"
    for bucket, count in stats.steps.items():
        assert pick(samples, "jaxserve:steps_total", bucket=bucket) == count
    assert pick(samples, "jaxserve:kv_offload_usage_perc") == 0.25
    for position, count in enumerate((550, 400, 250, 101)):
        name = "jaxserve:spec_decode_num_accepted_tokens_per_pos_total"
        assert pick(samples, name, position=str(position)) == count
    assert pick(samples, "jaxserve:kv_offload_bytes_total", direction="save") == 35000
    assert pick(samples, "jaxserve:kv_offload_bytes_total", direction="load") == 36000


def test_tokens_of_steps() -> None:
    samples = read(ServerMetrics("demo"), make_stats())
    buckets = {s.labels["le"]: s.value for s in samples if s.name == "jaxserve:iteration_tokens_total_bucket"}
    assert buckets["1.0"] == 4 and buckets["8.0"] == 4 and buckets["16.0"] == 5
    assert buckets["8192.0"] == 5 and buckets["+Inf"] == 6
    assert pick(samples, "jaxserve:iteration_tokens_total_count") == 6
    assert pick(samples, "jaxserve:iteration_tokens_total_sum") == 9016


def test_no_pool_and_an_empty_pool_are_unused() -> None:
    stats = make_stats()
    for pools in ((), tuple(replace(pool, total=0, used=0) for pool in stats.pools)):
        assert pick(read(ServerMetrics("demo"), replace(stats, pools=pools)), "jaxserve:kv_cache_usage_perc") == 0


def test_before_the_engine_there_are_the_servers_own() -> None:
    names = {sample.name for sample in read(ServerMetrics("demo"), None, "starting")}
    assert "jaxserve:server_state" in names and "jaxserve:generation_tokens_total" in names
    assert "jaxserve:num_requests_running" not in names, "0 would be a lie"
    assert "jaxserve:cache_config_info" not in names


@pytest.mark.parametrize("state", STATES)
def test_one_state_is_on(state: str) -> None:
    samples = [sample for sample in read(ServerMetrics("demo"), None, state) if sample.name == "jaxserve:server_state"]
    assert {s.labels["state"] for s in samples if s.value == 1} == {state}
    assert [s.labels["state"] for s in samples] == [*Phase] == [*STATES]


def test_portable_attention_on_an_accelerator_is_seen_with_its_reason() -> None:
    samples = read(ServerMetrics("demo"), make_stats())
    assert pick(samples, "jaxserve:attention_fallback", impl="xla", reason='portable attention: "gpu" failed') == 1
    chosen = make_stats(attention=AttentionStats("gpu", "for Hopper", False))
    assert pick(read(ServerMetrics("demo"), chosen), "jaxserve:attention_fallback", impl="gpu") == 0
    names = {sample.name for sample in read(ServerMetrics("demo"), make_stats(attention=None))}
    assert "jaxserve:attention_fallback" not in names


def test_requests_count_by_tenant_and_tier() -> None:
    metrics = ServerMetrics("demo")
    for name, tier in (("chat", ServiceTier.PRIORITY), ("chat", ServiceTier.FLEX), ("", ServiceTier.FLEX)):
        request = replace(REQUEST, tenant=Tenant(name), service_tier=tier)
        tally = metrics.find_tally(request)
        metrics.start_request(tally, request)
        metrics.observe_first_token(tally, 0.1 * (1 + tier), 3, 1)
        metrics.observe_gap(tally, 0.01, 2)
        metrics.finish_request(tally, make_output(5), 16, 1, num_tokens=[5], num_streamed=3)
    finish(metrics, make_output(4), 16, 1)  # not streamed: its time to the first token comes from the engine
    samples = read(metrics)
    for name, tier in (("chat", "priority"), ("chat", "flex"), ("", "flex")):
        found = {
            what: pick(samples, f"jaxserve:tenant_{what}_total", tenant=name, service_tier=tier)
            for what in ("requests", "prompt_tokens", "generation_tokens")
        }
        assert found == {"requests": 1, "prompt_tokens": 3, "generation_tokens": 5}
    assert pick(samples, "jaxserve:tenant_generation_tokens_total", tenant="", service_tier="default") == 4
    assert pick(samples, "jaxserve:generation_tokens_total") == 19 and pick(samples, "jaxserve:requests_total") == 3
    for tier, count, total in (("priority", 1, 0.1), ("default", 1, 3), ("flex", 2, 0.6)):
        name = "jaxserve:tier_time_to_first_token_seconds"
        assert pick(samples, f"{name}_count", service_tier=tier) == count
        assert pick(samples, f"{name}_sum", service_tier=tier) == pytest.approx(total)
        gaps = pick(samples, "jaxserve:tier_inter_token_latency_seconds_count", service_tier=tier)
        assert gaps == (0 if tier == "default" else count)


def test_tenants_that_wait_are_counted_by_name() -> None:
    samples = read(ServerMetrics("demo"), make_stats())
    for name, count in make_stats().num_waiting_by_tenant.items():
        assert pick(samples, "jaxserve:tenant_num_requests_waiting", tenant=name) == count


def test_metrics_tell_256_tenants_apart() -> None:
    metrics = ServerMetrics("demo")
    for number in range(300):
        request = replace(REQUEST, tenant=Tenant(f"t{number}"))
        metrics.start_request(metrics.find_tally(request), request)
    waiting = make_stats(num_waiting_by_tenant={"t0": 1, "t298": 2, "t299": 3})
    samples = read(metrics, waiting)
    counts = {s.labels["tenant"]: s.value for s in samples if s.name == "jaxserve:tenant_requests_total"}
    assert counts == {**{f"t{number}": 1 for number in range(256)}, "other": 44}
    assert pick(samples, "jaxserve:requests_total") == 300
    assert pick(samples, "jaxserve:tenant_num_requests_waiting", tenant="other") == 5


def test_cache_config_is_a_row_of_labels() -> None:
    metrics = ServerMetrics("demo")
    metrics.cache_config = {"page_size": 32, "dtype": "bfloat16"}
    assert pick(read(metrics, make_stats()), "jaxserve:cache_config_info", page_size="32", dtype="bfloat16") == 1


def test_http_requests_by_route_method_and_status() -> None:
    metrics = ServerMetrics("demo")
    for status in (200, 200, 499):
        metrics.observe_http("/v1/models", "GET", status, 0.02)
    metrics.observe_http(None, "GET", 404, 0.001)
    samples = read(metrics)
    assert pick(samples, "http_requests_total", handler="/v1/models", method="GET", status="200") == 2
    assert pick(samples, "http_requests_total", handler="/v1/models", method="GET", status="499") == 1
    assert pick(samples, "http_requests_total", handler="other", method="GET", status="404") == 1
    assert pick(samples, "http_request_duration_seconds_count", handler="/v1/models", method="GET") == 3
    assert pick(samples, "http_request_duration_seconds_bucket", handler="/v1/models", le="0.01") == 0


def test_nobody_fills_the_memory_with_labels() -> None:
    metrics = ServerMetrics("demo")
    for number in range(1000):
        metrics.observe_http(f"/path/{number}", f"METHOD{number}", number, 0.1)
    assert len({key[0] for key in metrics.http_requests}) <= 65
    assert {key[1] for key in metrics.http_requests} == {"other"}
    assert pick(read(metrics), "http_requests_total", handler="/path/7", status="other") == 1
    assert sum(metrics.http_requests.values()) == 1000


def test_latency_snapshot_is_in_milliseconds() -> None:
    metrics = ServerMetrics("demo")
    assert metrics.latency_snapshot() == {"ttft_ms": {"p50": None, "p99": None}, "itl_ms": {"p50": None, "p99": None}}
    tally = metrics.find_tally(REQUEST)
    for _ in range(100):
        metrics.observe_first_token(tally, 0.9, 1)
        metrics.observe_gap(tally, 0.018)
    snapshot = metrics.latency_snapshot()
    for name, low, high in (("ttft_ms", 750, 1000), ("itl_ms", 15, 20)):
        p50, p99 = snapshot[name]["p50"], snapshot[name]["p99"]
        assert p50 is not None and p99 is not None and low < p50 < p99 <= high


@pytest.mark.parametrize("prefix", ["", "a-b", "é", "a:b", "1a", 'x"'])
def test_odd_prefixes_are_refused(prefix: str) -> None:
    with pytest.raises(ConfigError, match="metrics_prefix"):
        ServerMetrics("demo", prefix=prefix)


def list_panels() -> list[dict[str, Any]]:
    return json.loads(DASHBOARD.read_text())["panels"]


def test_dashboard_is_laid_out() -> None:
    dashboard = json.loads(DASHBOARD.read_text())
    assert dashboard["schemaVersion"] >= 36 and dashboard["title"] and dashboard["id"] is None
    assert [v["name"] for v in dashboard["templating"]["list"]] == ["datasource", "model_name"]
    panels = list_panels()
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken and at["x"] + at["w"] <= 24, panel["title"]
        taken |= cells
        if panel["type"] != "row":
            assert panel["description"] and panel["targets"] and panel["fieldConfig"]["defaults"]["unit"]
            assert {t["datasource"]["uid"] for t in [panel, *panel["targets"]]} == {"${datasource}"}


def test_dashboard_asks_for_what_there_is() -> None:
    metrics = ServerMetrics("demo")
    observe_everything(metrics)
    samples = read(metrics, make_stats())
    labels: dict[str, set[str]] = {}
    for sample in samples:
        labels.setdefault(sample.name, set()).update(sample.labels)
    asked: set[str] = set()
    for panel in list_panels():
        for target in panel.get("targets", []):
            query = target["expr"]
            names = re.findall(r"\b(?:jaxserve:|http_)\w+", query)
            assert names and set(names) <= labels.keys(), query
            asked |= set(names)
            known = set.intersection(*(labels[name] for name in names))
            grouped = {label.strip() for group in re.findall(r"by \(([^)]*)\)", query) for label in group.split(",")}
            filtered = set(re.findall(r"(\w+)=~?\"", query))
            shown = set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
            assert grouped | filtered | shown <= known, query
            assert query.count("(") == query.count(")") and query.count("{") == query.count("}")
    for variable in json.loads(DASHBOARD.read_text())["templating"]["list"][1:]:
        name, label = re.fullmatch(r"label_values\(([\w:]+), (\w+)\)", variable["definition"]).groups()  # type: ignore[union-attr]
        assert label in labels[name]
    must = {"compiles_total", "queue_full_total", "num_preemptions_total", "steps_total", "padded_tokens_total"}
    assert {f"jaxserve:{name}" for name in must} <= asked

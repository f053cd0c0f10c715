"""Figures by hand-computed examples."""

from __future__ import annotations

from array import array

import pytest

from jaxserve.errors import ConfigError
from jaxserve.tools.bench.load.counters import parse_counters, subtract
from jaxserve.tools.bench.load.metrics import Slo, count_most_at_once, list_warnings, summarize
from jaxserve.tools.bench.load.records import LoadOutcome, RequestRecord


def make(sent: float, *chunks: float, end: float, tokens: int | None = None, **more: object) -> RequestRecord:
    """Returns the record of a complete request; times are seconds."""
    return RequestRecord(
        sent, sent, sent, end, array("d", chunks), 200, more.pop("prompt", 10), None, tokens, "length", **more
    )  # type: ignore[arg-type]


RECORDS = [
    make(0.0, 0.1, 0.2, 0.4, end=0.4, tokens=3),  # ttft 100, tpot 150, itl 100 200, e2el 400
    make(0.2, 0.5, 0.6, end=0.7, tokens=5, prompt=30),  # ttft 300, tpot 50, itl 100, e2el 500; 5 tokens in 2 chunks
    make(1.0, 1.2, end=1.2, tokens=1),  # ttft 200, no tpot, e2el 200
    RequestRecord(1.0, 1.0, 1.0, 1.1, status=429, error="HTTP 429: full"),
    RequestRecord(1.1, 1.1, 1.1, 2.0, array("d", [1.5]), 200, error="the connection was closed"),
]
OUTCOME = LoadOutcome(RECORDS, 0.0, 2.0, (0.6,), 0.014)


def test_figures() -> None:
    found = summarize(
        OUTCOME, prompt_lengths=[9] * 5, slo=Slo({"ttft": 250.0, "tpot": 100.0}), percentiles=(50, 90, 99)
    )
    expected = {
        "duration": 2.0,
        "completed": 3,
        "failed": 1,
        "refused": 1,
        "total_input_tokens": 50,
        "total_output_tokens": 9,
        "total_cached_tokens": None,
        "request_throughput": 1.5,
        "request_goodput": 0.5,  # the third alone: the first is slow by TPOT, the second by TTFT
        "output_throughput": 4.5,
        "total_token_throughput": 29.5,
        "max_concurrent_requests": 2,  # what was refused had ended
        "tokens_counted_by": "usage",
        "finish_reasons": {"length": 3},
        "errors": {"the connection was closed": 1},
        "mean_ttft_ms": 200.0,
        "median_ttft_ms": 200.0,
        "p90_ttft_ms": 280.0,
        "p99_ttft_ms": 298.0,
        "mean_tpot_ms": 100.0,
        "mean_itl_ms": 400 / 3,
        "median_itl_ms": 100.0,
        "mean_e2el_ms": 1100 / 3,
        "p50_e2el_ms": 400.0,
    }
    for name, value in expected.items():
        assert found[name] == (pytest.approx(value) if isinstance(value, float) else value), name
    client = found["client"]
    assert client["worker_cores"] == [0.6] and client["chunks_per_second"] == 3.5
    assert client["cores_per_1000_chunks_per_second"] == pytest.approx(2.0), "7 chunks took 14 ms: 2 ms each"
    (warning,) = list_warnings([client])
    assert "used 60% of a core" in warning and "--num-processes" in warning


def test_figures_without_any_answer() -> None:
    outcome = LoadOutcome(RECORDS[3:], 0.0, 2.0, (0.1,), 0.0)
    found = summarize(outcome, prompt_lengths=[9, 9], slo=Slo({}), percentiles=(99,))
    assert found["completed"] == 0 and found["mean_ttft_ms"] is None and found["p99_itl_ms"] is None
    assert found["request_goodput"] is None and list_warnings([found["client"]]) == []


def test_tokens_of_a_server_that_counts_none_are_chunks_and_prompts_are_ours() -> None:
    record = make(0.0, 0.1, 0.2, end=0.2, prompt=None)
    outcome = LoadOutcome([record], 0.0, 1.0, (0.1,), 0.0)
    found = summarize(outcome, prompt_lengths=[12], slo=Slo({}), percentiles=(50,))
    assert found["total_input_tokens"] == 12 and found["total_output_tokens"] == 2
    assert found["tokens_counted_by"] == "chunks" and record.tpot == pytest.approx(0.1)


def test_lateness_is_of_requests_that_were_due_later() -> None:
    first, late = RequestRecord(0.0, 0.0, 0.05, 1.0), RequestRecord(1.0, 1.0, 1.03, 2.0)
    outcome = LoadOutcome([first, late], 0.0, 2.0, (0.1,), 0.0)
    assert outcome.lags == pytest.approx([0.03])
    client = summarize(outcome, prompt_lengths=[1, 1], slo=Slo({}), percentiles=(99,))["client"]
    assert list_warnings([client]) == [
        "the load generator sent requests 30 ms late; the machine is too busy for this load"
    ]


def test_an_end_makes_room_for_a_start_of_the_same_time() -> None:
    assert count_most_at_once([make(0.0, end=1.0), make(1.0, end=2.0)]) == 1
    assert count_most_at_once([make(0.0, end=1.5), make(1.0, end=2.0), make(1.2, end=1.3)]) == 3
    assert count_most_at_once([]) == 0


def test_slo() -> None:
    slo = Slo.parse(["ttft:500", "tpot:50.5", "e2el:9e3"])
    assert slo.limits == {"ttft": 500.0, "tpot": 50.5, "e2el": 9000.0}
    for word in ("ttft", "itl:5", "ttft:0", "tpot:x"):
        with pytest.raises(ConfigError, match=r"^goodput: .*ttft:MS"):
            Slo.parse([word])


def test_counters_of_both_names() -> None:
    text = """# TYPE vllm:num_preemptions counter
vllm:num_preemptions_total{engine="0",model_name="a"} 2.0
vllm:num_preemptions_total{engine="1",model_name="a"} 3.0
# TYPE vllm:prefix_cache_hits counter
vllm:prefix_cache_hits_total{model_name="a"} 1e3
jaxserve:prefix_cache_hits_total{model_name="a"} 1e3
"""
    found = parse_counters(text)
    assert found == {"preemptions": 5.0, "prefix_cache_hits": 1000.0}
    assert subtract(found, {"preemptions": 1.0}) == {"preemptions": 4.0, "prefix_cache_hits": 1000.0}
    assert parse_counters("<html>") == {}

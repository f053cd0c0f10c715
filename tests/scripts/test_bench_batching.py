"""Ways of batching serve the same requests, and close, pad and count as they say."""

from __future__ import annotations

import sys
from pathlib import Path
from statistics import mean, pstdev

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

import bench_batching
from batching import WAYS, find_closing, pad, serve
from bench_batching import Workload, make_lengths, measure_cv

from jaxserve import LLM
from jaxserve.errors import ConfigError
from jaxserve.tools.bench.prompts import BenchRequest
from tests.programs import PROGRAMS
from tests.scripts.test_bench_dry_runs import read_figures

pytestmark = pytest.mark.thorough


def make(num_prompt: int, num_output: int, arrival: float = 0.0) -> BenchRequest:
    return BenchRequest(tuple(range(20, 20 + num_prompt)), None, num_prompt, num_output, arrival)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(
        max_num_seqs=4,
        max_num_batched_tokens=64,
        max_model_len=256,
        compilation_cache_dir=str(PROGRAMS),
        show_progress=False,
    )


@pytest.mark.parametrize("way", WAYS)
def test_each_way_serves_all(llm: LLM, way: str) -> None:
    requests = [make(5, 3), make(8, 10), make(3, 2, arrival=0.05), make(4, 4)]
    served = serve(llm, requests, way, rows=2, timeout=0.01)
    assert served.num_tokens == 19 and len(served.ends) == 4
    assert all(0 < end <= served.seconds for end in served.ends)
    assert all(latency > 0 for latency in served.latencies) and served.ends[2] > 0.05
    expected = {"one-at-a-time": 19, "static": 10 + 10 + 4 + 4, "continuous": 19}
    assert served.num_computed == expected.get(way, served.num_computed)
    assert served.useful_share == pytest.approx(19 / served.num_computed)
    if way == "static":
        assert served.ends[0] == served.ends[1] and served.ends[2] == served.ends[3], "a batch ends together"


def test_batches_close_when_full_or_late() -> None:
    arrivals = [0.0, 0.1, 0.5, 0.9]
    assert find_closing(arrivals, 1, None) == 0.0
    assert find_closing(arrivals, 3, None) == 0.5
    assert find_closing(arrivals, 8, None) == 0.9, "nobody else comes"
    assert find_closing(arrivals, 2, 0.2) == 0.1
    assert find_closing(arrivals, 3, 0.2) == pytest.approx(0.2)
    assert find_closing([0.9], 3, 0.2) == pytest.approx(1.1), "it cannot know that nobody else comes"


def test_a_batch_is_padded_to_its_longest() -> None:
    short, long = pad([make(3, 9), make(5, 2)], 14)
    assert short.prompt_token_ids == (9, 9, 20, 21, 22) and long.prompt_token_ids == (20, 21, 22, 23, 24)
    assert (short.num_prompt_tokens, short.max_tokens, long.max_tokens) == (5, 9, 9)
    with pytest.raises(ConfigError, match="max_model_len"):
        pad([make(3, 9), make(5, 2)], 13)


@pytest.mark.parametrize("cv", [0.0, 0.5, 1.0, 2.0])
def test_lengths_have_their_mean_and_variance(cv: float) -> None:
    lengths = make_lengths(2000, 60, cv, 12 * 60, seed=0)
    assert mean(lengths) == pytest.approx(60, rel=0.01)
    assert pstdev(lengths) / mean(lengths) == pytest.approx(cv, rel=0.15)
    assert min(lengths) >= 1 and max(lengths) <= 720
    assert lengths == make_lengths(2000, 60, cv, 12 * 60, seed=0)


def test_a_workload_differs_by_its_variance_alone() -> None:
    workload = Workload(30, 10, 20, request_rate=50.0)
    even, uneven = workload.make(0, 100), workload.make(1, 100)
    assert [each.prompt_token_ids for each in even] == [each.prompt_token_ids for each in uneven]
    assert [each.arrival_time for each in even] == [each.arrival_time for each in uneven]
    assert measure_cv(even) == 0 and measure_cv(uneven) > 0.5
    assert even[-1].arrival_time == pytest.approx(30 / 50, rel=0.5) and even[0].arrival_time == 0
    assert all(each.num_prompt_tokens + each.max_tokens < workload.max_model_len for each in uneven)
    assert {each.arrival_time for each in Workload(5, 4, 4).make(0, 100)} == {0.0}


@pytest.mark.slow
def test_the_command_compares_all_ways(tmp_path: Path) -> None:
    rows = read_figures(tmp_path, "bench_batching", shown="static")["ways"]
    assert [(row["length_cv"], row["way"]) for row in rows] == [(cv, way) for cv in (0, 1) for way in WAYS]
    for row in rows:
        assert row["slower_by"]["least"] <= row["slower_by"]["median"] <= row["slower_by"]["most"]
        assert row["useful_share"] <= 1 and row["latency"]["p99"] > 0


@pytest.mark.slow
def test_under_arrivals_ways_are_told_apart_by_latency(tmp_path: Path) -> None:
    flags = "--ways", "dynamic", "--request-rate", "100", "--batch-timeout", "0.03", "--length-cv", "1"
    rows = read_figures(tmp_path, "bench_batching", *flags, shown="latencies tell more here")["ways"]
    assert [row["way"] for row in rows] == ["dynamic", "continuous"]
    assert rows[0]["useful_share"] < 1 == rows[1]["useful_share"]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--ways", "some"), "argument --ways: invalid choice: 'some'"),
        (("--ways", "static", "--batch-timeout", "1"), "batch_timeout: is for --ways dynamic; this is static"),
        (("--request-rate", "0"), "request_rate: must be above 0, got 0.0"),
        (("--length-cv", "-1"), "length_cv: must be at least 0"),
        (("--num-iters", "0"), "num_iters: must be at least 1, got 0"),
    ],
)
def test_bad_input_is_named(
    flags: tuple[str, ...], words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["bench_batching.py", *flags])
    with pytest.raises(SystemExit, match="2"):
        bench_batching.main()
    assert words in capsys.readouterr().err.splitlines()[-1]

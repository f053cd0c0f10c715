"""A batch of the latency benchmark runs at once, or is refused."""

from __future__ import annotations

import pytest

from jaxserve.errors import ConfigError
from jaxserve.tools.bench.latency import make_batch, measure_latency, summarize_latency
from jaxserve.tools.bench.setup import Bench
from tests.tools.bench.small_bench import make_bench

pytestmark = pytest.mark.thorough


@pytest.fixture(scope="module")
def bench() -> Bench:
    return make_bench()


def test_all_rows_run_at_once(bench: Bench) -> None:
    batch = make_batch(bench, 3, 10, 5, seed=1)
    assert len({each.prompt_token_ids for each in batch}) == 3
    runs = measure_latency(bench, batch, num_iters=2, num_warmup=1)
    figures = summarize_latency(bench, runs)
    assert figures["latencies"] == [run.seconds for run in runs] and figures["num_preemptions"] == 0
    assert sum(figures["steps"].values()) <= 7, "rows share their steps"


def test_what_cannot_run_at_once_is_refused(bench: Bench) -> None:
    with pytest.raises(ConfigError, match=r"batch_size: 5 .*max_num_seqs=4"):
        make_batch(bench, 5, 10, 5, seed=0)
    with pytest.raises(ConfigError, match=r"input_len: 250 .*output_len=7 .*max_model_len=256"):
        make_batch(bench, 1, 250, 7, seed=0)

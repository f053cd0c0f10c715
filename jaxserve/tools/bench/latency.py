"""`jaxserve bench latency`: one batch of equal requests, from the call to its last token."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from jaxserve.errors import ConfigError
from jaxserve.tools.bench.prompts import BenchRequest
from jaxserve.tools.bench.report import Spread
from jaxserve.tools.bench.runs import Run, RunOptions, run_requests
from jaxserve.tools.bench.setup import Bench, repeat
from jaxserve.tools.bench.throughput import summarize_times

if TYPE_CHECKING:
    from rich.table import Table

PERCENTILES = (10, 25, 50, 75, 90, 99)


def make_batch(bench: Bench, batch_size: int, input_len: int, output_len: int, seed: int) -> list[BenchRequest]:
    """Returns a batch of random prompts, all of one length.

    Raises:
        ConfigError: the engine cannot run it at once.
    """
    limits, model = bench.llm.ready.shapes.limits, bench.llm.ready.shapes.model
    if batch_size > limits.max_num_seqs:
        message = f"{batch_size} rows do not run at once with max_num_seqs={limits.max_num_seqs}"
        raise ConfigError(message, field="batch_size", value=batch_size)
    if input_len + output_len > model.max_model_len:
        message = f"{input_len} and output_len={output_len} exceed max_model_len={model.max_model_len}"
        raise ConfigError(message, field="input_len", value=input_len)
    rng, vocab_size = random.Random(seed), model.vocab_size
    ids = [
        tuple(rng.randrange(min(10, vocab_size - 1), vocab_size) for _ in range(input_len)) for _ in range(batch_size)
    ]
    return [BenchRequest(each, None, input_len, output_len) for each in ids]


def measure_latency(bench: Bench, batch: Sequence[BenchRequest], *, num_iters: int, num_warmup: int) -> list[Run]:
    """Runs the batch `num_iters` times after the warm-up, each time with an empty prefix cache."""

    def run() -> Run:
        bench.llm.reset_prefix_cache()
        return run_requests(bench.llm, batch, RunOptions(detokenizes=False))

    return repeat(run, num_iters=num_iters, num_warmup=num_warmup)


def summarize_latency(bench: Bench, runs: Sequence[Run]) -> dict[str, Any]:
    """Returns the figures of a report; latencies are seconds of a whole batch."""
    import numpy as np

    latencies = [run.seconds for run in runs]
    return {
        **bench.describe(),
        "avg_latency": float(np.mean(latencies)),
        "latencies": latencies,
        "percentiles": {str(at): float(np.percentile(latencies, at)) for at in PERCENTILES},
        "latency": Spread.of(latencies),
        "limit_seconds": Spread.of([run.limit_seconds(bench.costs, bench.limits) for run in runs]),
        "limit_share": Spread.of([run.limit_seconds(bench.costs, bench.limits) / run.seconds for run in runs]),
        "ttft": summarize_times([each.ttft for run in runs for each in run.requests]),
        "tpot": summarize_times([each.tpot for run in runs for each in run.requests]),
        "steps": runs[-1].steps,
        "num_preemptions": sum(run.num_preemptions for run in runs),
        "num_compiled": sum(run.num_compiled for run in runs),
    }


def make_latency_table(bench: Bench, figures: dict[str, Any], batch: Sequence[BenchRequest]) -> Table:
    """Returns the table that the command prints."""
    from rich.table import Table

    table = Table(title=f"Latency: {bench.title}", show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(justify="right")
    table.add_row("rows", f"{len(batch):,}")
    table.add_row("prompt / output tokens of a row", f"{batch[0].num_prompt_tokens:,} / {batch[0].max_tokens:,}")
    table.add_row("mean, ms", f"{1e3 * figures['avg_latency']:,.1f}")
    shown = ", ".join(f"{1e3 * value:,.1f}" for value in figures["percentiles"].values())
    table.add_row(f"{', '.join(f'p{at}' for at in PERCENTILES)}, ms", shown)
    table.add_row("median, least, most, ms", figures["latency"].show(",.1f", 1e3))
    for name, text in (("ttft", "TTFT"), ("tpot", "TPOT")):
        if (times := figures[name]) is not None:
            table.add_row(f"{text} ms, mean", f"{1e3 * times['mean']:,.2f}")
    table.add_row("% of the limit of this device", figures["limit_share"].show(".1f", 100))
    return table

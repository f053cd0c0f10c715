"""`jaxserve bench throughput`: all requests at once, how long until the last is answered?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from jaxserve.tools.bench.prompts import BenchRequest
from jaxserve.tools.bench.report import Spread
from jaxserve.tools.bench.runs import Run, RunOptions, run_requests
from jaxserve.tools.bench.setup import Bench, repeat

if TYPE_CHECKING:
    from rich.table import Table

PERCENTILES = (50, 90, 99)


def measure_throughput(
    bench: Bench, requests: Sequence[BenchRequest], options: RunOptions, *, num_iters: int, num_warmup: int
) -> list[Run]:
    """Runs the requests `num_iters` times after the warm-up, each time with an empty prefix cache."""

    def run() -> Run:
        bench.llm.reset_prefix_cache()
        return run_requests(bench.llm, requests, options)

    return repeat(run, num_iters=num_iters, num_warmup=num_warmup)


def summarize_runs(bench: Bench, requests: Sequence[BenchRequest], runs: Sequence[Run]) -> dict[str, Any]:
    """Returns the figures of a report. Counts are those of the last run."""
    last = runs[-1]
    return {
        **bench.describe(),
        "num_requests": len(requests),
        "num_completed": last.num_completed,
        "num_cut": sum(each.is_cut for each in requests),
        "num_prompt_tokens": last.num_prompt_tokens,
        "num_output_tokens": last.num_output_tokens,
        "total_num_tokens": last.num_prompt_tokens + last.num_output_tokens,
        "elapsed_time": Spread.of([run.seconds for run in runs]),
        "requests_per_second": Spread.of([run.num_completed / run.seconds for run in runs]),
        "tokens_per_second": Spread.of([(run.num_prompt_tokens + run.num_output_tokens) / run.seconds for run in runs]),
        "output_tokens_per_second": Spread.of([run.num_output_tokens / run.seconds for run in runs]),
        "limit_share": Spread.of([run.limit_seconds(bench.costs, bench.limits) / run.seconds for run in runs]),
        "ttft": summarize_times([each.ttft for run in runs for each in run.requests]),
        "tpot": summarize_times([each.tpot for run in runs for each in run.requests]),
        "latency": summarize_times([each.latency for run in runs for each in run.requests if each.failure is None]),
        "steps": last.steps,
        "useful_tokens": last.useful_tokens,
        "padded_tokens": last.padded_tokens,
        "padding_share": 1 - last.useful_tokens / max(1, last.padded_tokens),
        "num_preemptions": last.num_preemptions,
        "prefix_queries": last.prefix_queries,
        "prefix_hits": last.prefix_hits,
        "num_compiled": sum(run.num_compiled for run in runs),
    }


def summarize_times(times: Sequence[float | None]) -> dict[str, float] | None:
    """Returns mean and percentiles in seconds of all times there are; None without any."""
    import numpy as np

    found = [each for each in times if each is not None]
    if not found:
        return None
    return {"mean": float(np.mean(found))} | {f"p{at}": float(np.percentile(found, at)) for at in PERCENTILES}


def list_failures(runs: Sequence[Run]) -> list[str]:
    """Returns what failed in any run, each kind of failure once."""
    return list(dict.fromkeys(failure for run in runs for failure in run.failures))


def make_throughput_table(bench: Bench, figures: dict[str, Any]) -> Table:
    """Returns the table that the command prints."""
    from rich.table import Table

    table = Table(title=f"Throughput: {bench.title}", show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(justify="right")
    cut = f", {figures['num_cut']:,} cut to the model's length" if figures["num_cut"] else ""
    table.add_row("requests", f"{figures['num_completed']:,} of {figures['num_requests']:,}{cut}")
    table.add_row("prompt / output tokens", f"{figures['num_prompt_tokens']:,} / {figures['num_output_tokens']:,}")
    table.add_row("seconds", figures["elapsed_time"].show(",.2f"))
    table.add_row("requests/s", figures["requests_per_second"].show(",.2f"))
    table.add_row("tokens/s, prompts and outputs", figures["tokens_per_second"].show())
    table.add_row("output tokens/s", figures["output_tokens_per_second"].show())
    for name, text, scale in (("ttft", "TTFT", 1e3), ("tpot", "TPOT", 1e3), ("latency", "latency", 1e3)):
        if (times := figures[name]) is not None:
            shown = ", ".join(f"{scale * times[f'p{at}']:,.1f}" for at in PERCENTILES)
            table.add_row(f"{text} ms, p50, p90, p99", shown)
    table.add_row("steps", ", ".join(f"{bucket}: {count:,}" for bucket, count in figures["steps"].items()))
    table.add_row("padding, of computed tokens", f"{figures['padding_share']:.1%}")
    table.add_row("preemptions", f"{figures['num_preemptions']:,}")
    table.add_row("prefix cache hits", f"{figures['prefix_hits']:,} of {figures['prefix_queries']:,} tokens")
    table.add_row("% of the limit of this device", figures["limit_share"].show(".1f", 100))
    return table

"""The output of `jaxserve bench serve`: a table of one load, a table of a sweep, and its curves."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from jaxserve.tools.bench.plots import Line, PageTable, draw_lines
from jaxserve.tools.bench.serve import PointFigures

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.table import Table

_NAMES = {"ttft": "TTFT", "tpot": "TPOT", "itl": "ITL", "e2el": "E2EL"}
_COUNTS = {  # of one run
    "completed": "successful requests",
    "failed": "failed requests",
    "refused": "refused requests (429)",
    "cut_requests": "requests cut to the model's length",
    "duration": "duration, s",
    "total_input_tokens": "input tokens",
    "total_cached_tokens": "of them from the server's prefix cache",
    "total_output_tokens": "output tokens",
    "max_concurrent_requests": "most requests under way",
}
_RATES = {
    "request_throughput": "requests/s",
    "request_goodput": "good requests/s",
    "output_throughput": "output tokens/s",
    "total_token_throughput": "tokens/s in all",
}


def list_rows(found: PointFigures, metrics: Sequence[str], percentiles: Sequence[float]) -> list[tuple[str, str]]:
    """Returns names and values of one load's figures, in the order of vLLM's table."""
    rows = []
    for name, text in _COUNTS.items():
        if (spread := found.spread(name)) is not None:
            rows.append((text, spread.show(",.2f" if name == "duration" else ",.0f")))
    for name, text in _RATES.items():
        if (spread := found.spread(name)) is not None:
            rows.append((text, spread.show(",.2f")))
    kinds = ["mean", "median", *(f"p{each:g}" for each in percentiles if each != 50)]
    for metric in metrics:
        for kind in kinds:
            spread = found.spread(f"{kind}_{metric}_ms")
            rows.append((f"{_NAMES[metric]} {kind}, ms", "-" if spread is None else spread.show(",.1f")))
    return rows


def describe_refusals(points: Sequence[PointFigures]) -> str | None:
    """Returns a sentence about requests that the server refused with 429; None where it refused none."""
    refused = sum(found.total("refused") for found in points)
    if not refused:
        return None
    total = sum(found.total(name) for found in points for name in ("completed", "failed", "refused"))
    return (
        f"The server refused {refused:,} of {total:,} requests (429), whose times are not counted: more came than it "
        "queues. Give --max-concurrency, or a lower --request-rate."
    )


def make_table(found: PointFigures, metrics: Sequence[str], percentiles: Sequence[float]) -> Table:
    """Returns the table of one load."""
    from rich.table import Table

    runs = len(found.runs)
    table = Table(title=f"{found.point.title}: {runs} run{'s' if runs > 1 else ''}")
    table.add_column("")
    table.add_column("median (least to most)" if runs > 1 else "one run, no figure of its own", justify="right")
    for name, value in list_rows(found, metrics, percentiles):
        table.add_row(name, value.removesuffix(" (one run, no figure of its own)"))
    return table


def list_tables(
    points: Sequence[PointFigures], metrics: Sequence[str], percentiles: Sequence[float]
) -> list[PageTable]:
    """Returns the tables of a sweep, rates and latencies; figures are medians of the runs."""
    last = f"p{max(percentiles):g}"

    def show(found: PointFigures, name: str, form: str = ",.1f") -> str:
        spread = found.spread(name)
        return "-" if spread is None else f"{spread.median:{form}}"

    counts = ("completed", "failed", "refused")
    short = {"request_throughput": "req/s", "request_goodput": "good/s", "output_throughput": "out tok/s"}
    rates = [name for name in _RATES if any(found.spread(name) is not None for found in points)]
    rows = [
        [found.point.title, *(f"{found.total(name):,}" for name in counts), *(show(found, name) for name in rates)]
        for found in points
    ]
    runs = len(points[0].runs)
    title = f"Rates, median of {runs} runs" if runs > 1 else "Rates of one run"
    first = PageTable(title, ["load", "done", *counts[1:], *(short.get(name, "tok/s") for name in rates)], rows)
    kinds = [(metric, kind) for metric in metrics for kind in ("median", last)]
    rows = [[found.point.title, *(show(found, f"{kind}_{m}_ms") for m, kind in kinds)] for found in points]
    second = PageTable("Milliseconds", ["load", *(f"{_NAMES[m]} {kind}" for m, kind in kinds)], rows)
    return [first, second]


def make_sweep_tables(
    points: Sequence[PointFigures], metrics: Sequence[str], percentiles: Sequence[float]
) -> list[Table]:
    """Returns the tables of a sweep for a terminal."""
    from rich.table import Table

    found = []
    for page in list_tables(points, metrics, percentiles):
        table = Table(title=page.title)
        for index, name in enumerate(page.header):
            table.add_column(name, justify="right" if index else "left")
        for row in page.rows:
            table.add_row(*row)
        found.append(table)
    return found


def draw_latencies(points: Sequence[PointFigures], percentiles: Sequence[float]) -> Figure:
    """Returns the curve of latency over throughput: what a server's speed costs its users."""
    last = f"p{max(percentiles):g}"
    return _draw(
        points,
        "Latency against throughput",
        "ms",
        [(f"{_NAMES[m]} {kind}", f"{kind}_{m}_ms") for m in ("ttft", "tpot") for kind in ("median", last)],
    )


def draw_throughput(points: Sequence[PointFigures]) -> Figure:
    """Returns the output tokens/s, over the requests/s that the server answered."""
    return _draw(points, "Output against requests", "tokens/s", [("output tokens/s", "output_throughput")])


def _draw(points: Sequence[PointFigures], title: str, unit: str, series: Sequence[tuple[str, str]]) -> Figure:
    lines = []
    for label, name in series:
        at = [(x, y) for each in points if (x := each.spread("request_throughput")) and (y := each.spread(name))]
        pairs = sorted((x.median, y.median) for x, y in at)
        lines.append(Line(label, [x for x, _ in pairs], [y for _, y in pairs]))
    return draw_lines(title, "requests answered per second", unit, lines, log_y=unit == "ms")


def describe_client(points: Sequence[PointFigures]) -> str:
    """Returns what the load generator itself used."""
    clients = list_clients(points)
    costs = [cost for each in clients if (cost := each["cores_per_1000_chunks_per_second"]) is not None]
    most = max((core for each in clients for core in each["worker_cores"]), default=0.0)
    count = clients[0]["processes"]
    text = f"Load generator: {count} process{'es' if count > 1 else ''}, at most {most:.0%} of a core each"
    if costs:
        text += f", {max(costs):.1%} of a core for 1,000 chunks/s"
    return f"{text}; requests were sent at most {max(each['max_lag_ms'] for each in clients):.1f} ms late."


def list_clients(points: Sequence[PointFigures]) -> list[dict[str, Any]]:
    """Returns what the load generator used in every run."""
    return [run["client"] for found in points for run in found.runs]


def describe_server(points: Sequence[PointFigures]) -> str | None:
    """Returns the server's own counts over all runs; None where it has no /metrics."""
    sums: dict[str, float] = {}
    for run in (run for found in points for run in found.runs):
        for name, value in run["server"].items():
            sums[name] = sums.get(name, 0.0) + value
    if not sums:
        return None
    parts = [f"{sums['preemptions']:,.0f} preemptions"] if "preemptions" in sums else []
    queries, hits = sums.get("prefix_cache_queries", 0.0), sums.get("prefix_cache_hits", 0.0)
    parts += [f"{hits / queries:.0%} of prompt tokens from the prefix cache"] if queries else []
    return f"The server's own counts: {', '.join(parts)}." if parts else None


def list_failures(points: Sequence[PointFigures]) -> list[str]:
    """Returns one line for each kind of failure."""
    found: dict[str, int] = {}
    for run in (run for each in points for run in each.runs):
        for error, count in run["errors"].items():
            found[error] = found.get(error, 0) + count
    return [f"{count} request{'s' if count > 1 else ''}: {error}" for error, count in found.items()]


def show_saturation(points: Sequence[PointFigures]) -> dict[str, Any] | None:
    """Returns the load with the most requests answered per second, of several; None for one."""
    known = [(spread.median, each) for each in points if (spread := each.spread("request_throughput"))]
    if len(points) < 2 or not known:
        return None
    rate, best = max(known, key=lambda pair: pair[0])
    asked = best.point.request_rate
    return {"request_throughput": rate, "request_rate": "inf" if math.isinf(asked) else asked}

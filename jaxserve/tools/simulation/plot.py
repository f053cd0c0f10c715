"""A page of plots of simulated runs: one HTML file that needs nothing else."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

import numpy as np

from jaxserve.tools.simulation.fleet import FleetRun
from jaxserve.tools.simulation.report import QUANTILES, Distribution, Summary, Targets, collect_itls

COLORS = ("#0969da", "#cf222e", "#9a6700", "#8250df", "#1a7f37", "#57606a")  # repeated beyond six runs
_WIDTH, _HEIGHT = 540, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 60, 28, 36, 44  # margins around the axes
_POINTS = 200  # of a curve
_BINS = 120  # of the time axis

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1f2328; background: #fff; margin: 2rem auto; max-width: 1120px;
  padding: 0 1rem }
h1 { font-size: 1.3rem } .plots { display: flex; flex-wrap: wrap; gap: 16px } svg { width: 540px; max-width: 100% }
table { border-collapse: collapse; margin: 1rem 0 } td, th { padding: .25rem .9rem .25rem 0; text-align: right;
  border-bottom: 1px solid #d0d7de; font-size: .85rem }
td { white-space: nowrap } td:first-child, th:first-child { text-align: left }
.swatch { display: inline-block; width: .8em; height: .8em; border-radius: 2px; margin-right: .4em }
"""


@dataclass(frozen=True, slots=True)
class _Curve:
    x: np.ndarray
    y: np.ndarray
    color: str


@dataclass(frozen=True, slots=True)
class _Axis:
    """Maps values to pixels."""

    low: float
    high: float
    start: float
    end: float
    is_log: bool = False

    def place(self, value: float) -> float:
        low, high, at = map(math.log10, (self.low, self.high, value)) if self.is_log else (self.low, self.high, value)
        return self.start + (self.end - self.start) * (at - low) / (high - low)

    def ticks(self) -> list[float]:
        if self.is_log:
            powers = range(math.ceil(math.log10(self.low) - 1e-9), math.floor(math.log10(self.high) + 1e-9) + 1)
            return [10.0**power for power in powers]
        rough = (self.high - self.low) / 5
        power = 10.0 ** math.floor(math.log10(rough))
        step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * (1 - 1e-9))
        return [step * index for index in range(math.ceil(self.low / step), math.floor(self.high / step + 1e-9) + 1)]


def draw_page(runs: Sequence[tuple[Summary, FleetRun]], targets: Targets, title: str, notes: Sequence[str]) -> str:
    """Returns the page: figures, distributions of the times, and the load over the trace, one colour per run."""
    colors = [COLORS[index % len(COLORS)] for index in range(len(runs))]
    times: list[tuple[str, Callable[[FleetRun], np.ndarray], float | None]] = [
        ("time to first token (TTFT)", _collect_ttfts, targets.ttft_ms),
        ("mean time per output token of a request (TPOT)", _collect_tpots, targets.tpot_ms),
        ("time between two tokens (ITL)", lambda run: collect_itls(run.timelines), None),
    ]
    plots = []
    for name, collect, limit in times:
        values = [(1e3 * collect(run), color) for (_, run), color in zip(runs, colors, strict=True)]
        plots.append(_draw_distribution(name, [(v[v > 0], color) for v, color in values if (v > 0).any()], limit))
    span = max(run.end for _, run in runs)
    for name, count in (("unfinished requests", _count_unfinished), ("output tokens per second", _count_tokens)):
        curves = [
            _Curve(*count(run, span), color)  # type: ignore[arg-type]
            for (_, run), color in zip(runs, colors, strict=True)
        ]
        plots.append(_draw(name, "seconds since the first request", curves))
    body = [f"<h1>{escape(title)}</h1>", *(f"<p>{escape(note)}</p>" for note in notes), _draw_table(runs, colors)]
    body += ['<div class="plots">', *plots, "</div>"]
    head = (
        f'<!doctype html>\n<html lang="en"><meta charset="utf-8"><title>{escape(title)}</title><style>{_STYLE}</style>'
    )
    return "\n".join([head, *body, "</html>\n"])


def _collect_ttfts(run: FleetRun) -> np.ndarray:
    return np.array([ttft for each in run.timelines if (ttft := each.ttft) is not None])


def _collect_tpots(run: FleetRun) -> np.ndarray:
    return np.array([tpot for each in run.timelines if (tpot := each.tpot) is not None])


def _count_unfinished(run: FleetRun, span: float) -> tuple[np.ndarray, np.ndarray]:
    times = np.linspace(0, span, _BINS)
    ended = [each for each in run.timelines if each.finished_time is not None]
    arrivals = np.sort([each.arrival_time for each in ended])
    ends = np.sort([each.finished_time for each in ended if each.finished_time is not None])
    return times, np.searchsorted(arrivals, times, "right") - np.searchsorted(ends, times, "right")


def _count_tokens(run: FleetRun, span: float) -> tuple[np.ndarray, np.ndarray]:
    edges = np.linspace(0, span, _BINS + 1)
    counts = np.zeros(_BINS)
    for each in run.timelines:
        if each.token_times:
            counts += np.histogram(np.frombuffer(each.token_times), edges)[0]
    return (edges[1:] + edges[:-1]) / 2, counts / (edges[1] - edges[0])


def _draw_distribution(name: str, runs: Sequence[tuple[np.ndarray, str]], limit: float | None) -> str:
    shares = np.linspace(0, 1, _POINTS)
    curves = [_Curve(np.quantile(values, shares), 100 * shares, color) for values, color in runs]
    return _draw(name, "milliseconds", curves, is_log=True, limit=limit, unit=" %")


def _draw(
    title: str,
    x_label: str,
    curves: Sequence[_Curve],
    *,
    is_log: bool = False,
    limit: float | None = None,
    unit: str = "",
) -> str:
    """Returns an SVG of curves; `limit` is a dashed line across."""
    lows, highs = [float(c.x.min()) for c in curves], [float(c.x.max()) for c in curves]
    low, high = min([*lows, limit or math.inf], default=1.0), max([*highs, limit or 0.0], default=10.0)
    if not curves:
        low, high = 1.0, 10.0
    if is_log:
        low, high = 10 ** math.floor(math.log10(low)), 10 ** math.ceil(math.log10(high) + 1e-6)
    x = _Axis(low, max(high, low + 1e-9), _LEFT, _WIDTH - _RIGHT, is_log)
    top = max([float(c.y.max()) for c in curves], default=1.0) or 1.0
    y = _Axis(0, top, _HEIGHT - _BOTTOM, _TOP)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif" '
        'font-size="12">',
        _text(_LEFT, 18, title, anchor="start", color="#1f2328"),
        _text((_LEFT + _WIDTH - _RIGHT) / 2, _HEIGHT - 8, x_label),
    ]
    for value in y.ticks():
        parts.append(f'<path d="M{_LEFT} {y.place(value):.1f}H{_WIDTH - _RIGHT}" stroke="#d8dee4"/>')
        parts.append(_text(_LEFT - 6, y.place(value) + 4, f"{value:,g}{unit}", anchor="end"))
    for value in x.ticks():
        parts.append(f'<path d="M{x.place(value):.1f} {_TOP}V{_HEIGHT - _BOTTOM}" stroke="#eaeef2"/>')
        parts.append(_text(x.place(value), _HEIGHT - _BOTTOM + 16, f"{value:,g}"))
    if limit is not None:
        at = x.place(limit)
        parts.append(f'<path d="M{at:.1f} {_TOP}V{_HEIGHT - _BOTTOM}" stroke="#1f2328" stroke-dasharray="4 3"/>')
        parts.append(_text(at + 5, _HEIGHT - _BOTTOM - 6, "SLO", anchor="start", color="#1f2328"))
    for curve in curves:
        points = "L".join(f"{x.place(a):.1f} {y.place(b):.1f}" for a, b in zip(curve.x, curve.y, strict=True))
        parts.append(f'<path d="M{points}" fill="none" stroke="{curve.color}" stroke-width="2"/>')
    return "\n".join([*parts, "</svg>"])


def _text(x: float, y: float, text: str, *, anchor: str = "middle", color: str = "#57606a") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{color}">{escape(text)}</text>'


def _draw_table(runs: Sequence[tuple[Summary, FleetRun]], colors: Sequence[str]) -> str:
    quantiles = " / ".join(f"p{q}" for q in QUANTILES)
    columns = ["", "requests/s", "output tokens/s", *(f"{t} ms, {quantiles}" for t in ("TTFT", "TPOT", "ITL"))]
    columns += ["hits", "preemptions", "padding", *(["within SLO"] if runs[0][0].slo_share is not None else [])]
    rows = []
    for (summary, _), color in zip(runs, colors, strict=True):
        times: list[Distribution] = [summary.ttft_ms, summary.tpot_ms, summary.itl_ms]
        label = f'<span class="swatch" style="background:{color}"></span>{escape(summary.label or "this run")}'
        cells = [f"{summary.request_rate:,.2f}", f"{summary.output_token_rate:,.0f}", *map(str, times)]
        cells += [f"{summary.prefix_hit_rate:.1%}", f"{summary.num_preemptions:,}", f"{summary.padding_share:.1%}"]
        cells += [f"{summary.slo_share:.2%}"] if summary.slo_share is not None else []
        rows.append("<tr>" + "".join(f"<td>{cell}</td>" for cell in [label, *cells]) + "</tr>")
    heads = "".join(f"<th>{column}</th>" for column in columns)
    return f"<table><tr>{heads}</tr>{''.join(rows)}</table>"

"""Draws the measurements of `scripts/demo.py --plot FILE`: requests finished over time, for each way of serving."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 760, 380
LEFT, RIGHT, TOP, BOTTOM = 56, 24, 56, 48  # margins around the axes
COLORS = ("#9a6700", "#cf222e", "#0969da")  # safe for color-blind readers; in grayscale, labels tell them apart
_TICKS = 5  # at most, on the time axis


@dataclass(frozen=True)
class Curve:
    """One way of serving: when each of its requests finished, in seconds after the start."""

    label: str
    seconds: Sequence[float]


def draw_curves(curves: Sequence[Curve], title: str) -> str:
    """Returns an SVG of requests finished over time, one stepped line per curve."""
    count = max(len(curve.seconds) for curve in curves)
    span = max(max(curve.seconds) for curve in curves)
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM

    def x(seconds: float) -> float:
        return LEFT + (right - LEFT) * seconds / span

    def y(finished: float) -> float:
        return bottom - (bottom - TOP) * finished / count

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif"'
        ' font-size="13">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
        f'<text x="{LEFT}" y="26" font-size="15" fill="#1f2328">{escape(title)}</text>',
    ]
    for finished in range(0, count + 1, max(1, count // 4)):
        parts.append(f'<path d="M{LEFT} {y(finished):.1f}H{right}" stroke="#d0d7de"/>')
        parts.append(_text(LEFT - 8, y(finished) + 4, str(finished), anchor="end"))
    for seconds in _ticks(span):
        parts.append(_text(x(seconds), bottom + 20, f"{seconds:g} s"))
    parts.append(_text((LEFT + right) / 2, HEIGHT - 8, "time since all requests arrived"))
    parts.append(_text(LEFT, TOP - 12, "requests finished", anchor="start"))
    for index, (curve, color) in enumerate(zip(curves, COLORS, strict=True)):
        steps = "".join(f"H{x(second):.1f}V{y(n):.1f}" for n, second in enumerate(sorted(curve.seconds), 1))
        parts.append(f'<path d="M{x(0):.1f} {y(0):.1f}{steps}" fill="none" stroke="{color}" stroke-width="2.5"/>')
        level = bottom - 12 - 22 * (len(curves) - 1 - index)  # in the corner below the rising curves
        label = f"{curve.label}: all after {max(curve.seconds):.1f} s"
        parts.append(_text(right - 10, level, label, anchor="end", color=color))
    return "\n".join([*parts, "</svg>\n"])


def _ticks(span: float) -> list[float]:
    """Returns round times from 0 to `span`."""
    rough = span / _TICKS
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough)
    return [round(index * step, 6) for index in range(int(span / step) + 1)]


def _text(x: float, y: float, text: str, *, anchor: str = "middle", color: str = "#57606a") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{color}">{escape(text)}</text>'

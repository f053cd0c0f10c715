"""Writes the results of a device day as a page of markdown."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from device_stages.plan import STAGES
from device_stages.results import Line, results_of

_SHOWN_CHARS = 160
_KNOWN = ("stage", "event", "item", "ok", "seconds", "error", "how", "stderr", "clocks", "us", "share")


def write_report(path: Path, lines: Sequence[Line]) -> None:
    """Writes the page, or nothing if that fails."""
    fresh = path.with_name(f".{path.name}.new")
    fresh.write_text("\n".join(make_report(lines)) + "\n")
    os.replace(fresh, path)


def make_report(lines: Sequence[Line]) -> list[str]:
    """Returns lines of markdown: a heading and a table for each stage that was begun or skipped."""
    device = next((line["device"] for line in results_of(lines, "probe") if "device" in line), "unknown device")
    page = [f"# Device day: {device}"]
    for stage in dict.fromkeys(line["stage"] for line in lines):
        own = [line for line in lines if line["stage"] == stage]
        purpose = STAGES[stage].purpose if stage in STAGES else ""
        page += ["", f"## {stage}{f': {purpose}' if purpose else ''}", "", describe_stage(own)]
        rows = [describe_item(line) for line in results_of(own, stage)]
        if rows:
            page += ["", "| | | s | |", "|---|---|---:|---|", *rows]
        cut = [f"{line['item']} ({line.get('how') or line.get('why')})" for line in list_open(own)]
        page += ["", f"Not measured: {'; '.join(cut)}."] if cut else []
    return page


def describe_stage(lines: Sequence[Line]) -> str:
    """Returns how a stage's last run ended, and what it measured."""
    starts = [line for line in lines if line["event"] == "start"]
    ends = [line for line in lines if line["event"] == "end"]
    impl = f" Asked for: {starts[-1]['impl']}." if starts and starts[-1].get("impl") else ""
    if not starts:
        return f"Not run: {lines[-1].get('why', 'unknown')}."
    if not ends:
        return f"Cut off: the call ended before it.{impl}"
    return f"{ends[-1]['how'][:1].upper()}{ends[-1]['how'][1:]}, {ends[-1]['seconds']:g} s.{impl}"


def list_open(lines: Iterable[Line]) -> list[Line]:
    """Returns the lines of items that were cut or skipped and have no result yet."""
    lines = list(lines)
    closed = {line["item"] for stage in {line["stage"] for line in lines} for line in results_of(lines, stage)}
    open_items = {line["item"]: line for line in lines if line["event"] in ("cut", "skip") and line.get("item")}
    return [line for item, line in open_items.items() if item not in closed]


def describe_item(line: Line) -> str:
    """Returns a row of the table: the item, whether it is right, its time, its figures."""
    if line["event"] == "lost":
        verdict, seconds, last = "LOST", "", line["stderr"].splitlines()[-1:]
        figures = ": ".join([line["how"], *last])
    else:
        verdict = {True: "ok", False: "WRONG", None: "not here"}[line["ok"]]
        seconds = f"{line['seconds']:.1f}"
        figures = ", ".join(describe_figures(line))
    return f"| {escape(line['item'])} | {verdict} | {seconds} | {escape(figures)} |"


def describe_figures(line: Line) -> list[str]:
    """Returns the figures of a result, times first."""
    parts = []
    if "error" in line:
        parts.append(" ".join(str(line["error"]).split())[:_SHOWN_CHARS])
    if "us" in line:
        us = line["us"]
        parts.append(f"{us['median']:.1f} us ({us['min']:.1f} to {us['p90']:.1f}, {us['repeats']} repeats)")
    if "share" in line:
        parts.append(f"{line['share']:.0%} of {line.get('share_of', 'the limit')}")
    clocks = line.get("clocks") or {}
    if clocks:
        parts.append(f"{clocks['sm_mhz']:.0f} MHz, {clocks['watts']:.0f} W")
    rest = {name: value for name, value in line.items() if name not in (*_KNOWN, "share_of")}
    return parts + [f"{name.replace('_', ' ')} {show(value)}" for name, value in rest.items()]


def show(value: Any) -> str:
    """Returns a figure as short text."""
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, dict):
        return "; ".join(f"{name}: {show(part)}" for name, part in value.items())
    if isinstance(value, list):
        return ", ".join(show(part) for part in value)
    text = " ".join(str(value).split())
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}..."


def escape(text: str) -> str:
    """Returns the text as a table cell."""
    return text.replace("|", "\\|").replace("\n", " ")

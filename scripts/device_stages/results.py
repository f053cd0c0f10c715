"""The results of a device day: a file of JSON lines. Its processes append to it, and may die while they do.

A line has the stage it belongs to and an event:

    start, end      a stage's, by the parent; `how` it ended: "done", or what cut it short
    begin           an item was begun; if it has no closing line, its process died in it
    result          an item's; `ok` is true, false, or null if something it needs is not here
    lost            an item's process died; `how`, and the end of the process's output
    cut             an item was interrupted at the end of its stage's time: it may be run again
    skip            an item or a stage was not run, and why
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

Line = dict[str, Any]

CLOSING = ("result", "lost")


def append_line(path: Path, line: Line) -> None:
    """Appends a line, and returns when it is on the disk. A partial line that a dead process left stays apart."""
    data = (json.dumps(_plain(line), default=str) + "\n").encode()
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        size = os.lseek(handle, 0, os.SEEK_END)
        if size and os.pread(handle, 1, size - 1) != b"\n":
            data = b"\n" + data
        while data:
            data = data[os.write(handle, data) :]
        os.fsync(handle)
    finally:
        os.close(handle)


def _plain(value: Any) -> Any:
    """Returns the value with infinities and NaN, which JSON lacks, as text."""
    if isinstance(value, dict):
        return {str(key): _plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def read_lines(path: Path) -> list[Line]:
    """Returns the whole lines of a file; none if there is no file."""
    if not path.exists():
        return []
    found = []
    for text in path.read_text(errors="replace").splitlines():
        try:
            line = json.loads(text)
        except json.JSONDecodeError:
            continue
        if isinstance(line, dict) and "stage" in line and "event" in line:
            found.append(line)
    return found


def closed_items(lines: Iterable[Line], stage: str) -> list[str]:
    """Returns the items of a stage that have a result or were lost: they are not run again."""
    return [line["item"] for line in lines if line["stage"] == stage and line["event"] in CLOSING]


def open_item(lines: Iterable[Line], stage: str) -> Line | None:
    """Returns the `begin` line of a stage's last item, or None if that item has ended."""
    begun = None
    for line in lines:
        if line["stage"] != stage:
            continue
        if line["event"] == "begin":
            begun = line
        elif line.get("item") and begun is not None and line["item"] == begun["item"]:
            begun = None
    return begun


def is_done(lines: Iterable[Line], stage: str) -> bool:
    """Whether a stage ended with all its items done."""
    return any(line["stage"] == stage and line["event"] == "end" and line["how"] == "done" for line in lines)


def results_of(lines: Iterable[Line], stage: str) -> list[Line]:
    """Returns the last closing line of each item of a stage, in the order in which items first ended."""
    found = {line["item"]: line for line in lines if line["stage"] == stage and line["event"] in CLOSING}
    return list(found.values())

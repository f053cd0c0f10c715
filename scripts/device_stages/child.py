"""Runs the process of a stage, and ends it when the time of the stage or of an item is over."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from device_stages.plan import Stage
from device_stages.results import append_line, closed_items, open_item, read_lines

SCRIPTS = Path(__file__).parents[1]
MAX_LOSSES = 5  # items of a stage whose process may die; then the stage ends
MARGIN = 3.0  # seconds between an item's last chance to begin and the end of its stage
POLL = 0.1
TAIL_CHARS = 1500
_KILL_WAIT = 10.0  # seconds for a process that hangs in the driver
_ASKING = Stage("asking", "whether the device still answers", 30, 30)
_ASK = "import jax; jax.block_until_ready(jax.numpy.ones(8) + 1)"


@dataclass(frozen=True)
class Request:
    """How to run the stages."""

    results: Path
    log: Path  # takes the output of all processes
    environment: Mapping[str, str]
    impl: str | None = None
    tiny: bool = False


@dataclass(frozen=True)
class Ending:
    """How a process ended; the fault is None if it did all its items and exited."""

    fault: str | None
    is_late: bool = False  # the stage's time was over


def run_stage(stage: Stage, request: Request, seconds: float) -> str:
    """Runs a stage for at most `seconds`, with a new process after each one that died; returns how the stage ended."""
    _close(request, stage, open_item(read_lines(request.results), stage.name), "cut", "its day ended")
    append_line(request.results, {"stage": stage.name, "event": "start", "limit": seconds, "impl": request.impl})
    begun = time.monotonic()
    how, losses, careful = "", 0, False
    while not how:
        closed = closed_items(read_lines(request.results), stage.name)
        ending = _run_process(stage, request, begun + seconds, closed, careful=careful)
        lines = read_lines(request.results)
        item = open_item(lines, stage.name)
        is_sure = careful or not stage.prepares_ahead  # else another item, which was being compiled, may be to blame
        if ending.fault is None:
            how = "done"
        elif ending.is_late:
            how = ending.fault
            _close(request, stage, item, "cut", how)
        elif item is not None and is_sure:
            losses += 1
            _close(request, stage, item, "lost", ending.fault)
        elif is_sure and len(closed_items(lines, stage.name)) == len(closed):
            how = ending.fault  # it dies before its items
        if losses >= MAX_LOSSES:
            how = f"{losses} items took their process with them"
        careful = True
    took = round(time.monotonic() - begun, 2)
    tail = "" if how == "done" else read_tail(request.log)
    append_line(request.results, {"stage": stage.name, "event": "end", "how": how, "seconds": took, "stderr": tail})
    return how


def _close(request: Request, stage: Stage, item: dict | None, event: str, how: str) -> None:
    """Appends the closing line of the item that was being run, if any."""
    if item is not None:
        line = {"stage": stage.name, "item": item["item"], "event": event, "how": how}
        append_line(request.results, {**line, "stderr": read_tail(request.log)})


def _run_process(stage: Stage, request: Request, end: float, closed: Sequence[str], *, careful: bool) -> Ending:
    left = end - time.monotonic()
    if left <= 0:
        return Ending("no time left", is_late=True)
    command = [sys.executable, str(SCRIPTS / "device_stage.py"), stage.name, "--module", stage.path]
    command += ["--results", str(request.results), "--seconds", f"{max(left - MARGIN, left / 2):.2f}"]
    command += ["--impl", request.impl] if request.impl else []
    command += [flag for flag, wanted in (("--tiny", request.tiny), ("--careful", careful)) if wanted]
    command += ["--skip", *closed]
    with _process(command, request, stage) as child:
        seen, since = None, time.monotonic()
        while child.poll() is None:
            time.sleep(POLL)
            now, item = time.monotonic(), open_item(read_lines(request.results), stage.name)
            if item != seen:
                seen, since = item, now
            if now > end:
                return Ending("killed at the end of its time", is_late=True)
            if item is not None and now - since > stage.item_seconds:
                return Ending(f"killed after {stage.item_seconds:g} s")
    return Ending(describe_status(child.returncode))


@contextlib.contextmanager
def _process(command: Sequence[str], request: Request, stage: Stage) -> Iterator[subprocess.Popen]:
    """Yields a process in a group of its own, and always kills the whole group at the end."""
    environment = dict(request.environment)
    for name, text in stage.environment.items():  # flags are added to those of the user
        value = text.format(out=request.results.parent)
        environment[name] = f"{environment[name]} {value}" if name == "XLA_FLAGS" and name in environment else value
    with request.log.open("ab") as log:
        log.write(f"=== {stage.name}\n".encode())
        log.flush()
        child = subprocess.Popen(
            command, cwd=SCRIPTS.parent, env=environment, stdout=log, stderr=subprocess.STDOUT, process_group=0
        )
    try:
        yield child
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(_KILL_WAIT)


def device_answers(request: Request) -> bool:
    """Whether a new process can still use the device."""
    with _process([sys.executable, "-c", _ASK], request, _ASKING) as child:
        try:
            return child.wait(_ASKING.seconds) == 0
        except subprocess.TimeoutExpired:
            return False


def describe_status(status: int) -> str | None:
    """Returns an exit status in words, None for 0."""
    if status == 0:
        return None
    if status < 0:
        return f"died of {signal.Signals(-status).name}"
    return f"ended with {status}"


def read_tail(path: Path) -> str:
    """Returns the end of a file, where a process says why it died."""
    if not path.exists():
        return ""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - TAIL_CHARS))
        return file.read().decode(errors="replace").strip()

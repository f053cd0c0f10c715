"""Runs one stage of a device day in a process that may die, as a child of `device_day.py`.

Each item has a line for its begin and one for its result, both on the disk before anything else is done. The process
ends without cleanup, which can hang after a fault of the device.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib
import logging
import os
import signal
import sys
import time
import traceback
from pathlib import Path

from device_stages.clocks import ClockLog
from device_stages.items import Context, Item, NotHereError
from device_stages.results import Line, append_line, read_lines

ERROR_CHARS = 600
_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Asks Linux to kill this process when its parent ends: a hung one would hold the device."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def run_item(item: Item) -> Line:
    """Returns an item's figures, or the error that it raised."""
    start = time.monotonic()
    try:
        found = {"ok": True, **item.run()}
    except NotHereError as problem:
        found = {"ok": None, "error": str(problem)[:ERROR_CHARS]}
    except Exception as problem:  # a kernel that does not compile must not hide the others
        traceback.print_exc()
        found = {"ok": False, "error": f"{type(problem).__name__}: {problem}"[:ERROR_CHARS]}
    if item.predicted:
        found["predicted"] = item.predicted
    return {**found, "seconds": round(time.monotonic() - start, 3)}


def run_stage(stage: str, module: str, results: Path, context: Context) -> None:
    """Runs all items that are not to be skipped; begins none after its time is over."""
    end = time.monotonic() + context.seconds
    for item in importlib.import_module(module).list_items(context):
        line = {"stage": stage, "item": item.name}
        if item.name in context.skip:
            continue
        if time.monotonic() >= end:
            append_line(results, {**line, "event": "skip", "why": "no time left"})
            continue
        append_line(results, {**line, "event": "begin"})
        append_line(results, {**line, "event": "result", **run_item(item)})


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stage")
    parser.add_argument("--module", required=True, help="lists the items of the stage")
    parser.add_argument("--results", type=Path, required=True, metavar="FILE", help="takes the lines")
    parser.add_argument("--seconds", type=float, default=600.0, help="until items are no longer begun")
    parser.add_argument("--skip", nargs="*", default=[], metavar="ITEM")
    parser.add_argument("--impl", help="of attention; default: what the device gets")
    parser.add_argument("--tiny", action="store_true", help="small shapes")
    parser.add_argument("--careful", action="store_true", help="prepare no item before it is begun")
    return parser.parse_args()


def main() -> None:
    die_with_parent()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    args, clocks = parse_args(), ClockLog()
    context = Context(
        stage=args.stage,
        out=args.results.parent,
        impl=args.impl,
        tiny=args.tiny,
        careful=args.careful,
        seconds=args.seconds,
        skip=tuple(args.skip),
        lines=tuple(read_lines(args.results)),
        clocks=clocks,
    )
    clocks.start()
    try:
        run_stage(args.stage, args.module, args.results, context)
    except BaseException:
        traceback.print_exc()
        status = 1
    else:
        status = 0
    clocks.stop()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    main()

"""`jaxserve serve` with a clock on its event loop: prints each callback that keeps the processor for too long.

The clock counts CPU time of the loop's thread, so a busy machine changes little. The loop is asyncio's own, because
uvloop's callbacks cannot be timed. Takes the flags of `jaxserve serve`.
"""

from __future__ import annotations

import asyncio
import gc
import sys
import threading
import time
from typing import Any

from jaxserve.tools import cli

MOST_SECONDS = 0.05  # of a callback, without collections of garbage
MOST_COLLECTING_SECONDS = 0.25  # young objects of some hundred requests are looked through in less
MARK = "slow callback:"
_MOST_NAMES = 6  # of the coroutines that a task is in, the innermost


def watch_callbacks() -> None:
    """Times every callback of every asyncio loop of this process."""
    run = asyncio.Handle._run
    collecting = threading.local()  # `began`, `seconds`: of this thread's collections of garbage

    def note_collection(stage: str, _: object) -> None:
        now = time.thread_time()
        if stage == "start":
            collecting.began = now
        else:
            collecting.seconds = getattr(collecting, "seconds", 0.0) + now - collecting.began

    def run_timed(handle: asyncio.Handle) -> None:
        started, before = time.thread_time(), getattr(collecting, "seconds", 0.0)
        run(handle)
        seconds = time.thread_time() - started
        collected = getattr(collecting, "seconds", 0.0) - before
        if seconds - collected > MOST_SECONDS or collected > MOST_COLLECTING_SECONDS:
            text = f"{MARK} {seconds:.3f} s, {collected:.3f} s of it garbage: {_describe(handle)}"
            print(text, file=sys.stderr, flush=True)
        del handle  # an error that `run` caught holds this frame, and the handle the error's request, a circle

    gc.callbacks.append(note_collection)

    asyncio.Handle._run = run_timed  # type: ignore[method-assign]


def _describe(handle: asyncio.Handle) -> str:
    """Returns the callback's name; of a task, where its coroutine waits now."""
    callback: Any = handle._callback  # type: ignore[attr-defined]
    task = getattr(callback, "__self__", None)
    if not isinstance(task, asyncio.Task):
        return repr(callback)
    names, waiting = [], task.get_coro()
    while waiting is not None:
        names.append(getattr(waiting, "__qualname__", type(waiting).__name__))
        waiting = getattr(waiting, "cr_await", None) or getattr(waiting, "ag_await", None)
    return " > ".join(names[-_MOST_NAMES:])


if __name__ == "__main__":
    sys.modules["uvloop"] = None  # type: ignore[assignment]  # uvicorn then takes asyncio's loop
    watch_callbacks()
    sys.exit(cli.main())

"""One process of the load generator: an event loop that sends its share of the requests on time."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Coroutine
from ctypes import c_long
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from jaxserve.tools.bench.load.client import Client
from jaxserve.tools.bench.load.records import RequestRecord
from jaxserve.tools.bench.load.target import Target


@dataclass(frozen=True)
class Share:
    """The requests of one process. Times are seconds after the start, in order."""

    target: Target
    requests: tuple[bytes, ...]
    arrivals: tuple[float, ...]
    max_concurrency: int | None  # of this process
    timeout: float  # seconds that one request may take
    keeps_text: bool = False


@dataclass(frozen=True)
class ShareOutcome:
    """What one process did between the start and the end of its last request."""

    records: list[RequestRecord]
    cpu_seconds: float
    seconds: float


def run_worker(pipe: Connection, ended: c_long) -> None:
    """Takes shares from a pipe until it closes: a `Share`, answered by True, then the start, answered by its
    `ShareOutcome`. `ended`, in shared memory, counts the requests that have ended."""
    try:
        while True:
            share: Share = pipe.recv()
            pipe.send(True)
            pipe.send(run_loop(run_share(share, pipe.recv(), ended)))
    except (EOFError, KeyboardInterrupt):
        pass


def run_loop[T](work: Coroutine[Any, Any, T]) -> T:
    """Runs a coroutine on uvloop where it is installed."""
    if sys.platform != "win32":
        try:
            import uvloop
        except ImportError:
            pass
        else:
            return uvloop.run(work)
    return asyncio.run(work)


async def run_share(share: Share, start: float, ended: c_long) -> ShareOutcome:
    """Sends all requests of a share and waits for their ends; `start` is a time of the monotonic clock.

    The schedule is absolute: a slow server does not move later arrivals, unless the limit of concurrency does.
    """
    client, records = Client(share.target), [RequestRecord(scheduled=start + each) for each in share.arrivals]
    room = asyncio.Semaphore(share.max_concurrency or max(1, len(records)))
    await asyncio.sleep(max(0.0, start - time.monotonic()))
    cpu, began, tasks = time.process_time(), time.monotonic(), []
    for request, record in zip(share.requests, records, strict=True):
        while (wait := record.scheduled - time.monotonic()) > 0:
            await asyncio.sleep(wait)  # a timer may be early by its resolution
        is_full = room.locked()
        await room.acquire()
        record.due = time.monotonic() if is_full else record.scheduled
        tasks.append(asyncio.ensure_future(_send(client, request, record, share, room, ended)))
    await asyncio.gather(*tasks)
    client.close()
    return ShareOutcome(records, time.process_time() - cpu, time.monotonic() - began)


async def _send(
    client: Client, request: bytes, record: RequestRecord, share: Share, room: asyncio.Semaphore, ended: c_long
) -> None:
    try:
        async with asyncio.timeout(share.timeout):
            await client.send(request, record, keeps_text=share.keeps_text)
    except TimeoutError:
        record.end, record.error = time.monotonic(), f"no end within {share.timeout:g} s"
    finally:
        ended.value += 1  # no other process writes it
        room.release()

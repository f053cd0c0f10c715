"""The parent of the load generator's processes."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Sequence
from ctypes import c_long
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from types import TracebackType

from jaxserve.errors import ClusterError
from jaxserve.tools.bench.load.records import LoadOutcome, RequestRecord
from jaxserve.tools.bench.load.target import Target
from jaxserve.tools.bench.load.worker import Share, ShareOutcome, run_worker

_LEAD_SECONDS = 0.3  # between the order to start and the start
_END_SECONDS = 5.0
_REPORT_SECONDS = 0.25


class LoadGenerator:
    """Processes that wait for work; a context manager. They are started once, so no start is inside a clock."""

    def __init__(self, num_processes: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._workers: list[tuple[BaseProcess, Connection]] = []
        self._ended: list[c_long] = []  # requests of each process that have ended, in shared memory
        for _ in range(num_processes):
            ours, theirs = context.Pipe()
            ended = context.Value(c_long, lock=False)
            process = context.Process(target=run_worker, args=(theirs, ended), daemon=True)
            process.start()
            theirs.close()
            self._workers.append((process, ours))
            self._ended.append(ended)

    def __enter__(self) -> LoadGenerator:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process, pipe in self._workers:
            pipe.close()
            if kind is not None:
                process.terminate()
        for process, _ in self._workers:
            process.join(_END_SECONDS)

    def run(
        self,
        target: Target,
        requests: Sequence[bytes],
        arrivals: Sequence[float],
        *,
        max_concurrency: int | None = None,
        timeout: float = 600.0,
        keeps_text: bool = False,
        progress: Callable[[int], None] = lambda done: None,
    ) -> LoadOutcome:
        """Sends all requests, and returns when the last has ended.

        Args:
            target: the server.
            requests: what `Target.encode` made.
            arrivals: seconds after the start, in ascending order.
            max_concurrency: requests under way, shared out among the processes.
            timeout: seconds that one request may take.
            keeps_text: whether records have the answers' texts.
            progress: told now and then how many requests have ended.

        Raises:
            ClusterError: a process of the load generator ended.
        """
        active = self._workers[: max(1, min(len(self._workers), len(requests), max_concurrency or len(requests)))]
        count = len(active)
        limits = [None if max_concurrency is None else _share(max_concurrency, count, at) for at in range(count)]
        try:
            for at, (_, pipe) in enumerate(active):
                mine = tuple(requests[at::count]), tuple(arrivals[at::count])
                pipe.send(Share(target, *mine, limits[at], timeout, keeps_text))
            for _, pipe in active:
                pipe.recv()
            start = time.monotonic() + _LEAD_SECONDS
            for _, pipe in active:
                pipe.send(start)
            before = self._count_ended()
            shares: list[ShareOutcome] = []
            for _, pipe in active:
                while not pipe.poll(_REPORT_SECONDS):
                    progress(self._count_ended() - before)
                shares.append(pipe.recv())
            progress(len(requests))
        except (EOFError, OSError) as error:
            message = "one of them ended in the middle of a run; is there enough memory?"
            raise ClusterError(message, field="num_processes", value=len(self._workers)) from error
        records = [RequestRecord()] * len(requests)
        for at, share in enumerate(shares):
            records[at::count] = share.records
        end = max((record.end for record in records), default=start)
        cores = tuple(share.cpu_seconds / share.seconds if share.seconds else 0.0 for share in shares)
        return LoadOutcome(records, start, end - start, cores, sum(share.cpu_seconds for share in shares))

    def _count_ended(self) -> int:
        return sum(ended.value for ended in self._ended)


def _share(total: int, count: int, at: int) -> int:
    """Returns the part of `total` that the process number `at` of `count` gets."""
    return total // count + (at < total % count)

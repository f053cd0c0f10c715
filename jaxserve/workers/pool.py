"""A few processes that can be killed, which take turns at jobs."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, final

from jaxserve.errors import JaxServeError
from jaxserve.workers.process import Worker, WorkerEndedError, WorkerStartError, WorkerTimeoutError


class WorkerPoolClosedError(JaxServeError, RuntimeError):
    """The pool was closed."""


class WorkerPoolBusyError(WorkerTimeoutError):
    """All processes were at work for too long; the job was not begun."""


@final
class WorkerPool:
    """Workers of one program, started on demand. Safe to use from several threads."""

    def __init__(self, make: Callable[[], Worker], size: int) -> None:
        """Starts nothing.

        Args:
            make: returns a new worker.
            size: jobs done at once; others wait.
        """
        self._changed = threading.Condition()  # guards what follows
        self._workers = [make() for _ in range(size)]
        self._idle = list(self._workers)  # the last one runs if any does
        self._is_closed = False

    def start(self, limit_s: float) -> None:
        """Starts one process; `limit_s` bounds the wait for a worker that is not at work.

        Raises:
            WorkerStartError: the process cannot be started.
        """
        worker = self._take(limit_s, needs_running=False)
        try:
            worker.start()
        finally:
            self._give_back(worker)

    def ask(
        self,
        job: dict[str, Any],
        *,
        wait_s: float,
        limit_s: float,
        deadline: float = math.inf,
        may_start: bool = True,
    ) -> dict[str, Any]:
        """Returns the reply of one of the processes to a job.

        Args:
            wait_s: seconds for the wait for a process.
            limit_s: seconds for the job alone.
            deadline: by the monotonic clock, for both together.
            may_start: start a process, which takes tenths of a second, if none is idle and running; else that is a
                WorkerPoolBusyError.

        Raises:
            WorkerPoolBusyError: no process became idle in time.
            WorkerTimeoutError: the job took too long, and its process was killed.
            WorkerEndedError: the process ended in the middle of the job.
            WorkerPoolClosedError: `close` was called.
            WorkerStartError: no process could be started.
            ValueError, RecursionError: JSON cannot express the job; nothing was sent.
        """
        worker = self._take(min(wait_s, deadline - time.monotonic()), needs_running=not may_start)
        try:
            return worker.ask(job, min(max(deadline - time.monotonic(), 0.0), limit_s))
        except (WorkerEndedError, WorkerStartError) as error:
            if self._is_closed:
                raise WorkerPoolClosedError("no more jobs are done") from error
            raise
        finally:
            if may_start and not self._is_closed:
                with suppress(WorkerStartError):  # this job waits for the replacement of a killed process
                    worker.start()
            self._give_back(worker)

    def close(self) -> None:
        """Ends the processes; threads that wait in `ask` get WorkerPoolClosedError. Calling it again does nothing."""
        with self._changed:
            self._is_closed = True
            for worker in self._workers:
                if worker in self._idle:
                    worker.stop()
                else:
                    worker.kill()
            self._changed.notify_all()

    @property
    def process_ids(self) -> list[int]:
        """The ids of the running processes."""
        return [worker.process_id for worker in self._workers if worker.process_id is not None]

    def _take(self, limit_s: float, *, needs_running: bool) -> Worker:
        """Returns an idle worker, a running one if possible; WorkerPoolBusyError when none becomes idle in time."""
        deadline = time.monotonic() + limit_s
        with self._changed:
            while True:
                if self._is_closed:
                    raise WorkerPoolClosedError("no more jobs are done")
                if self._idle and (self._idle[-1].is_running or not needs_running):
                    return self._idle.pop()
                if needs_running or not self._changed.wait(deadline - time.monotonic()):
                    raise WorkerPoolBusyError("no process became idle in time")

    def _give_back(self, worker: Worker) -> None:
        with self._changed:
            if self._is_closed:
                worker.stop()
            self._idle.insert(len(self._idle) if worker.is_running else 0, worker)
            self._changed.notify()

"""Computes the masks of a step's rows in threads while the device works."""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, final

from jaxserve.structured.matcher import Matcher

if TYPE_CHECKING:
    import numpy as np

_MAX_THREADS = 8


@final
class _Job:
    """One mask. It may outlive its batch; a later batch with the same matcher then waits for it too."""

    __slots__ = ("error", "is_done", "matcher", "row", "version", "waiting")

    def __init__(self, matcher: Matcher, row: np.ndarray, batch: MaskBatch) -> None:
        self.matcher = matcher
        self.row = row  # uint32 [ceil(V / 32)]
        self.version = matcher.version
        self.waiting: list[MaskBatch] = [batch]
        self.is_done = False
        self.error: BaseException | None = None


@final
class MaskBatch:
    """The masks of one step."""

    def __init__(self, masks: np.ndarray) -> None:
        self.masks = masks  # uint32 [S, ceil(V / 32)]; a row is valid once `collect` reports it ready
        self.errors: dict[int, BaseException] = {}  # by failed row; filled by `collect`
        self.jobs: list[_Job | None] = []  # by row; None: the row has no grammar
        self.borrowed: list[int] = []  # rows whose mask another row's job computes
        self.num_open = 0
        self.all_done = threading.Event()


@final
class MaskPool:
    """Threads that fill the rows of one array each step.

    llguidance releases the GIL while it computes a mask. A task is one row, so that a slow row delays no other.
    """

    def __init__(self, vocab_size: int, num_threads: int | None = None) -> None:
        """`vocab_size`: columns of the logits. `num_threads`: None for one per core, 2 to 8. Threads start later."""
        self._num_words = -(-vocab_size // 32)
        self._num_threads = num_threads or min(max(os.cpu_count() or 1, 2), _MAX_THREADS)
        self._tasks: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()  # guards num_open, is_done and waiting

    def start(self, matchers: Sequence[Matcher | None]) -> MaskBatch:
        """Returns the batch of the rows' masks, which threads compute; a row without a grammar (None) has all bits set.

        A mask that is still being computed for the same tokens is not started again: the new batch waits for it too.
        `Matcher.accept` waits for a mask that is being computed.
        """
        import numpy as np

        batch = MaskBatch(np.full((len(matchers), self._num_words), 0xFFFFFFFF, np.uint32))
        new: list[_Job] = []
        with self._lock:
            for index, matcher in enumerate(matchers):
                job = None if matcher is None else self._find_job(matcher, batch)
                if job is None and matcher is not None:
                    job = matcher.mask_job = _Job(matcher, batch.masks[index], batch)
                    batch.num_open += 1
                    new.append(job)
                elif job is not None:
                    batch.borrowed.append(index)
                batch.jobs.append(job)
            if batch.num_open == 0:
                batch.all_done.set()
        if new and not self._threads:
            self._start_threads()
        for job in new:
            self._tasks.put(job)
        return batch

    def collect(self, batch: MaskBatch, timeout_s: float | None = None) -> np.ndarray:
        """Waits for a batch, at most `timeout_s` seconds (None: no limit); may be called again.

        Returns:
            bool [S]: whether each row's mask is ready. Other rows failed and have an error in `batch.errors`, or are
            late: collect this batch again, or the next one with their matchers.
        """
        import numpy as np

        batch.all_done.wait(timeout_s)
        ready = np.ones(len(batch.jobs), bool)
        for index, job in enumerate(batch.jobs):
            if job is None:
                continue
            if not job.is_done or job.error is not None:
                ready[index] = False
                if job.is_done and job.error is not None:
                    batch.errors[index] = job.error
        for index in batch.borrowed:
            job = batch.jobs[index]
            if job is not None and ready[index]:
                batch.masks[index] = job.row
        return ready

    def close(self, timeout_s: float = 5.0) -> None:
        """Ends the threads after the masks that were started; waits at most `timeout_s` seconds."""
        for _ in self._threads:
            self._tasks.put(None)
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(deadline - time.monotonic(), 0.0))
        self._threads = []

    def _find_job(self, matcher: Matcher, batch: MaskBatch) -> _Job | None:
        """Returns the matcher's job if it is for the same tokens and did not fail; `batch` then waits for it."""
        job: _Job | None = matcher.mask_job
        if job is None or job.version != matcher.version or job.error is not None:
            return None
        if not job.is_done:
            job.waiting.append(batch)
            batch.num_open += 1
        return job

    def _start_threads(self) -> None:
        for index in range(self._num_threads):
            thread = threading.Thread(target=self._run, name=f"jaxserve-masks-{index}", daemon=True)
            thread.start()
            self._threads.append(thread)

    def _run(self) -> None:
        while (job := self._tasks.get()) is not None:
            try:
                job.matcher.fill_mask(job.row)
            except BaseException as error:  # also a panic in Rust: only this row fails
                job.error = error
            with self._lock:
                job.is_done = True
                for batch in job.waiting:
                    batch.num_open -= 1
                    if batch.num_open == 0:
                        batch.all_done.set()
                job.waiting = []

"""Computes the masks of a step's rows in threads while the device works."""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, final

from jaxserve.features.grammars.matcher import Matcher

if TYPE_CHECKING:
    import numpy as np

_MAX_THREADS = 8
_log = logging.getLogger(__name__)


@final
class _Job:
    """The masks of one row. It may outlive its batch; a later batch with the same matcher then waits for it too."""

    __slots__ = ("drafts", "error", "is_cancelled", "is_done", "lines", "matcher", "num_lines", "version", "waiting")

    def __init__(self, matcher: Matcher, lines: np.ndarray, drafts: Sequence[int], batch: MaskBatch) -> None:
        self.matcher = matcher
        self.lines = lines  # uint32 [w, ceil(V / 32)]
        self.drafts = tuple(drafts)
        self.version = matcher.version
        self.waiting: list[MaskBatch] = [batch]
        self.num_lines = 0  # complete ones, from the first on; they no longer change
        self.is_cancelled = False  # no further line is wanted
        self.is_done = False
        self.error: BaseException | None = None  # of the first line

    def count_line(self, num_lines: int) -> bool:
        """Shows a further complete line; returns whether the next one is wanted."""
        self.num_lines = num_lines
        return not self.is_cancelled


@final
class MaskBatch:
    """The masks of one step: `width` lines for each row, at its state and after each of its drafts."""

    def __init__(self, masks: np.ndarray, width: int) -> None:
        self.masks = masks  # uint32 [S * width, ceil(V / 32)]; a line is valid once `collect` counts it
        self.width = width
        self.errors: dict[int, BaseException] = {}  # by failed row; filled by `collect`
        self.num_lines: list[int] = []  # valid lines by row, from the first on; filled by `collect`
        self.jobs: list[_Job | None] = []  # by row; None: the row has no grammar
        self.borrowed: dict[int, int] = {}  # by row whose masks another batch's job computes: lines that fit its drafts
        self.num_open = 0
        self.all_done = threading.Event()
        self.is_settled = False  # whether every line that is not valid is 0, now and later; filled by `collect`

    def read(self) -> np.ndarray:
        """Returns the lines that `collect` has counted, the others 0: uint32 [S * width, ceil(V / 32)].

        No thread writes to it: it is a copy where lines are still being computed.
        """
        import numpy as np

        if self.is_settled:
            return self.masks
        found = self.masks.copy().reshape(len(self.jobs), self.width, -1)
        found[np.arange(self.width) >= np.asarray(self.num_lines)[:, None]] = 0
        return found.reshape(self.masks.shape)


@final
class MaskPool:
    """Threads that fill the lines of one array each step.

    llguidance releases the GIL while it computes a mask. A task is one row, so that a slow row delays no other. The
    masks along the drafts of a row are a second task, behind the first masks of all rows.
    """

    def __init__(self, vocab_size: int, num_threads: int | None = None) -> None:
        """`vocab_size`: columns of the logits. `num_threads`: None for one per core, 2 to 8. Threads start later."""
        self._num_words = -(-vocab_size // 32)
        self._num_threads = num_threads or min(max(os.cpu_count() or 1, 2), _MAX_THREADS)
        self._tasks: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()  # guards num_open, is_done and waiting

    def start(
        self, matchers: Sequence[Matcher | None], drafts: Sequence[Sequence[int]] = (), width: int = 1
    ) -> MaskBatch:
        """Returns the batch of the rows' masks, which threads compute.

        Line `row * width + i` is the mask of a row after its first i drafts. Lines behind a draft that is not allowed,
        missing or the end of the text are 0 (`Matcher.fill_along`). A row without a grammar (None) has all bits set.

        Masks that are still being computed for the same tokens are not started again: the new batch waits for them
        too, and has as many lines as fit both its drafts and theirs. `Matcher.accept` waits for a mask that is being
        computed.

        Args:
            drafts: at most width - 1 ids for each row, which end below zero; (): none.
            width: lines of each row.
        """
        import numpy as np

        masks = np.zeros((len(matchers), width, self._num_words), np.uint32)
        if free := [index for index, matcher in enumerate(matchers) if matcher is None]:
            masks[free] = 0xFFFFFFFF
        batch = MaskBatch(masks.reshape(-1, self._num_words), width)
        new: list[_Job] = []
        with self._lock:
            for index, matcher in enumerate(matchers):
                job = None
                if matcher is not None:
                    own = drafts[index] if drafts else ()
                    job = self._find_job(matcher, own, index, batch)
                    if job is None:
                        job = self._make_job(matcher, masks[index], own, batch)
                        new.append(job)
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

        A row whose first line is ready gets no more lines than it has by now, so that its matcher is soon free.

        Returns:
            bool [S]: whether each row's first line is ready. Other rows failed and have an error in `batch.errors`, or
            are late: collect this batch again, or the next one with their matchers.
        """
        import numpy as np

        batch.all_done.wait(timeout_s)
        width, batch.num_lines, batch.is_settled = batch.width, [], True
        for index, job in enumerate(batch.jobs):
            if job is None:
                batch.num_lines.append(width)
                continue
            is_done = job.is_done  # read before the lines that it covers
            count = job.num_lines
            if not is_done:
                job.is_cancelled = count > 0
                batch.is_settled = False
            elif job.error is not None:
                batch.errors[index] = job.error
                batch.is_settled = False
            if index in batch.borrowed:
                count = min(count, batch.borrowed[index])
                batch.masks[index * width : index * width + count] = job.lines[:count]
            batch.num_lines.append(count)
        return np.asarray(batch.num_lines, np.int64) > 0

    def close(self, timeout_s: float = 5.0) -> None:
        """Ends the threads after the first masks of the rows that were started; waits at most `timeout_s` seconds."""
        for _ in self._threads:
            self._tasks.put(None)
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(deadline - time.monotonic(), 0.0))
        self._threads = []
        with contextlib.suppress(queue.Empty):
            while True:  # walks that were put behind the end
                job = self._tasks.get_nowait()
                if job is not None:
                    self._finish(job)

    def _find_job(self, matcher: Matcher, drafts: Sequence[int], index: int, batch: MaskBatch) -> _Job | None:
        """Returns the matcher's job if it makes masks that the row needs; `batch` then waits for it."""
        job: _Job | None = matcher.mask_job
        if job is None or job.version != matcher.version or job.error is not None:
            return None
        pairs = enumerate(zip(drafts, job.drafts, strict=False))
        num_common = next((at for at, (mine, other) in pairs if mine != other), min(len(drafts), len(job.drafts)))
        if job.is_done and num_common < len(drafts):
            return None  # it is for other drafts
        batch.borrowed[index] = num_common + 1
        if not job.is_done:
            job.waiting.append(batch)
            batch.num_open += 1
        return job

    def _make_job(self, matcher: Matcher, lines: np.ndarray, drafts: Sequence[int], batch: MaskBatch) -> _Job:
        """Returns a new job. It takes the first mask of the one before, if that is for the same tokens."""
        before: _Job | None = matcher.mask_job
        job = matcher.mask_job = _Job(matcher, lines, drafts, batch)
        if before is not None and before.is_done and before.error is None and before.version == job.version:
            lines[0] = before.lines[0]
            job.num_lines = 1
        batch.num_open += 1
        return job

    def _start_threads(self) -> None:
        for index in range(self._num_threads):
            thread = threading.Thread(target=self._run, name=f"jaxserve-masks-{index}", daemon=True)
            thread.start()
            self._threads.append(thread)

    def _run(self) -> None:
        while (job := self._tasks.get()) is not None:
            if job.num_lines == 0:
                try:
                    job.matcher.fill_mask(job.lines[0])
                    job.num_lines = 1
                except BaseException as error:  # also a panic in Rust: only this row fails
                    job.error = error
                if job.error is None and job.drafts and not self._tasks.empty():
                    self._tasks.put(job)  # the first masks of other rows come before its walk
                    continue
            if job.error is None and job.drafts and not job.is_cancelled:
                try:
                    job.matcher.fill_along(job.drafts, job.lines, job.version, job.count_line)
                except BaseException:  # costs lines only: if the matcher cannot go on, the row's next mask says so
                    job.lines[job.num_lines :] = 0
                    _log.exception("the masks along a row's drafts ended with a fault")
            self._finish(job)

    def _finish(self, job: _Job) -> None:
        with self._lock:
            job.is_done = True
            for batch in job.waiting:
                batch.num_open -= 1
                if batch.num_open == 0:
                    batch.all_done.set()
            job.waiting = []

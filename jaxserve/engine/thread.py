"""The thread that runs an engine; no other thread may use it."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import queue
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from jaxserve.engine.engine import Engine
from jaxserve.engine.inbox import Item, OutputInbox
from jaxserve.errors import EngineStoppedError, JaxServeError
from jaxserve.request import Request, RequestOutput

_JOBS_BETWEEN_STEPS = 64


class EngineThread:
    """Runs an engine. Other threads queue jobs for it; the outputs of a step reach each event loop in one call.

    Args:
        on_stop: called on this thread when the engine itself fails.
    """

    def __init__(self, engine: Engine, on_stop: Callable[[EngineStoppedError], None] | None = None) -> None:
        self._engine = engine
        self._on_stop = on_stop
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._inboxes: dict[str, OutputInbox] = {}
        self._stopped: EngineStoppedError | None = None
        self._has_ended = False  # the thread takes no more jobs; `_put` then runs them itself
        self._last_step = time.monotonic()  # when a step last ended, or a job reached the idle engine
        self._thread = threading.Thread(target=self._turn, name="jaxserve-engine", daemon=True)
        self._thread.start()

    @property
    def stopped(self) -> EngineStoppedError | None:
        """Why the engine has stopped; None while it serves."""
        return self._stopped

    def stalled_seconds(self) -> float:
        """Returns the seconds since the engine last finished a step; 0 without unfinished requests."""
        return time.monotonic() - self._last_step if self._engine.has_unfinished else 0.0

    def submit(self, requests: Sequence[Request], inbox: OutputInbox, *, beyond_limits: bool = False) -> None:
        """Adds requests together: if one is refused, none runs. The inbox gets their outputs, or the error.

        Args:
            beyond_limits: ignore the limits of the queue.
        """
        self._put(lambda: self._add(requests, inbox, beyond_limits))

    def abort(self, request_ids: Sequence[str]) -> None:
        """Ends requests; each gets a last output with finish_reason "abort". Unknown ids are ignored."""
        self._put(lambda: self._abort(request_ids))

    def leave(self, request_ids: Sequence[str], inbox: OutputInbox) -> None:
        """Ends an abandoned inbox's requests. Requests of other inboxes that reuse the ids go on."""

        def abort_own() -> None:
            self._abort([name for name in request_ids if self._inboxes.get(name) is inbox])

        self._put(abort_own)

    def call(self, function: Callable[[Engine], Any]) -> Future[Any]:
        """Runs a function on the engine's thread between two steps; returns a future of its result.

        A future that is cancelled in time prevents the call; a stopped engine sets EngineStoppedError.
        """
        future: Future[Any] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                if self._stopped is not None:
                    raise self._stopped
                future.set_result(function(self._engine))
            except BaseException as error:  # a panic in a Rust library is no Exception
                future.set_exception(error)

        self._put(run)
        return future

    def advance(self, function: Callable[[Engine], Sequence[RequestOutput]]) -> Future[None]:
        """Like `call`, for a function that returns outputs, which go to their inboxes."""
        return self.call(lambda engine: self._hand_out(function(engine)))

    def give_up(self, error: JaxServeError) -> None:
        """Stops with an error, on the caller's thread: the engine's may never return from a step."""
        self._has_ended = True
        self._stop_serving(error)
        self._answer_left()

    def shutdown(self) -> None:
        """Aborts all requests and ends the thread. Further calls do nothing."""
        self._jobs.put(None)
        self._thread.join()

    def _put(self, job: Callable[[], None]) -> None:
        self._jobs.put(job)
        if self._has_ended:
            self._answer_left()

    def _answer_left(self) -> None:
        """Runs the remaining jobs, on any thread, once the engine has stopped: each then reports that."""
        with contextlib.suppress(queue.Empty):
            while True:
                if (job := self._jobs.get_nowait()) is not None:
                    job()

    # Everything below runs on the engine's thread; jobs run on any thread once the engine has stopped.

    def _turn(self) -> None:
        try:
            self._serve()
            self._stopped = self._stopped or EngineStoppedError("the engine was shut down")
        except BaseException as error:  # panics in Rust too: this thread must not end unnoticed
            if self._stopped is None:  # otherwise another thread gave up before
                self._stop_serving(error)
        finally:
            self._has_ended = True
            self._answer_left()

    def _serve(self) -> None:
        engine = self._engine
        while self._do_jobs():
            if engine.has_unfinished:
                outputs = engine.step()
                self._last_step = time.monotonic()
                self._hand_out(outputs)
        self._abort(list(self._inboxes))
        engine.drain()

    def _do_jobs(self) -> bool:
        """Runs queued jobs, and waits for one if the engine is idle; returns False at shutdown.

        The number of jobs between two steps is bounded, so that many jobs cannot hold up the tokens of others.
        """
        engine, jobs = self._engine, self._jobs
        for _ in range(_JOBS_BETWEEN_STEPS):
            is_idle = not engine.has_unfinished
            try:
                job = jobs.get(block=is_idle)
            except queue.Empty:
                break
            if job is None:
                return False
            if is_idle:
                self._last_step = time.monotonic()
            job()
        return True

    def _stop_serving(self, error: BaseException) -> None:
        """Records a failure of the engine, calls `on_stop`, and delivers the error to every inbox."""
        self._stopped = _explain(error)
        inboxes = set(self._inboxes.copy().values())  # one operation: another thread may give up
        self._inboxes.clear()
        try:
            if self._on_stop is not None:
                self._on_stop(self._stopped)
        finally:
            self._deliver([(inbox, self._stopped) for inbox in inboxes])

    def _add(self, requests: Sequence[Request], inbox: OutputInbox, beyond_limits: bool) -> None:
        if self._stopped is not None:
            self._deliver([(inbox, self._stopped)])
            return
        added: list[str] = []
        try:
            displaced = [] if beyond_limits else self._engine.scheduler.queue_admission.find_room(requests)
            for request in requests:
                self._engine.add_request(request)
                added.append(request.request_id)
        except JaxServeError as error:
            for request_id in added:
                self._engine.abort_request(request_id)
            self._deliver([(inbox, error)])
        except BaseException as error:  # the engine failed; `_turn` tells the other inboxes
            self._deliver([(inbox, _explain(error))])
            raise
        else:
            self._inboxes.update(dict.fromkeys(added, inbox))
            self._hand_out(self._engine.displace(displaced))

    def _abort(self, request_ids: Sequence[str]) -> None:
        if self._stopped is None:
            outputs = [self._engine.abort_request(request_id) for request_id in request_ids]
            self._hand_out([output for output in outputs if output is not None])

    def _hand_out(self, outputs: Sequence[RequestOutput]) -> None:
        inboxes = self._inboxes
        self._deliver(
            [
                (inboxes.pop(output.request_id) if output.finished else inboxes[output.request_id], output)
                for output in outputs
            ]
        )

    def _deliver(self, items: Sequence[tuple[OutputInbox, Item]]) -> None:
        by_loop: defaultdict[asyncio.AbstractEventLoop, list[tuple[OutputInbox, Item]]] = defaultdict(list)
        for item in items:
            by_loop[item[0].loop].append(item)
        for loop, those in by_loop.items():
            try:
                loop.call_soon_threadsafe(_put_all, those)
            except RuntimeError:  # the event loop is closed: its requests have no reader
                for request_id in [name for name, inbox in self._inboxes.items() if inbox.loop is loop]:
                    del self._inboxes[request_id]
                    self._engine.abort_request(request_id)


def _explain(error: BaseException) -> EngineStoppedError:
    stopped = EngineStoppedError(f"the engine stopped: {error!r}")
    stopped.__cause__ = error
    return stopped


def _put_all(items: Sequence[tuple[OutputInbox, Item]]) -> None:
    for inbox, item in items:
        inbox.put(item)


def tune_garbage_collector() -> None:
    """Excludes the objects of startup from later collections, and collects less often. For a process that serves.

    Each collection also runs a callback of JAX. With 256 streams that took 38 % of the engine thread's time.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)

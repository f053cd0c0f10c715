"""Threads that make engine requests of bodies, and killable processes that render their chat templates."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any

from jaxserve.server.errors import ApiError
from jaxserve.tokenizers.renderer import MAX_PROCESSES, RenderTimeoutError, TemplateRenderer
from jaxserve.workers import WorkerPoolClosedError

_NUM_THREADS = 4  # they render templates and tokenize
_RETRY_AFTER = 1  # seconds; what holds the threads ends within the time limit
_LOOP_S = 0.1  # the event loop's limit for a template, which usually takes a fraction of a millisecond
_QUICK_S = 0.5  # the quick lane's limit for a template
_SLOW_S = 60.0  # after one that exceeded the event loop's limit, all are rendered in threads for this time
_here = threading.local()  # `lane`: the lane that this thread belongs to


class _Lane:
    """Threads, and the processes that render their templates."""

    def __init__(self, name: str, num_threads: int, limit_s: float, render_s: float | None) -> None:
        """Starts nothing. `limit_s` bounds the processes; `render_s` is a lower limit for each template."""
        self.renderer = TemplateRenderer(time_limit_s=limit_s)
        self.render = partial(self.renderer.render, limit_s=render_s)
        self.threads = ThreadPoolExecutor(num_threads, name, lambda: setattr(_here, "lane", self))
        self.turns = asyncio.Semaphore(num_threads)  # one for each thread


class Preparation:
    """Threads and processes in two lanes, a quick and a slow one.

    A template may use all of its time, and other requests must not wait for it. So the quick lane soon gives it up, and
    the slow lane renders it from the beginning. Templates that requests bring start in the slow lane.
    """

    def __init__(self, time_limit_s: float) -> None:
        """Starts nothing. `time_limit_s` bounds the template and the texts of one request, without waits."""
        self._time_limit_s = time_limit_s
        self._quick = _Lane("jaxserve-prepare", _NUM_THREADS, time_limit_s, min(_QUICK_S, time_limit_s))
        self._slow = _Lane("jaxserve-template", MAX_PROCESSES, time_limit_s, None)
        self._running: set[Future[Any]] = set()
        self._slow_until = 0.0

    def start(self, template: str) -> None:
        """Starts a process for the model's template; WorkerStartError when it cannot be started."""
        self._quick.renderer.start(template)

    def close(self) -> None:
        """Ends the processes. Work that needs one ends with an ApiError 503."""
        for lane in (self._quick, self._slow):
            lane.renderer.close()

    @property
    def is_busy(self) -> bool:
        """Whether a thread is working; Python's normal exit would wait for it."""
        return bool(self._running)

    def choose_renderer(self) -> Callable[..., str]:
        """Returns the replacement of `render_template` for the calling thread: a lane's, or the event loop's.

        It raises RenderTimeoutError where another lane should try; `run` and `run_quickly` handle that.
        """
        lane: _Lane | None = getattr(_here, "lane", None)
        if lane is not None:
            return lane.render
        return partial(self._quick.renderer.render, limit_s=_LOOP_S, may_start=False)

    async def run(
        self,
        function: Callable[..., Any],
        *args: Any,
        brings_template: bool = False,
        longest_wait: float | None = None,
    ) -> Any:
        """Runs a function in a thread.

        Args:
            brings_template: the request has its own template.
            longest_wait: seconds that it may wait for a thread; None: no limit.

        Raises:
            ApiError: 400 when it takes too long itself, 429 when others keep it waiting, 503 at shutdown.
        """
        try:
            if not brings_template:
                with suppress(RenderTimeoutError):
                    return await self._submit(self._quick, longest_wait, function, *args)
            return await self._submit(self._slow, longest_wait, function, *args)
        except (TimeoutError, RenderTimeoutError):
            seconds = f"{self._time_limit_s:g} s"
            message = f"Preparing this request took more than {seconds}: a template or text is too large."
            raise ApiError(400, message, code="preparation_timeout") from None
        except WorkerPoolClosedError:
            raise ApiError(503, "The server is shutting down.", code="server_draining") from None

    async def _submit(self, lane: _Lane, longest_wait: float | None, function: Callable[..., Any], *args: Any) -> Any:
        """Waits for a thread of a lane, and then, up to the time limit, for the function."""
        try:
            async with asyncio.timeout(longest_wait):
                await lane.turns.acquire()
        except TimeoutError:
            message = "Other requests with long templates or texts are being prepared; try again."
            headers = {"Retry-After": str(_RETRY_AFTER)}
            raise ApiError(429, message, code="preparation_busy", headers=headers) from None
        working = asyncio.ensure_future(self._work(lane, function, *args))
        try:
            async with asyncio.timeout(self._time_limit_s):
                return await asyncio.shield(working)
        finally:
            del working  # an error that it has would lead back to itself, and hold the body until garbage is collected

    async def _work(self, lane: _Lane, function: Callable[..., Any], *args: Any) -> Any:
        """Runs a function in a thread, which is taken until it returns, whoever still waits for it."""
        future = lane.threads.submit(function, *args)
        self._running.add(future)
        future.add_done_callback(self._running.discard)
        try:
            return await asyncio.wrap_future(future)
        finally:
            lane.turns.release()
            del future  # as in `_submit`

    async def run_quickly(self, function: Callable[..., Any], *args: Any, longest_wait: float | None = None) -> Any:
        """Runs a short function on the event loop: a thread would first wait for the GIL.

        If its template takes long after all, the function runs again in a thread, as by `run`.
        """
        if time.monotonic() >= self._slow_until:
            try:
                return function(*args)
            except RenderTimeoutError:
                self._slow_until = time.monotonic() + _SLOW_S
            except WorkerPoolClosedError:
                pass  # `run` answers it
        return await self.run(function, *args, longest_wait=longest_wait)

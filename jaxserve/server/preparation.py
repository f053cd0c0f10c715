"""Where bodies become what the engine takes: in threads, with chat templates in processes that can be killed."""

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
from jaxserve.tokenizers.renderer import MAX_PROCESSES, RendererClosedError, RenderTimeoutError, TemplateRenderer

_NUM_THREADS = 4  # that render templates, tokenize and compile grammars
_LOOP_S = 0.1  # that the event loop waits for a template, which takes a fraction of a millisecond
_QUICK_S = 0.5  # that a thread of the quick lane waits for one
_SLOW_S = 60.0  # after a template that took longer, all are rendered in threads for so long
_here = threading.local()  # `lane`: that of this thread


class _Lane:
    """Threads, and processes for their templates."""

    def __init__(self, name: str, num_threads: int, limit_s: float, render_s: float | None) -> None:
        """Starts nothing. `limit_s`: of the processes; `render_s`: less than that for each template."""
        self.renderer = TemplateRenderer(time_limit_s=limit_s)
        self.render = partial(self.renderer.render, limit_s=render_s)
        self.threads = ThreadPoolExecutor(num_threads, name, lambda: setattr(_here, "lane", self))


class Preparation:
    """Threads and processes in two lanes: one for what is quick, and one for what proves not to be.

    A template may run until its time is over, and nobody else should wait for that. So the quick lane gives it up after
    a moment, and the slow one renders it from the beginning. Templates that requests bring are there from the start.
    """

    def __init__(self, time_limit_s: float) -> None:
        """Starts nothing. `time_limit_s`: for templates, tokenizing and grammars of one request."""
        self._time_limit_s = time_limit_s
        self._quick = _Lane("jaxserve-prepare", _NUM_THREADS, time_limit_s, min(_QUICK_S, time_limit_s))
        self._slow = _Lane("jaxserve-template", MAX_PROCESSES, time_limit_s, None)
        self._running: set[Future[Any]] = set()
        self._slow_until = 0.0

    def start(self, template: str) -> None:
        """Starts a process for the model's template; WorkerStartError when it cannot be started."""
        self._quick.renderer.start(template)

    def close(self) -> None:
        """Ends the processes; what needs one ends with an ApiError 503."""
        for lane in (self._quick, self._slow):
            lane.renderer.close()

    @property
    def is_busy(self) -> bool:
        """Whether a thread is at work, for which Python's exit would wait."""
        return bool(self._running)

    def choose_renderer(self) -> Callable[..., str]:
        """Returns what renders in place of `render_template` here: in a thread of a lane, or on the event loop.

        It raises RenderTimeoutError where another place should try: `run` and `run_quickly` see to that.
        """
        lane: _Lane | None = getattr(_here, "lane", None)
        if lane is not None:
            return lane.render
        return partial(self._quick.renderer.render, limit_s=_LOOP_S, may_start=False)

    async def run(self, function: Callable[..., Any], *args: Any, brings_template: bool = False) -> Any:
        """Runs in a thread what would hold up the event loop; ApiError 400 when it takes too long.

        Args:
            brings_template: a template of the request's own is to be rendered.
        """
        try:
            async with asyncio.timeout(self._time_limit_s):
                if not brings_template:
                    with suppress(RenderTimeoutError):
                        return await self._submit(self._quick, function, *args)
                return await self._submit(self._slow, function, *args)
        except (TimeoutError, RenderTimeoutError):
            seconds = f"{self._time_limit_s:g} s"
            message = f"Preparing this request took more than {seconds}: a template, text or grammar is too large."
            raise ApiError(400, message, code="preparation_timeout") from None
        except RendererClosedError:
            raise ApiError(503, "The server is shutting down.", code="server_draining") from None

    async def _submit(self, lane: _Lane, function: Callable[..., Any], *args: Any) -> Any:
        future = lane.threads.submit(function, *args)
        self._running.add(future)
        future.add_done_callback(self._running.discard)
        return await asyncio.wrap_future(future)

    async def run_quickly(self, function: Callable[..., Any], *args: Any) -> Any:
        """Runs here what takes a fraction of a millisecond: a thread would wait for the GIL to begin.

        A template that takes long after all is killed, and the function runs once more, in a thread.
        """
        if time.monotonic() >= self._slow_until:
            try:
                return function(*args)
            except RenderTimeoutError:
                self._slow_until = time.monotonic() + _SLOW_S
            except RendererClosedError:
                pass  # said by `run`
        return await self.run(function, *args)

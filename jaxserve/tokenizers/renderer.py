"""Renders chat templates of untrusted conversations in processes that can be killed.

The cost of a template depends on the messages, so no check beforehand can prove it harmless, the model's own no more
than one that a request brings.
"""

from __future__ import annotations

import atexit
import functools
import os
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, final

from jaxserve.errors import InvalidRequestError, JaxServeError, TokenizerError, shorten
from jaxserve.tokenizers.template import read_reply
from jaxserve.workers import Worker, WorkerEndedError, WorkerStartError, WorkerTimeoutError

MEMORY_BYTES = 256 << 20  # address space beyond what a process needs at rest; the longest text takes 150 MiB
MAX_PROCESSES = 2
_PROGRAM = Path(__file__).with_name("template.py")
_LIMIT_S = 30.0  # of `render_apart`


class RenderTimeoutError(InvalidRequestError):
    """The template took too long on these messages."""


class RendererClosedError(JaxServeError, RuntimeError):
    """The renderer was closed."""


@final
class TemplateRenderer:
    """A few processes that render templates, started on demand. Safe to use from several threads."""

    def __init__(self, *, time_limit_s: float, max_processes: int = MAX_PROCESSES) -> None:
        """Starts nothing.

        Args:
            time_limit_s: seconds for one conversation, including the wait for a process.
            max_processes: conversations rendered at once; others wait.
        """
        self._time_limit_s = time_limit_s
        self._templates: Sequence[str] = ()
        self._changed = threading.Condition()  # guards what follows
        self._workers = [self._make_worker() for _ in range(max_processes)]
        self._idle = list(self._workers)  # the last one runs if any does
        self._is_closed = False

    def start(self, template: str) -> None:
        """Starts one process; it and all later ones compile `template`.

        Raises:
            WorkerStartError: the process cannot be started.
        """
        self._templates = (template,)
        worker = self._take(time.monotonic() + self._time_limit_s, needs_running=False)
        try:
            worker.start()
        finally:
            self._give_back(worker)

    def render(
        self,
        template: str,
        messages: list[dict[str, Any]],
        variables: Mapping[str, Any],
        *,
        tools: list[dict[str, Any]] | None = None,
        must_read: Sequence[str] = (),
        limit_s: float | None = None,
        may_start: bool = True,
    ) -> str:
        """Returns the text of `render_template`.

        Args:
            limit_s: seconds for the template alone, without the wait for a process; default: the renderer's limit.
            may_start: start a process, which takes tenths of a second, if none is idle and running; else that is a
                RenderTimeoutError.

        Raises:
            InvalidRequestError, TokenizerError: as `render_template` raises them; TokenizerError also when the template
                takes too much memory.
            RenderTimeoutError: the template took too long.
            RendererClosedError: `close` was called.
            WorkerStartError: no process could be started.
        """
        deadline = time.monotonic() + self._time_limit_s
        job = {"template": template, "messages": messages, "variables": variables, "tools": tools}
        job["must_read"] = must_read
        worker = self._take(deadline, needs_running=not may_start)
        limit = min(max(deadline - time.monotonic(), 0.0), self._time_limit_s if limit_s is None else limit_s)
        try:
            reply = worker.ask(job, limit)
        except WorkerTimeoutError as error:
            raise _make_timeout(limit) from error
        except (WorkerEndedError, WorkerStartError) as error:
            if self._is_closed:
                raise RendererClosedError("templates are no longer rendered") from error
            if isinstance(error, WorkerStartError):
                raise
            message = f"the template takes more than {MEMORY_BYTES >> 20} MiB or crashes on these messages"
            raise TokenizerError(message, field="chat_template") from error
        except (ValueError, RecursionError) as error:
            message = f"cannot be given to a chat template: {shorten(str(error))}"
            raise InvalidRequestError(message, field="messages") from error
        finally:
            if may_start and not self._is_closed:
                with suppress(WorkerStartError):  # this conversation waits for the replacement of a killed process
                    worker.start()
            self._give_back(worker)
        return read_reply(reply)

    def close(self) -> None:
        """Ends the processes; threads that wait for a text get RendererClosedError. Calling it again does nothing."""
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

    def _make_worker(self) -> Worker:
        return Worker(
            _PROGRAM,
            lambda: {"templates": self._templates},
            name="the renderer of chat templates",
            time_limit_s=self._time_limit_s,
            memory_bytes=MEMORY_BYTES,
        )

    def _take(self, deadline: float, *, needs_running: bool) -> Worker:
        """Returns an idle worker, a running one if possible; RenderTimeoutError when none becomes idle in time."""
        with self._changed:
            while True:
                if self._is_closed:
                    raise RendererClosedError("templates are no longer rendered")
                if self._idle and (self._idle[-1].is_running or not needs_running):
                    return self._idle.pop()
                if needs_running or not self._changed.wait(deadline - time.monotonic()):
                    raise _make_timeout(self._time_limit_s)

    def _give_back(self, worker: Worker) -> None:
        with self._changed:
            if self._is_closed:
                worker.stop()
            self._idle.insert(len(self._idle) if worker.is_running else 0, worker)
            self._changed.notify()


def _make_timeout(limit_s: float) -> RenderTimeoutError:
    return RenderTimeoutError(f"takes more than {limit_s:.2g} s on these messages", field="chat_template")


def render_apart(
    template: str,
    messages: list[dict[str, Any]],
    variables: Mapping[str, Any],
    *,
    tools: list[dict[str, Any]] | None = None,
    must_read: Sequence[str] = (),
) -> str:
    """Returns the text of `render_template`, made by processes that all callers share.

    Raises:
        InvalidRequestError, TokenizerError, WorkerStartError: as `TemplateRenderer.render`; after 30 s it is a
            RenderTimeoutError.
    """
    return _get_shared().render(template, messages, variables, tools=tools, must_read=must_read)


@functools.cache
def _get_shared() -> TemplateRenderer:
    renderer = TemplateRenderer(time_limit_s=_LIMIT_S)
    atexit.register(renderer.close)
    os.register_at_fork(after_in_child=_get_shared.cache_clear)  # a child would read its parent's replies
    return renderer

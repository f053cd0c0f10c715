"""Renders chat templates of untrusted conversations in processes that can be killed.

The cost of a template depends on the messages, so no check beforehand can prove it harmless, the model's own no more
than one that a request brings.
"""

from __future__ import annotations

import atexit
import functools
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, final

from jaxserve.errors import InvalidRequestError, TokenizerError, shorten
from jaxserve.tokenizers.template import read_reply
from jaxserve.workers import Worker, WorkerEndedError, WorkerPool, WorkerTimeoutError

MEMORY_BYTES = 256 << 20  # address space beyond what a process needs at rest; the longest text takes 150 MiB
MAX_PROCESSES = 2
_PROGRAM = Path(__file__).with_name("template.py")
_LIMIT_S = 30.0  # of `render_apart`


class RenderTimeoutError(InvalidRequestError):
    """The template took too long on these messages."""


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
        self._pool = WorkerPool(self._make_worker, max_processes)

    def start(self, template: str) -> None:
        """Starts one process; it and all later ones compile `template`.

        Raises:
            WorkerStartError: the process cannot be started.
        """
        self._templates = (template,)
        self._pool.start(self._time_limit_s)

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
            WorkerPoolClosedError: `close` was called.
            WorkerStartError: no process could be started.
        """
        deadline = time.monotonic() + self._time_limit_s
        job = {"template": template, "messages": messages, "variables": variables, "tools": tools}
        job["must_read"] = must_read
        limit = self._time_limit_s if limit_s is None else limit_s
        try:
            reply = self._pool.ask(
                job, wait_s=self._time_limit_s, limit_s=limit, deadline=deadline, may_start=may_start
            )
        except WorkerTimeoutError as error:
            message = f"takes more than {limit:.2g} s on these messages"
            raise RenderTimeoutError(message, field="chat_template") from error
        except WorkerEndedError as error:
            message = f"the template takes more than {MEMORY_BYTES >> 20} MiB or crashes on these messages"
            raise TokenizerError(message, field="chat_template") from error
        except (ValueError, RecursionError) as error:
            message = f"cannot be given to a chat template: {shorten(str(error))}"
            raise InvalidRequestError(message, field="messages") from error
        return read_reply(reply)

    def close(self) -> None:
        """Ends the processes; threads that wait for a text get WorkerPoolClosedError. A second call does nothing."""
        self._pool.close()

    @property
    def process_ids(self) -> list[int]:
        """The ids of the running processes."""
        return self._pool.process_ids

    def _make_worker(self) -> Worker:
        return Worker(
            _PROGRAM,
            lambda: {"templates": self._templates},
            name="the renderer of chat templates",
            time_limit_s=self._time_limit_s,
            memory_bytes=MEMORY_BYTES,
        )


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

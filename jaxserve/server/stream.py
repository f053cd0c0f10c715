"""Streamed answers: server-sent events for readers that may be slow or leave."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from jaxserve.request import Request as EngineRequest
from jaxserve.server.errors import ApiError, to_api_error
from jaxserve.server.generation import echo_tier
from jaxserve.server.json_text import to_json
from jaxserve.server.protocol.fields import SamplingFields
from jaxserve.server.request_context import get_context
from jaxserve.server.server_state import ServerState

_log = logging.getLogger(__name__)
DONE = b"data: [DONE]\n\n"
PING_SECONDS = 10.0  # without a piece, before a protocol that has pings sends one
_HEADERS = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache", "x-accel-buffering": "no"}


def encode_event(value: Any, name: str | None = None) -> bytes:
    """Returns one server-sent event with a JSON value."""
    head = f"event: {name}\n" if name is not None else ""
    return f"{head}data: {to_json(value)}\n\n".encode()


def render_error(error: ApiError) -> bytes:
    """Returns the event that ends a failed stream."""
    return encode_event(error.body)


class ChunkWriter:
    """Writes the chunks of one stream. Their common head and tail are encoded once; `values` are the head's."""

    def __init__(self, head: Mapping[str, Any], *, shows_usage: bool) -> None:
        self.values, self._shows_usage = head, shows_usage
        self.head = f'data: {to_json(head)[:-1]},"choices":['
        self.tail = '],"usage":null}\n\n' if shows_usage else "]}\n\n"

    def write(self, choice: Mapping[str, Any], usage: Mapping[str, Any] | None = None) -> bytes:
        """Returns a chunk with one choice, and with the usage so far if given."""
        tail = self.tail if usage is None else f'],"usage":{to_json(usage)}}}\n\n'
        return f"{self.head}{to_json(choice)}{tail}".encode()

    def end(self, usage: Mapping[str, Any], more: Mapping[str, Any]) -> Sequence[bytes]:
        """Returns the chunks behind the last choice's end: `write_usage`, if usage is shown."""
        return [self.write_usage(usage, more)] if self._shows_usage else []

    def write_usage(self, usage: Mapping[str, Any], more: Mapping[str, Any] = MappingProxyType({})) -> bytes:
        """Returns the last chunk, without choices; `more` are further keys of it."""
        return encode_event({**self.values, "choices": [], "usage": usage, **more})


def make_chunk_writer(
    body: SamplingFields, model: str, state: ServerState, request: EngineRequest, *, prefix: str, kind: str
) -> ChunkWriter:
    """Returns the writer of a completion or a chat completion; `prefix` begins its id, and `kind` is its `object`."""
    head = {
        "id": f"{prefix}-{getattr(body, 'request_id', None) or request.request_id.partition('-')[0]}",
        "object": kind,
        "created": int(time.time()),
        "model": model,
        "system_fingerprint": state.fingerprint,
        **echo_tier(body, request),
    }
    return ChunkWriter(head, shows_usage=body.wants_usage or state.config.serving.enable_force_include_usage)


class EventStream(Response):
    """Sends pieces as they come; stops when the client leaves, or when its connection is dropped as it does not read.

    Nothing is queued here: while a client does not read, its outputs are merged in the engine's inbox. An error after
    the first piece becomes an event.
    """

    def __init__(
        self,
        pieces: AsyncGenerator[bytes],
        state: ServerState,
        *,
        end: bytes = DONE,
        render_error: Callable[[ApiError], bytes] = render_error,
        ping: Callable[[], bytes] | None = None,
        counts_leaving: bool = True,
    ) -> None:
        """Sends nothing yet.

        Args:
            ping: makes a piece to send while nothing comes.
            counts_leaving: a client that leaves has aborted a request.
        """
        super().__init__(None, 200, _HEADERS)
        self._counts_leaving = counts_leaving
        self._pieces, self._state, self._end, self._render_error = pieces, state, end, render_error
        self._ping, self._last_sent = ping, 0.0
        del self.headers["content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        context = get_context(scope)
        if context.wants_head:
            await self._pieces.aclose()
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await send({"type": "http.response.body"})
            return
        sending = asyncio.ensure_future(self._send_all(send, context.send or send))
        leaving = asyncio.ensure_future(_wait_for_leave(receive))
        try:
            await asyncio.wait((sending, leaving), return_when=asyncio.FIRST_COMPLETED)
            if context.was_unread:
                self._state.metrics.count("slow_readers")
                limit = self._state.config.limits.slow_reader_timeout
                _log.warning("a stream was not read for %g s and is aborted", limit)
            elif self._counts_leaving and (context.has_left or not sending.done()):
                self._state.metrics.count("client_disconnects")
        finally:
            leaving.cancel()
            sending.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await sending

    async def _send_all(self, send: Send, send_piece: Send) -> None:
        """Sends head, pieces and end. Pieces skip the access log, which only needs the head and the end."""
        end, pinging = self._end, None
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            if self._ping is not None:
                pinging = asyncio.ensure_future(self._send_pings(self._ping, send_piece))
            async for piece in self._pieces:
                self._last_sent = time.monotonic()
                await send_piece({"type": "http.response.body", "body": piece, "more_body": True})
        except Exception as error:
            end = self._render_error(to_api_error(error)) + end
        finally:
            if pinging is not None:
                pinging.cancel()
            await self._pieces.aclose()
        await send({"type": "http.response.body", "body": end, "more_body": False})

    async def _send_pings(self, ping: Callable[[], bytes], send_piece: Send) -> None:
        """Sends a ping whenever nothing was sent for PING_SECONDS, and at once where nothing has come for the head."""
        while True:
            await asyncio.sleep(max(0.0, self._last_sent + PING_SECONDS - time.monotonic()))
            if time.monotonic() >= self._last_sent + PING_SECONDS:
                self._last_sent = time.monotonic()
                await send_piece({"type": "http.response.body", "body": ping(), "more_body": True})


async def run_while_connected[T](request: Request, work: Coroutine[Any, Any, T], state: ServerState) -> T:
    """Returns the result of `work`, which is cancelled when the client leaves.

    Raises:
        ApiError: 499 when the client has left, for the log.
    """
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_wait_for_leave(request.receive))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            state.metrics.count("client_disconnects")
            raise ApiError(499, "The client has gone.", code="client_gone")
        return working.result()
    finally:
        leaving.cancel()
        if not working.done():
            working.cancel()
            await asyncio.wait((working,))


async def _wait_for_leave(receive: Receive) -> None:
    """Returns when the client has left. The body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass

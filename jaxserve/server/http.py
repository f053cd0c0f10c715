"""HTTP connections with bounded headers and timeouts for silent clients."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import secrets
import socket
from functools import partial
from http import HTTPStatus
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from jaxserve.server.connections import ConnectionLimiter
from jaxserve.server.errors import ApiError
from jaxserve.server.request_context import get_context
from jaxserve.server.sockets import has_data

_log = logging.getLogger(__name__)
_HEAD_END = b"\r\n\r\n"
_UPGRADE = re.compile(rb"(?i)(?<=\n)u(?=pgrade:)")
_UPGRADE_NAME = b"upgrade:"
# Bytes of the kernel's send buffer. By default it grows to megabytes for each client that does not read.
_SEND_BUFFER = 256 * 2**10
_PING_INTERVAL = 0.25  # seconds between checks whether a half-closed client still reads
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


class _PipelinedError(Exception):
    """A request begins behind an answer that the client cannot have read. Clients of today send none."""


class LimitedHttp(HttpToolsProtocol):
    """uvicorn's connection with limits on the size of a head and on the time of a silent client.

    It answers one request at a time. A request that begins before the last answer has been read is dropped, and the
    connection closes behind that answer. So nobody can queue answers, and `cycle` is always the request being answered.
    """

    limiter: ConnectionLimiter  # `make_protocol` sets all four
    max_head_bytes = 16 * 2**10
    head_timeout = 60.0  # seconds; also for the rest of a body that was refused
    reading_timeout = 60.0  # seconds without a byte read of an answer that waits for the client

    @property
    def is_unread(self) -> bool:
        """Whether the client has not yet read all of an answer."""
        return self.transport.get_write_buffer_size() > 0

    @property
    def has_unread(self) -> bool:
        """See `Connection`. In a flood thousands are accepted between the arrival of a request and its reading."""
        return self.is_unread or has_data(self.transport)

    @property
    def _is_answering(self) -> bool:
        """Whether a whole request has come and its answer is not complete."""
        return self.cycle is not None and not self.cycle.response_complete and not self.cycle.more_body

    def drop(self) -> None:
        """Closes without waiting for the client."""
        self.transport.abort()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if (connection := transport.get_extra_info("socket")) is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER)
        self._head_bytes, self._head_tail = 0, b""
        self._held = b""
        self._in_head = True
        self._takes_more = True  # False: what comes is dropped, and the connection closes behind the answer
        self._timer: asyncio.TimerHandle | None = None
        self._start_timer()
        self._num_unread = 0
        self._reader_timer = self.loop.call_later(self.reading_timeout, self._check_reader)
        self._ping_timer: asyncio.TimerHandle | None = None
        self.limiter.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self.limiter.remove(self)
        self._stop_timer()
        if self._ping_timer is not None:
            self._ping_timer.cancel()
        self._reader_timer.cancel()
        if self.cycle is not None and not self.cycle.response_complete:
            get_context(self.cycle.scope).has_left = True
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if not self._takes_more:
            return
        if self._in_head and not self._is_answering:
            self._start_timer()  # also for blank lines between requests, which begin none
            self._head_bytes += len(data)
            if self._head_bytes > self.max_head_bytes and not self._ends_head(data):
                self._refuse_head()
                return
            tail, self._head_tail = self._head_tail, (self._head_tail + data[-3:])[-3:]
            data = self._hide_upgrade(tail, data)
        super().data_received(data)

    def eof_received(self) -> bool:  # type: ignore[override]
        """Called when the client sends no more. If its request is complete it still gets the answer."""
        if not self._is_answering or self.scheme == "https" or self.scope["http_version"] == "1.0":
            return False
        self.cycle.keep_alive = False
        if self._ping_timer is None:
            self._ping_timer = self.loop.call_later(_PING_INTERVAL, self._ping_half_closed)
        return True

    def on_message_begin(self) -> None:
        if self._is_answering or (self.cycle is not None and self.is_unread):  # TLS's own bytes may wait before it
            raise _PipelinedError  # the parser stops here and `send_400_response` is called
        super().on_message_begin()
        self._in_head = True
        self._start_timer()

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._stop_timer()
        self.app = self._serve_probe if self.limiter.begin(self) else self.config.loaded_app
        if self.parser.get_http_version() == "1.0":
            self.app = partial(_serve_unchunked, self.app)
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._in_head, self._head_bytes, self._head_tail = True, 0, b""
        self._stop_timer()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.cycle.response_complete and not self.transport.is_closing():
            self.limiter.end(self)
        if self.cycle.more_body:  # the body was refused; the rest is discarded for a limited time
            self._start_timer()

    def _ends_head(self, data: bytes) -> bool:
        """Whether the head ends within its limit, so that the bytes beyond it are the body's."""
        end = (self._head_tail + data).find(_HEAD_END) - len(self._head_tail)
        return end >= -len(self._head_tail) and self._head_bytes - len(data) + end <= self.max_head_bytes

    def _hide_upgrade(self, tail: bytes, data: bytes) -> bytes:
        """Returns data of a head without its Upgrade header.

        The server has no other protocol, so it may ignore the header. The parser would not: it would take the body for
        data of the other protocol, and then for the next request.

        Args:
            tail: the bytes of the head just before `data`.
        """
        begin = len(tail)
        if self._held:  # the start of a line, not yet passed to the parser
            tail, begin, self._held = b"\n" + self._held, 1, b""
        head, mark, body = (tail + data).partition(_HEAD_END)
        before, newline, line = head.rpartition(b"\n")
        if newline and not mark and _UPGRADE_NAME.startswith(line.lower()):  # it may become the header's name
            head, self._held = before + newline, line
        return (_UPGRADE.sub(b"x", head) + mark + body)[begin:]

    def _refuse_head(self) -> None:
        self._stop_timer()
        self._in_head = False
        message = f"The request's head is larger than {self.max_head_bytes} bytes (--max-header-bytes)."
        self._refuse(ApiError(431, message, code="head_too_large"))

    def send_400_response(self, msg: str) -> None:
        """Answers what is no HTTP, in place of uvicorn's plain text. Behind an answer nothing more is answered."""
        self._takes_more = False
        if self._is_answering:
            self.cycle.keep_alive = False
        elif self.cycle is not None and self.is_unread:
            self.transport.close()  # when the client has read
        else:
            self._refuse_invalid()

    def _refuse_invalid(self) -> None:
        self._refuse(ApiError(400, "The request is not valid HTTP.", code="invalid_http"))

    def _refuse(self, refusal: ApiError) -> None:
        """Sends an error and closes, where no request has begun."""
        request_id, body = secrets.token_hex(8), json.dumps(refusal.body).encode()
        lines = (
            f"HTTP/1.1 {refusal.status} {HTTPStatus(refusal.status).phrase}",
            "content-type: application/json",
            f"content-length: {len(body)}",
            f"x-request-id: {request_id}",
            "connection: close",
        )
        _log.debug("%s: %d %s", request_id, refusal.status, refusal.message)
        self.transport.write("\r\n".join((*lines, "\r\n")).encode() + body)
        self.transport.close()

    def _time_out(self) -> None:
        """Closes the connection when the rest did not arrive in time, unless an answer is still being sent."""
        self._timer = None
        if self.cycle is not None and not self.cycle.response_complete:
            self._start_timer()
        elif not self.transport.is_closing():
            self.transport.close()

    def _check_reader(self) -> None:
        """Drops a connection of which the client read nothing since the last check, while its answer waited for that.

        An answer waits if it is complete, or if no more of it is written before the client reads.
        """
        is_over = self.transport.is_closing() or self.cycle is None or self.cycle.response_complete
        num_unread = self.transport.get_write_buffer_size() if is_over or self.flow.write_paused else 0
        if num_unread and num_unread == self._num_unread:
            if not is_over:
                get_context(self.cycle.scope).was_unread = True
            self.transport.abort()  # `close` would wait for the client to read
            return
        self._num_unread = num_unread
        self._reader_timer = self.loop.call_later(self.reading_timeout, self._check_reader)

    def resume_writing(self) -> None:
        """Called when the client has read most of what waited."""
        self._num_unread = 0
        super().resume_writing()

    def _ping_half_closed(self) -> None:
        """Sends an interim response, which clients ignore, to learn whether a half-closed client still reads.

        Only a write tells a half-closed connection from a closed one: the peer's kernel resets the latter. A stream
        that has begun writes anyway.
        """
        if not self.cycle.response_started and not self.transport.is_closing():
            self.transport.write(_CONTINUE)
        self._ping_timer = self.loop.call_later(_PING_INTERVAL, self._ping_half_closed)

    async def _serve_probe(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a probe and refuses every other request: the connection is beyond the limit."""
        if is_probe(scope["path"].removeprefix(self.root_path)):
            await self.config.loaded_app(scope, receive, send)
            return
        headers = {"Retry-After": "1", "Connection": "close", "X-Request-Id": secrets.token_hex(8)}
        message = "The server has reached its limit of connections; try again."
        refusal = ApiError(503, message, code="too_many_connections", headers=headers)
        await refusal.to_response(scope["path"])(scope, receive, send)

    def _start_timer(self) -> None:
        if self._timer is None:
            self._timer = self.loop.call_later(self.head_timeout, self._time_out)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


async def _serve_unchunked(app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
    """Serves an HTTP/1.0 request, which knows no chunks: the end of the connection ends an answer without a length."""
    cycle: Any = send.__self__  # type: ignore[attr-defined]  # uvicorn's, which has no option for this
    has_length = True

    async def send_plain(message: Message) -> None:
        nonlocal has_length
        if message["type"] == "http.response.start":
            has_length = any(name.lower() == b"content-length" for name, _ in message["headers"])
            if not has_length:
                cycle.chunked_encoding = False
        elif not has_length:  # as if each piece were all that is left, and one byte more before the last
            cycle.expected_content_length = len(message.get("body", b"")) + bool(message.get("more_body"))
        await send(message)

    await app(scope, receive, send_plain)


def make_protocol(
    *, max_head_bytes: int, head_timeout: float, reading_timeout: float, max_connections: int
) -> type[LimitedHttp]:
    """Returns a subclass with these limits, as uvicorn takes it; one per server."""
    limits: dict[str, Any] = {
        "limiter": ConnectionLimiter(max_connections),
        "max_head_bytes": max_head_bytes,
        "head_timeout": head_timeout,
        "reading_timeout": reading_timeout,
    }
    return type("BoundHttp", (LimitedHttp,), limits)


def is_probe(path: str) -> bool:
    """Whether this is a health probe's path; probes have a reserve of connections."""
    return path in ("/health", "/ping") or path.startswith("/health/")

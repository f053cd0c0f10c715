"""Connections that cannot be held open, or filled with headers, for nothing."""

from __future__ import annotations

import asyncio
import re
import socket
from typing import Any

from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from jaxserve.server.connections import ConnectionLimiter
from jaxserve.server.errors import ApiError
from jaxserve.server.request_context import get_context

_HEAD_END = b"\r\n\r\n"
_UPGRADE = re.compile(rb"(?i)(?<=\n)u(?=pgrade:)")
_UPGRADE_NAME = b"upgrade:"
# Bytes that the kernel holds for a client. Left alone, it takes megabytes for each that sleeps.
_SEND_BUFFER = 256 * 2**10
_ASK_INTERVAL = 0.25  # seconds between two looks whether a client that sends no more still reads
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


class LimitedHttp(HttpToolsProtocol):
    """uvicorn's connection, which bounds neither the bytes of a head nor the time that a silent client gets."""

    limiter: ConnectionLimiter  # all four are set for a server by `make_protocol`
    max_head_bytes = 16 * 2**10
    head_timeout = 60.0  # also of a body that nobody wants any more
    reading_timeout = 60.0  # of answers that are whole

    @property
    def is_unread(self) -> bool:
        """Whether bytes of an answer wait for the client to read."""
        return self.transport.get_write_buffer_size() > 0

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
        self._timer: asyncio.TimerHandle | None = None
        self._start_timer()
        self._num_unread = 0
        self._looking = self.loop.call_later(self.reading_timeout, self._look)
        self._asking: asyncio.TimerHandle | None = None
        self.limiter.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self.limiter.remove(self)
        self._stop_timer()
        if self._asking is not None:
            self._asking.cancel()
        self._looking.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._in_head:
            self._start_timer()  # also for blanks between two requests, which begin none
            self._head_bytes += len(data)
            if self._head_bytes > self.max_head_bytes and not self._ends_head(data):
                self._refuse_head()
                return
            tail, self._head_tail = self._head_tail, (self._head_tail + data[-3:])[-3:]
            data = self._pass_over_upgrade(tail, data)
        super().data_received(data)

    def eof_received(self) -> bool:  # type: ignore[override]
        """The client sends no more. Whoever has sent a whole request gets the answer to it, if it still reads."""
        is_waiting = self.cycle is not None and not self.cycle.response_complete and not self.cycle.more_body
        if not is_waiting or self.scheme == "https" or self.scope["http_version"] == "1.0":
            return False
        self.cycle.keep_alive = False
        if self._asking is None:
            self._asking = self.loop.call_later(_ASK_INTERVAL, self._ask_whether_open)
        return True

    def on_message_begin(self) -> None:
        super().on_message_begin()
        get_context(self.scope).drop_connection = self.transport.abort
        self._in_head = True
        self._start_timer()

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._stop_timer()
        self.app = self._serve_probe if self.limiter.begin(self) else self.config.loaded_app
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._in_head, self._head_bytes, self._head_tail = True, 0, b""
        self._stop_timer()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.cycle.response_complete and not self.transport.is_closing():
            self.limiter.end(self)
        if self.cycle.more_body:  # it was refused; what still comes of it is thrown away, but not for ever
            self._start_timer()

    def _ends_head(self, data: bytes) -> bool:
        """Whether the head is within its limit, and what is beyond it belongs to the body."""
        end = (self._head_tail + data).find(_HEAD_END) - len(self._head_tail)
        return end >= -len(self._head_tail) and self._head_bytes - len(data) + end <= self.max_head_bytes

    def _pass_over_upgrade(self, tail: bytes, data: bytes) -> bytes:
        """Returns data of a head in which no other protocol is wished for.

        The server has none, so it may pass over the wish. The parser would take the body for what comes in the other
        protocol, and then for the next request.

        Args:
            tail: the last bytes of the head before these.
        """
        begin = len(tail)
        if self._held:  # the begin of a line, which the parser has not seen
            tail, begin, self._held = b"\n" + self._held, 1, b""
        head, mark, body = (tail + data).partition(_HEAD_END)
        before, newline, line = head.rpartition(b"\n")
        if newline and not mark and _UPGRADE_NAME.startswith(line.lower()):  # it may become the name
            head, self._held = before + newline, line
        return (_UPGRADE.sub(b"x", head) + mark + body)[begin:]

    def _refuse_head(self) -> None:
        self._stop_timer()
        self._in_head = False
        self.transport.write(
            b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
        )
        self.transport.close()

    def _give_up(self) -> None:
        """The rest did not come in time: nobody is answered, except whoever still is."""
        self._timer = None
        if self.cycle is not None and not self.cycle.response_complete:
            self._start_timer()
        elif not self.transport.is_closing():
            self.transport.close()

    def _look(self) -> None:
        """Drops an answer of which nothing was read since the last look. Streams see to theirs themselves."""
        is_over = self.transport.is_closing() or self.cycle is None or self.cycle.response_complete
        num_unread = self.transport.get_write_buffer_size() if is_over else 0
        if num_unread and num_unread == self._num_unread:
            self.transport.abort()  # `close` would wait for the client to read
            return
        self._num_unread = num_unread
        self._looking = self.loop.call_later(self.reading_timeout, self._look)

    def _ask_whether_open(self) -> None:
        """Sends what clients pass over, to learn whether a client that has ended its side still reads.

        Nothing else tells a half-closed connection from one that is closed: the peer's kernel resets the latter, and
        the next write finds that out. A stream that has begun writes anyway.
        """
        if not self.pipeline and not self.cycle.response_started and not self.transport.is_closing():
            self.transport.write(_CONTINUE)
        self._asking = self.loop.call_later(_ASK_INTERVAL, self._ask_whether_open)

    async def _serve_probe(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a probe, and refuses everything else: there are too many requests in progress."""
        if is_probe(scope["path"].removeprefix(self.root_path)):
            await self.config.loaded_app(scope, receive, send)
            return
        headers = {"Retry-After": "1", "Connection": "close"}
        message = "The server has as many connections as it may; try again."
        refusal = ApiError(503, message, code="too_many_connections", headers=headers)
        await refusal.to_response()(scope, receive, send)

    def _start_timer(self) -> None:
        if self._timer is None:
            self._timer = self.loop.call_later(self.head_timeout, self._give_up)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def make_protocol(
    *, max_head_bytes: int, head_timeout: float, reading_timeout: float, max_connections: int
) -> type[LimitedHttp]:
    """Returns the class of connections with these limits, as uvicorn wants it; for one server."""
    limits: dict[str, Any] = {
        "limiter": ConnectionLimiter(max_connections),
        "max_head_bytes": max_head_bytes,
        "head_timeout": head_timeout,
        "reading_timeout": reading_timeout,
    }
    return type("BoundHttp", (LimitedHttp,), limits)


def is_probe(path: str) -> bool:
    """Whether an orchestrator asks at this path how the server is: such requests have a reserve of connections."""
    return path in ("/health", "/ping") or path.startswith("/health/")

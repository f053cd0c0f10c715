"""Connections that cannot be held open, or filled with headers, for nothing."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol


class LimitedHttp(HttpToolsProtocol):
    """uvicorn's connection, which bounds neither the bytes of a head nor the time it takes to come."""

    max_head_bytes = 16 * 2**10  # both are set for a server by `make_protocol`
    head_timeout = 60.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._head_bytes = 0
        self._in_head = True
        self._head_timer: asyncio.TimerHandle | None = self.loop.call_later(self.head_timeout, self._give_up)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._in_head:
            self._head_bytes += len(data)
            if self._head_bytes > self.max_head_bytes and not self._ends_head(data):
                self._refuse_head()
                return
        super().data_received(data)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head = True
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(self.head_timeout, self._give_up)

    def on_headers_complete(self) -> None:
        self._in_head, self._head_bytes = False, 0
        self._stop_timer()
        super().on_headers_complete()

    def _ends_head(self, data: bytes) -> bool:
        """Whether the head is within its limit, and what is beyond it belongs to the body."""
        end = data.find(b"\r\n\r\n")
        return end >= 0 and self._head_bytes - len(data) + end <= self.max_head_bytes

    def _refuse_head(self) -> None:
        self._stop_timer()
        self._in_head = False
        self.transport.write(
            b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
        )
        self.transport.close()

    def _give_up(self) -> None:
        """No head came in time: nobody is answered."""
        self._head_timer = None
        if not self.transport.is_closing():
            self.transport.close()

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None


def make_protocol(max_head_bytes: int, head_timeout: float) -> type[LimitedHttp]:
    """Returns the class of connections with these limits, as uvicorn wants it."""
    limits: dict[str, Any] = {"max_head_bytes": max_head_bytes, "head_timeout": head_timeout}
    return type("BoundHttp", (LimitedHttp,), limits)

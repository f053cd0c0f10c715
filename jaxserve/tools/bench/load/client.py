"""An HTTP/1.1 client for many streams at once, as light as Python allows: asyncio's transports and httptools' parser.

It costs some 20 us of CPU a chunk, where httpx takes 110 to 140; client and server often share the cores of a machine.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Callable

import httptools

from jaxserve.tools.bench.load.answers import AnswerReader
from jaxserve.tools.bench.load.records import RequestRecord
from jaxserve.tools.bench.load.target import Target


class ClosedEarlyError(ConnectionError):
    """The connection was closed before any of the answer came."""


class Client:
    """Sends requests to one target; connections are kept and used again."""

    def __init__(self, target: Target, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._target, self._clock = target, clock
        self._tls = ssl.create_default_context() if target.is_tls else None
        self._idle: list[_Connection] = []

    async def send(self, request: bytes, record: RequestRecord, *, keeps_text: bool = False) -> None:
        """Sends one request, made by `Target.encode`, and fills its record as the answer comes. What fails is noted
        in the record; cancelling aborts the request.
        """
        record.sent = self._clock()
        try:
            while self._idle:
                try:
                    await self._exchange(self._idle.pop(), request, record, keeps_text)
                    return
                except ClosedEarlyError:
                    pass  # a server may close a connection that was idle; the request did not reach it
            loop = asyncio.get_running_loop()
            _, made = await loop.create_connection(
                lambda: _Connection(self._clock), self._target.host, self._target.port, ssl=self._tls
            )
            await self._exchange(made, request, record, keeps_text)
        except OSError as error:
            record.end, record.error = self._clock(), f"{type(error).__name__}: {error}"

    async def _exchange(self, connection: _Connection, request: bytes, record: RequestRecord, keeps_text: bool) -> None:
        try:
            await connection.exchange(request, record, AnswerReader(record, keeps_text=keeps_text))
        except BaseException:
            connection.abort()
            raise
        if connection.can_be_used_again:
            self._idle.append(connection)
        else:
            connection.abort()

    def close(self) -> None:
        """Closes idle connections."""
        while self._idle:
            self._idle.pop().abort()


class _Connection(asyncio.Protocol):
    """One connection, and the callbacks of its parser."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._transport: asyncio.Transport | None = None
        self._parser: httptools.HttpResponseParser | None = None
        self._record: RequestRecord | None = None
        self._reader: AnswerReader | None = None
        self._ended: asyncio.Future[None] | None = None
        self._now = 0.0
        self._is_lost = self._keeps_alive = False

    @property
    def can_be_used_again(self) -> bool:
        """Whether another request may be sent."""
        return self._keeps_alive and not self._is_lost

    async def exchange(self, request: bytes, record: RequestRecord, reader: AnswerReader) -> None:
        """Sends a request and waits for the end of its answer."""
        if self._transport is None or self._is_lost:
            raise ClosedEarlyError("the connection was closed")
        self._record, self._reader = record, reader
        self._parser, self._keeps_alive = httptools.HttpResponseParser(self), False
        self._ended = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        await self._ended

    def abort(self) -> None:
        """Closes the connection at once."""
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._now = self._clock()
        if self._parser is None or self._ended is None or self._ended.done():
            self.abort()  # nobody asked
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(ConnectionError(f"the answer is not HTTP: {error}"))

    def connection_lost(self, error: Exception | None) -> None:
        self._is_lost = True
        if self._record is None or self._reader is None:
            return
        if self._record.status == 0:
            self._fail(ClosedEarlyError(f"no answer: {error or 'the connection was closed'}"))
        elif self._reader.is_done:
            self._end(self._clock())  # the end of the connection is the end of such an answer
        else:
            self._fail(ConnectionError("the connection was closed in the middle of the answer"))

    def on_headers_complete(self) -> None:
        """Is called by the parser."""
        assert self._parser is not None and self._record is not None
        self._record.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        """Is called by the parser."""
        assert self._reader is not None
        self._reader.feed(body, self._now)

    def on_message_complete(self) -> None:
        """Is called by the parser, which knows about the connection only now."""
        assert self._parser is not None
        self._keeps_alive = self._parser.should_keep_alive()
        self._end(self._now)

    def _end(self, now: float) -> None:
        assert self._reader is not None and self._ended is not None
        if not self._ended.done():
            self._reader.finish(now)
            self._ended.set_result(None)

    def _fail(self, error: OSError) -> None:
        if self._ended is not None and not self._ended.done():
            self._ended.set_exception(error)

"""Streams to clients that read, sleep or leave; and answers whose client leaves before they are there."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from starlette.requests import Request

from jaxserve.errors import DeadlineError, DeviceStepError
from jaxserve.server import stream
from jaxserve.server.errors import ApiError
from jaxserve.server.generation import begin_reading
from jaxserve.server.request_context import get_context
from jaxserve.server.server_state import ServerState
from jaxserve.server.stream import DONE, ChunkWriter, EventStream, encode_event, run_while_connected
from tests.server.asgi import Client, make_scope, make_state


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), timeout=20))  # type: ignore[arg-type]


class Pieces:
    """A generator of pieces that says whether it was closed."""

    def __init__(self, *pieces: bytes | Exception, waits: bool = False, seconds: float = 0.0) -> None:
        self.is_closed = False
        self.num_made = 0
        self.stream = self._make(pieces, waits, seconds)

    async def _make(self, pieces: tuple[bytes | Exception, ...], waits: bool, seconds: float) -> AsyncIterator[bytes]:
        try:
            for piece in pieces:
                await asyncio.sleep(seconds)
                if isinstance(piece, Exception):
                    raise piece
                self.num_made += 1
                yield piece
            if waits:
                await asyncio.Event().wait()
        finally:
            self.is_closed = True


async def serve(pieces: Pieces, client: Client, state: ServerState, **options: Any) -> None:
    await EventStream(pieces.stream, state, **options)(make_scope("/"), client.receive, client.send)


def ready(state: ServerState) -> Client:
    """A client whose request has been read."""
    client = Client()
    client._body.clear()
    return client


def test_pieces_come_one_by_one_and_the_end_follows() -> None:
    async def test() -> None:
        state, pieces = make_state(), Pieces(b"data: 1\n\n", b"data: 2\n\n")
        client = ready(state)
        await serve(pieces, client, state)
        answer = client.answer
        assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert "content-length" not in answer.headers and answer.headers["cache-control"] == "no-cache"
        assert [m["body"] for m in answer.messages[1:]] == [b"data: 1\n\n", b"data: 2\n\n", DONE]
        assert answer.is_whole and pieces.is_closed
        assert not any(state.metrics.events.values())

    run(test)


@pytest.mark.parametrize(
    ("error", "code"), [(DeadlineError("late"), "timeout"), (DeviceStepError("broken"), "device_step_failed")]
)
def test_an_error_in_the_middle_is_an_event(error: Exception, code: str) -> None:
    async def test() -> None:
        state, pieces = make_state(), Pieces(b"data: 1\n\n", error)
        client = ready(state)
        await serve(pieces, client, state)
        event, end = client.answer.body.removeprefix(b"data: 1\n\n").split(b"\n\n", 1)
        assert json.loads(event.removeprefix(b"data: "))["error"]["code"] == code
        assert end == DONE and client.answer.is_whole and pieces.is_closed

    run(test)


def test_pings_come_while_nothing_else_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first comes at once if there is nothing else; a piece that comes is never cut by one."""

    async def test() -> None:
        monkeypatch.setattr(stream, "PING_SECONDS", 0.01)
        state, go_on = make_state(), asyncio.Event()
        client = ready(state)

        async def make_pieces() -> AsyncGenerator[bytes]:
            await go_on.wait()
            yield b"data: 1\n\n"

        options = {"ping": lambda: b": ping\n\n", "end": b""}
        response = EventStream(make_pieces(), state, **options)  # type: ignore[arg-type]
        serving = asyncio.ensure_future(response(make_scope("/"), client.receive, client.send))
        while len(client.answer.messages) < 4:
            await asyncio.sleep(0)
        go_on.set()
        await serving
        *pings, piece, end = [message["body"] for message in client.answer.messages[1:]]
        assert set(pings) == {b": ping\n\n"} and len(pings) >= 3
        assert (piece, end) == (b"data: 1\n\n", b"") and client.answer.is_whole

    run(test)


@pytest.mark.parametrize("fails", [False, True])
def test_outputs_that_come_late_are_read_all_the_same(fails: bool) -> None:
    async def test() -> None:
        go_on = asyncio.Event()

        async def make() -> AsyncGenerator[int]:
            await go_on.wait()
            if fails:
                raise DeadlineError("late")
            yield 1
            yield 2

        outputs = await begin_reading(make(), patience=0.01)
        go_on.set()
        if fails:
            with pytest.raises(DeadlineError):
                await anext(outputs)
        else:
            assert [output async for output in outputs] == [1, 2]

    run(test)


def test_outputs_that_are_waited_for_end_with_their_reader() -> None:
    async def test() -> None:
        pieces = Pieces(waits=True)
        waiting = asyncio.ensure_future(begin_reading(pieces.stream))
        await asyncio.sleep(0.01)
        waiting.cancel()
        await asyncio.wait((waiting,))
        assert waiting.cancelled() and pieces.is_closed
        pieces = Pieces(waits=True)
        late = await begin_reading(pieces.stream, patience=0.01)
        reading = asyncio.ensure_future(anext(late))
        await asyncio.sleep(0.01)
        reading.cancel()
        await asyncio.wait((reading,))
        assert reading.cancelled() and pieces.is_closed

    run(test)


def test_an_error_of_ours_says_nothing_of_us() -> None:
    async def test() -> None:
        state = make_state()
        client = ready(state)
        await serve(Pieces(b"data: 1\n\n", ZeroDivisionError("a secret")), client, state)
        assert b"internal_error" in client.answer.body and b"secret" not in client.answer.body
        assert client.answer.is_whole

    run(test)


def test_a_client_that_leaves_closes_the_pieces() -> None:
    async def test() -> None:
        state, pieces = make_state(), Pieces(b"data: 1\n\n", waits=True)
        client = ready(state)
        serving = asyncio.ensure_future(serve(pieces, client, state))
        while pieces.num_made == 0:
            await asyncio.sleep(0)
        assert not serving.done()
        client.left.set()
        await serving
        assert pieces.is_closed and not client.answer.is_whole
        assert state.metrics.events["client_disconnects"] == 1 and state.metrics.events["slow_readers"] == 0

    run(test)


def test_a_viewer_that_leaves_is_no_aborted_request() -> None:
    async def test() -> None:
        state, pieces = make_state(), Pieces(b"data: 1\n\n", waits=True)
        client = ready(state)
        client.left.set()
        await serve(pieces, client, state, counts_leaving=False)
        assert pieces.is_closed and state.metrics.events["client_disconnects"] == 0

    run(test)


def test_a_client_that_has_left_before_closes_the_pieces() -> None:
    async def test() -> None:
        state, pieces = make_state(), Pieces(*[b"data: 1\n\n"] * 1000)
        client = ready(state)
        client.left.set()
        await serve(pieces, client, state)
        assert pieces.is_closed and pieces.num_made < 1000
        assert state.metrics.events["client_disconnects"] == 1

    run(test)


@pytest.mark.parametrize("was_unread", [False, True])
def test_a_client_whose_connection_is_dropped_closes_the_pieces(was_unread: bool) -> None:
    """Its connection returns from every write that waits; `test_http.py` has who does not read."""

    async def test() -> None:
        state, pieces = make_state(), Pieces(*[b"data: 1\n\n"] * 1000)
        client, scope = ready(state), make_scope("/")
        client.reads.clear()
        serving = asyncio.ensure_future(EventStream(pieces.stream, state)(scope, client.receive, client.send))
        await asyncio.sleep(0.01)
        get_context(scope).has_left, get_context(scope).was_unread = True, was_unread
        client.left.set()
        client.reads.set()
        await serving
        assert pieces.is_closed or not pieces.num_made, "a generator that never began has nothing to close"
        assert state.metrics.events["slow_readers"] == was_unread
        assert state.metrics.events["client_disconnects"] == 1 - was_unread

    run(test)


def test_a_server_that_ends_closes_the_pieces() -> None:
    async def test() -> None:
        state, pieces = make_state(), Pieces(b"data: 1\n\n", waits=True)
        serving = asyncio.ensure_future(serve(pieces, ready(state), state))
        while pieces.num_made == 0:
            await asyncio.sleep(0)
        serving.cancel()
        await asyncio.wait([serving])
        assert serving.cancelled() and pieces.is_closed

    run(test)


def test_answers_are_not_worked_on_for_clients_that_left() -> None:
    async def test() -> None:
        state, client = make_state(), Client()
        request = Request(make_scope("/"), client.receive)
        await request.body()
        stopped = asyncio.Event()

        async def work() -> int:
            try:
                await asyncio.Event().wait()
            finally:
                await asyncio.sleep(0)
                stopped.set()
            return 1

        waiting = asyncio.ensure_future(run_while_connected(request, work(), state))
        await asyncio.sleep(0.01)
        client.left.set()
        with pytest.raises(ApiError) as caught:
            await waiting
        assert caught.value.status == 499 and stopped.is_set(), "the work has ended before anyone goes on"
        assert state.metrics.events["client_disconnects"] == 1

    run(test)


def test_answers_and_errors_come_through() -> None:
    async def test() -> None:
        state = make_state()

        async def work(error: Exception | None) -> int:
            await asyncio.sleep(0)
            if error is not None:
                raise error
            return 7

        for error in (None, ApiError(400, "no"), ZeroDivisionError()):
            client = Client()
            request = Request(make_scope("/"), client.receive)
            await request.body()
            if error is None:
                assert await run_while_connected(request, work(None), state) == 7
            else:
                with pytest.raises(type(error)):
                    await run_while_connected(request, work(error), state)
        assert not any(state.metrics.events.values())

    run(test)


def test_events_are_one_line_of_ascii() -> None:
    event = encode_event({"text": "é\n\u2028\ud800", "none": None}, "name")
    assert event.startswith(b"event: name\ndata: ") and event.endswith(b"\n\n") and event.isascii()
    assert event.count(b"\n") == 3 and json.loads(event.split(b"data: ")[1])["text"] == "é\n\u2028\ud800"
    with pytest.raises(ValueError, match="JSON"):
        encode_event({"x": float("nan")})


def test_chunks_are_what_their_parts_say() -> None:
    head = {"id": "a", "object": "chunk"}
    for shows_usage, more in ((True, {"usage": None}), (False, {})):
        writer = ChunkWriter(head, shows_usage=shows_usage)
        assert json.loads(writer.write({"index": 0}).removeprefix(b"data: ")) == {
            **head,
            "choices": [{"index": 0}],
            **more,
        }
    assert json.loads(writer.write_usage({"t": 1}).removeprefix(b"data: ")) == {
        **head,
        "choices": [],
        "usage": {"t": 1},
    }
    assert json.loads(writer.write_usage({"t": 1}, {"more": 2}).removeprefix(b"data: "))["more"] == 2

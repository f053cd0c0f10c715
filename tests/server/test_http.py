"""Connections of `LimitedHttp` over real sockets: heads, bodies that nobody wants, and answers that nobody reads."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import uvicorn
from starlette.types import Receive, Scope, Send

from jaxserve.server.http import make_protocol
from jaxserve.server.request_context import RequestContext, get_context
from tests.server.pressure import wait_until

LIMITS: dict[str, Any] = {
    "max_head_bytes": 4096,
    "head_timeout": 1.5,
    "reading_timeout": 0.8,
    "max_connections": 8,
}
MOST = LIMITS["max_connections"]
BIG = 8 * 2**20  # bytes: more than the buffers of both ends take
PIECE = 2**16

begun: list[str] = []  # paths of requests that take long
gone: list[str] = []  # paths whose clients left
contexts: list[RequestContext] = []  # of answers in pieces


async def app(scope: Scope, receive: Receive, send: Send) -> None:
    """POST answers the number of the body's bytes, /refuse does not read it, /big and /slow say a lot or slowly.

    /pieces says a lot in pieces. /wait says nothing until the client has gone.
    """
    path = scope["path"]
    size, more = 0, path != "/refuse"
    while more:
        message = await receive()
        size += len(message.get("body", b""))
        more = message.get("more_body", False)
    body = b"x" * BIG if path == "/big" else str(size).encode()
    if path in ("/slow", "/wait"):
        begun.append(path)
    if path == "/wait":
        assert (await receive())["type"] == "http.disconnect"
        gone.append(path)
        return
    if path == "/slow":
        await asyncio.sleep(2.0)  # longer than a head may take
    if path == "/pieces":
        begun.append(path)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(BIG // PIECE):
            await send({"type": "http.response.body", "body": b"x" * PIECE, "more_body": True})
        await send({"type": "http.response.body", "body": b""})
        contexts.append(get_context(scope))
        return
    headers = [(b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


class Listening:
    """The server, and what it has open."""

    def __init__(self, server: uvicorn.Server) -> None:
        self.server = server
        self.address: tuple[str, int] = server.servers[0].sockets[0].getsockname()

    def connect(self, receive_buffer: int | None = None) -> socket.socket:
        client = socket.socket()
        if receive_buffer is not None:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        client.settimeout(10)
        client.connect(self.address)
        return client

    def wait_for_connections(self, count: int, seconds: float = 10.0) -> None:
        deadline = time.monotonic() + seconds
        while (found := len(self.server.server_state.connections)) != count and time.monotonic() < deadline:
            time.sleep(0.01)
        assert found == count


@pytest.fixture(scope="module")
def listening() -> Iterator[Listening]:
    config = uvicorn.Config(
        app,
        port=0,
        http=make_protocol(**LIMITS),
        ws="none",
        lifespan="off",
        log_config=None,
        timeout_keep_alive=1,
        timeout_graceful_shutdown=1,
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(
        target=lambda: asyncio.run(server.serve(), loop_factory=config.get_loop_factory()), daemon=True
    )
    thread.start()
    while not server.started:
        time.sleep(0.01)
    yield Listening(server)
    server.should_exit = True
    thread.join(10)
    assert not thread.is_alive()


@contextmanager
def connected(listening: Listening, receive_buffer: int | None = None) -> Iterator[socket.socket]:
    client = listening.connect(receive_buffer)
    try:
        yield client
    finally:
        client.close()


def make_post(body: bytes, *, filler: int = 0, path: str = "/") -> bytes:
    return (
        b"POST %s HTTP/1.1\r\nhost: a\r\nx-filler: %s\r\ncontent-length: %d\r\n\r\n"
        % (path.encode(), b"f" * filler, len(body))
        + body
    )


def read_answer(client: socket.socket) -> tuple[int, bytes]:
    """Reads one answer with a content-length; returns its status and its body."""
    data = b""
    while b"\r\n\r\n" not in data:
        if not (piece := client.recv(1)):
            raise ConnectionError(f"closed after {data!r}")
        data += piece
    head = data.decode().lower()
    length = int(head.partition("content-length: ")[2].split("\r\n")[0])
    body = b""
    while len(body) < length:
        body += client.recv(length - len(body))
    return int(head.split()[1]), body


def read_to_end(client: socket.socket) -> bytes:
    data = b""
    while piece := client.recv(2**20):
        data += piece
    return data


def is_closed(client: socket.socket) -> bool:
    """Whether the server ends the connection, in whatever way, within the socket's timeout."""
    try:
        while client.recv(65536):
            pass
    except ConnectionError:
        return True
    except TimeoutError:
        return False
    return True


def test_several_requests_share_a_connection(listening: Listening) -> None:
    with connected(listening) as client:
        for length in (0, 10, 100_000, 3):
            client.sendall(make_post(b"b" * length, filler=3000))
            assert read_answer(client) == (200, str(length).encode())


@pytest.mark.parametrize("pause", [0.0, 0.1])
def test_a_connection_closes_behind_an_answer_that_more_requests_did_not_wait_for(
    listening: Listening, pause: float
) -> None:
    before = len(begun)
    with connected(listening) as client:
        client.sendall(make_post(b"four", path="/slow"))
        time.sleep(pause)  # 0: all come in one piece
        client.sendall(make_post(b"five!", path="/slow") * 100 + b"no HTTP")
        answer = read_to_end(client)
        assert answer.startswith(b"HTTP/1.1 200") and b"connection: close" in answer.lower()
        assert answer.endswith(b"\r\n\r\n4") and len(begun) == before + 1


def test_answers_that_nobody_reads_cannot_be_queued(listening: Listening) -> None:
    """Each request comes when the answer before it is complete, but has not been read."""
    listening.wait_for_connections(0)
    with connected(listening, 4096) as client:
        client.sendall(b"GET /big HTTP/1.1\r\nhost: a\r\n\r\n")
        time.sleep(0.1)
        client.sendall(make_post(b"five!", path="/slow"))
        num_begun, answer = len(begun), read_to_end(client)
        assert len(answer.partition(b"\r\n\r\n")[2]) == BIG and len(begun) == num_begun


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_a_head_may_come_in_pieces_of_any_size(listening: Listening, size: int) -> None:
    with connected(listening) as client:
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for filler in (0, 300):
            data = make_post(b"four", filler=filler)
            for start in range(0, len(data), size):
                client.sendall(data[start : start + size])
            assert read_answer(client) == (200, b"4")


@pytest.mark.parametrize("cut", range(-6, 3))
def test_a_body_is_not_counted_as_head_wherever_the_pieces_are_cut(listening: Listening, cut: int) -> None:
    body = b"\r\n\r\n" + b"b" * 100_000 + b"\r\n\r\n"
    data = make_post(body, filler=LIMITS["max_head_bytes"] - 200)
    end = data.index(b"\r\n\r\n") + 4
    with connected(listening) as client:
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        client.sendall(data[: end + cut])
        time.sleep(0.03)
        client.sendall(data[end + cut :])
        assert read_answer(client) == (200, str(len(body)).encode())


@pytest.mark.parametrize("begins", [True, False])
def test_a_head_that_is_too_large_is_refused_by_name(listening: Listening, begins: bool) -> None:
    with connected(listening) as client:
        if not begins:
            client.sendall(make_post(b"b"))
            assert read_answer(client) == (200, b"1")
        client.sendall(make_post(b"", filler=LIMITS["max_head_bytes"]))
        assert read_answer(client)[0] == 431
        assert is_closed(client)


def test_a_header_that_never_ends_is_cut_off(listening: Listening) -> None:
    with connected(listening) as client:
        client.sendall(b"GET / HTTP/1.1\r\nx-endless: ")
        sent = 0
        with pytest.raises(OSError):
            while sent < 50 * 2**20:
                sent += client.send(b"e" * 1000)
                time.sleep(0.001)
        assert sent < 10 * 2**20


@pytest.mark.parametrize("beginning", [b"", b"GET / HT", b"POST / HTTP/1.1\r\nhost: a\r\n", b"\r\n\r\n"])
def test_a_head_that_does_not_come_ends_the_connection(listening: Listening, beginning: bytes) -> None:
    with connected(listening) as client:
        client.sendall(beginning)
        start = time.monotonic()
        assert is_closed(client)
        assert time.monotonic() - start > 1.0


def test_a_head_that_drips_ends_the_connection(listening: Listening) -> None:
    with connected(listening) as client, pytest.raises(OSError):
        start = time.monotonic()
        client.sendall(b"GET / HTTP/1.1\r\n")
        while time.monotonic() - start < 10:
            client.sendall(b"x")
            time.sleep(0.02)


def test_blanks_after_a_request_do_not_keep_a_connection(listening: Listening) -> None:
    """Any byte ends the idle connection's own timer; these begin no request either."""
    with connected(listening) as client:
        client.sendall(make_post(b"b"))
        assert read_answer(client) == (200, b"1")
        client.sendall(b"\r\n")
        assert is_closed(client)


def test_blanks_after_a_request_do_not_cut_its_answer(listening: Listening) -> None:
    with connected(listening) as client:
        client.sendall(make_post(b"b", path="/slow") + b"\r\n")
        time.sleep(0.1)
        client.sendall(b"\r\n")
        assert read_answer(client) == (200, b"1")


@pytest.mark.parametrize("size", [1, 150, 1000])
def test_a_wish_for_another_protocol_is_passed_over(listening: Listening, size: int) -> None:
    """Java's own client asks for HTTP/2 that way with the first request of each connection, whatever its body."""
    head = b"POST / HTTP/1.1\r\nConnection: Upgrade, HTTP2-Settings\r\nHost: a\r\nContent-Length: %d\r\n"
    body = b"GET /refuse HTTP/1.1\r\nupgrade: h2c\r\n\r\n"  # would be another request if it were not the body
    data = head % len(body) + b"HTTP2-Settings: AAEAAEAA\r\nUpgrade: h2c\r\n\r\n" + body
    with connected(listening) as client:
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(2):
            for start in range(0, len(data), size):
                client.sendall(data[start : start + size])
            assert read_answer(client) == (200, str(len(body)).encode())
        client.sendall(make_post(b"four"))
        assert read_answer(client) == (200, b"4")


def test_an_endless_body_that_was_refused_ends_the_connection(listening: Listening) -> None:
    with connected(listening) as client, pytest.raises(OSError):
        client.sendall(b"POST /refuse HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n")
        assert read_answer(client)[0] == 200
        start = time.monotonic()
        while time.monotonic() - start < 10:
            client.sendall(b"4\r\nbody\r\n")
            time.sleep(0.005)


def test_the_rest_of_a_refused_body_may_come(listening: Listening) -> None:
    with connected(listening) as client:
        data = make_post(b"b" * 1000, path="/refuse")
        client.sendall(data[:-500])
        assert read_answer(client) == (200, b"0")
        client.sendall(data[-500:] + make_post(b"next"))
        assert read_answer(client) == (200, b"4")


def test_an_answer_that_nobody_reads_is_dropped(listening: Listening) -> None:
    listening.wait_for_connections(0)
    with connected(listening, 4096) as client:
        client.sendall(b"GET /big HTTP/1.1\r\nhost: a\r\n\r\n")
        listening.wait_for_connections(1)
        listening.wait_for_connections(0)  # though the client has it open


def test_an_answer_in_pieces_that_nobody_reads_is_dropped(listening: Listening) -> None:
    listening.wait_for_connections(0)
    contexts.clear()
    with connected(listening, 4096) as client:
        client.sendall(b"GET /pieces HTTP/1.1\r\nhost: a\r\n\r\n")
        listening.wait_for_connections(1)
        listening.wait_for_connections(0)
        wait_until(lambda: len(contexts) == 1)
        assert contexts[0].has_left and contexts[0].was_unread


def test_writing_to_a_client_that_left_is_no_error(listening: Listening, caplog: pytest.LogCaptureFixture) -> None:
    contexts.clear()
    num_begun = len(begun)
    client = listening.connect(4096)
    client.sendall(b"GET /pieces HTTP/1.1\r\nhost: a\r\n\r\n" * 2)
    wait_until(lambda: len(begun) > num_begun)
    client.close()
    wait_until(lambda: len(contexts) == 1)
    assert contexts[0].has_left and not contexts[0].was_unread
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


@pytest.mark.parametrize("path", ["/big", "/pieces"])
def test_an_answer_that_is_read_slowly_arrives_whole(listening: Listening, path: str) -> None:
    with connected(listening, 2**16) as client:
        client.sendall(b"GET %s HTTP/1.1\r\nhost: a\r\n\r\n" % path.encode())
        start, num_read, data = time.monotonic(), 0, b"x"
        while data and num_read < BIG:
            if time.monotonic() - start < 2.5:  # several looks, between which a little is read
                time.sleep(0.05)
            data = client.recv(100_000)
            num_read += len(data)
        assert num_read > BIG


@contextmanager
def several(listening: Listening, count: int) -> Iterator[list[socket.socket]]:
    """Connections that the server has taken, in this order."""
    listening.wait_for_connections(0)
    clients: list[socket.socket] = []
    try:
        for _ in range(count):
            clients.append(listening.connect())
            listening.wait_for_connections(min(len(clients), MOST))
        yield clients
    finally:
        for client in clients:
            client.close()


def get(client: socket.socket, path: str = "/") -> tuple[int, bytes]:
    client.sendall(b"GET %s HTTP/1.1\r\nhost: a\r\n\r\n" % path.encode())
    return read_answer(client)


def test_the_connection_that_has_been_idle_longest_makes_room(listening: Listening) -> None:
    with several(listening, MOST) as clients:
        assert get(clients[0])[0] == 200  # so the second one is the oldest now
        with connected(listening) as newest:
            assert get(newest)[0] == 200 and is_closed(clients[1])
            assert [get(client)[0] for client in (clients[0], *clients[2:])] == [200] * (MOST - 1)


def test_crowds_of_idle_connections_keep_nobody_out(listening: Listening) -> None:
    with several(listening, 4 * MOST) as clients:
        for path in ("/health/live", "/"):
            with connected(listening) as newest:
                assert get(newest, path)[0] == 200
        assert get(clients[-1])[0] == 200 and is_closed(clients[0])


def test_requests_in_progress_are_never_cut_and_probes_are_answered_beside_them(listening: Listening) -> None:
    with several(listening, MOST) as clients:
        before = len(begun)
        for client in clients:
            client.sendall(make_post(b"b", path="/slow"))
        wait_until(lambda: len(begun) == before + MOST)
        with connected(listening) as other:
            other.sendall(b"GET / HTTP/1.1\r\nhost: a\r\n\r\n")
            head = other.recv(4096).decode().lower()
            assert head.startswith("http/1.1 503") and "retry-after: 1" in head and "connection: close" in head
        for path in ("/health", "/health/live", "/ping"):
            with connected(listening) as probe:
                assert get(probe, path)[0] == 200
        assert [read_answer(client) for client in clients] == [(200, b"1")] * MOST


def test_who_sends_no_more_gets_the_answer(listening: Listening) -> None:
    with connected(listening) as client:
        client.sendall(make_post(b"four", path="/slow"))
        client.shutdown(socket.SHUT_WR)
        answer = read_to_end(client)
        *interim, last, body = answer.split(b"\r\n\r\n")
        assert set(interim) == {b"HTTP/1.1 100 Continue"}  # which tells the server that somebody still reads
        assert last.startswith(b"HTTP/1.1 200") and b"connection: close" in last.lower() and body == b"4"


def test_who_has_gone_is_noticed_though_nothing_is_sent(listening: Listening) -> None:
    before, num_begun = len(gone), len(begun)
    client = listening.connect()
    client.sendall(make_post(b"four", path="/wait"))
    wait_until(lambda: len(begun) == num_begun + 1)
    client.close()
    listening.wait_for_connections(0)
    wait_until(lambda: len(gone) == before + 1)


def test_a_body_that_is_cut_short_ends_the_connection(listening: Listening) -> None:
    with connected(listening) as client:
        client.sendall(make_post(b"four")[:-1])
        client.shutdown(socket.SHUT_WR)
        assert client.recv(4096) == b""


@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(range(256)),
        b"GET / HTTP/9.9\r\n\r\n",
        b"POST / HTTP/1.1\r\ncontent-length: -1\r\n\r\n",
        b"POST / HTTP/1.1\r\ncontent-length: 5\r\ncontent-length: 6\r\n\r\nhello",
        b"POST / HTTP/1.1\r\ncontent-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        b"POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
        b"\0" * 100,
    ],
    ids=range(7),
)
def test_what_is_no_http_gets_400_or_a_closed_connection(listening: Listening, data: bytes) -> None:
    with connected(listening) as client:
        client.sendall(data)
        answer = b""
        try:
            while piece := client.recv(4096):
                answer += piece
        except ConnectionError:
            pass
        assert answer == b"" or answer.startswith(b"HTTP/1.1 400")

"""Which connection makes room for a new one."""

from __future__ import annotations

import asyncio
import socket
from types import SimpleNamespace

from jaxserve.server.connections import ConnectionLimiter
from jaxserve.server.sockets import has_data


class Client:
    """A connection that sent something, or not."""

    def __init__(self, *, has_unread: bool = False) -> None:
        self.has_unread, self.is_open = has_unread, True

    def drop(self) -> None:
        self.is_open = False


def test_the_longest_idle_makes_room() -> None:
    limiter, clients = ConnectionLimiter(3), [Client() for _ in range(5)]
    for client in clients:
        limiter.add(client)
    assert [client.is_open for client in clients] == [False, False, True, True, True]


def test_what_came_and_was_not_read_is_not_idle() -> None:
    limiter = ConnectionLimiter(3)
    asking, silent = Client(has_unread=True), [Client() for _ in range(6)]
    for client in (asking, *silent):
        limiter.add(client)
    assert asking.is_open and sum(client.is_open for client in silent) == 2


def make_transport(connection: socket.socket | None) -> asyncio.BaseTransport:
    return SimpleNamespace(get_extra_info=lambda name: connection)  # type: ignore[return-value]


def test_data_that_waits_in_a_socket_is_seen() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert not has_data(make_transport(ours))
        theirs.send(b"GET / HTTP/1.1")
        assert has_data(make_transport(ours))
        ours.recv(100)
        assert not has_data(make_transport(ours))
    assert not has_data(make_transport(ours)), "it is closed"
    assert not has_data(make_transport(None)), "there is none"

"""The probes of a host above rank 0, and what strangers can hold of them."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator

import httpx
import pytest

from jaxserve.errors import ConfigError
from jaxserve.server import headless
from jaxserve.server.headless import FollowerHealth
from tests.nodes.nodes import find_ports


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """The port of a host that is not ready; the limits are small."""
    monkeypatch.setattr(headless, "_REQUEST_SECONDS", 1.0)
    monkeypatch.setattr(headless, "_CONNECTIONS", 4)
    monkeypatch.setattr(headless, "_SHARE", 2)
    (port,) = find_ports(1)
    FollowerHealth().listen("127.0.0.1", port)
    yield port


def connect(port: int, source: str) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), 30, (source, 0))


def ask(port: int) -> int:
    return httpx.get(f"http://127.0.0.1:{port}/health/live", timeout=30).status_code


def test_it_listens_on_the_address_that_is_given(port: int) -> None:
    assert ask(port) == 200
    assert httpx.get(f"http://127.0.0.1:{port}/health/ready", timeout=30).status_code == 503
    assert "jaxserve:follower_steps 0.0" in httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=30).text
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", port), 30)


def test_a_taken_port_is_named(port: int) -> None:
    with pytest.raises(
        ConfigError, match=rf"health_port: cannot listen on 127\.0\.0\.1:{port}: Address already in use"
    ):
        FollowerHealth().listen("127.0.0.1", port)


def test_a_silent_address_leaves_places_for_others(port: int) -> None:
    with contextlib.ExitStack() as stack:
        silent = [stack.enter_context(connect(port, "127.0.0.2")) for _ in range(3)]
        assert silent[2].recv(1) == b"", "beyond its share"
        assert ask(port) == 200


def test_a_request_has_a_time_as_a_whole(port: int) -> None:
    """A byte before each wait is over held a thread for ever."""
    with connect(port, "127.0.0.2") as client, contextlib.suppress(ConnectionError):
        deadline = time.monotonic() + 60
        client.settimeout(0.2)
        while time.monotonic() < deadline:
            client.sendall(b"G")
            with contextlib.suppress(TimeoutError):
                if client.recv(1) == b"":
                    return
        pytest.fail("it is still open")


def test_places_come_back(port: int) -> None:
    for _ in range(9):  # more than there are
        with connect(port, "127.0.0.2") as client, contextlib.suppress(ConnectionError):
            client.sendall(b"nonsense\r\n\r\n")
            while client.recv(2**16):
                continue
    deadline = time.monotonic() + 60
    while not is_answered(port, "127.0.0.2"):  # the last place is left just after its connection ends
        assert time.monotonic() < deadline


def is_answered(port: int, source: str) -> bool:
    with connect(port, source) as client, contextlib.suppress(ConnectionError):
        client.sendall(b"GET /health/live HTTP/1.0\r\n\r\n")
        return client.recv(2**16).startswith(b"HTTP/1.0 200")
    return False

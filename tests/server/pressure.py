"""What tests of load and abuse share: raw requests, streams to look at, and the look that all is as before."""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import time
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import httpx

from tests.server.running import RunningServer

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
_PROBE = {"prompt": "Once upon a time", "max_tokens": 16, "temperature": 0}
_GAUGES = ("num_requests_running", "num_requests_waiting", "num_queued_tokens", "kv_cache_usage_perc")


def complete(server: RunningServer, **body: Any) -> httpx.Response:
    """Asks for a completion, on a connection of its own."""
    return httpx.post(server.url + COMPLETIONS, json={"prompt": "Once upon a time", **body}, timeout=120)


def probe(server: RunningServer) -> str:
    """Returns a greedy text, which never changes."""
    response = complete(server, **_PROBE)
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["text"]


def get_status(server: RunningServer, path: str) -> int:
    return httpx.get(server.url + path, timeout=30).status_code


def connect(server: RunningServer, receive_buffer: int | None = None, seconds: float = 60.0) -> socket.socket:
    address = urlsplit(server.url)
    client = socket.socket()
    if receive_buffer is not None:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    client.settimeout(seconds)
    assert address.hostname is not None and address.port is not None
    client.connect((address.hostname, address.port))
    return client


def make_request(path: str, body: dict[str, Any] | bytes, *, length: int | None = None) -> bytes:
    """Returns the bytes of a request that ends its connection."""
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\nconnection: close\r\n"
    return f"{head}content-length: {len(raw) if length is None else length}\r\n\r\n".encode() + raw


def open_stream(server: RunningServer, receive_buffer: int | None = None, **body: Any) -> socket.socket:
    """Begins a stream of a completion; nothing of it is read."""
    client = connect(server, receive_buffer)
    client.sendall(make_request(COMPLETIONS, {"prompt": "Once upon a time", "stream": True, **body}))
    return client


def reset(client: socket.socket) -> None:
    """Leaves without a word, as a client that crashed."""
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.close()


def read_all(client: socket.socket) -> bytes:
    """Reads until the server closes or resets the connection."""
    pieces = []
    with contextlib.suppress(ConnectionError):
        while piece := client.recv(65536):
            pieces.append(piece)
    client.close()
    return b"".join(pieces)


def read_events(client: socket.socket) -> tuple[list[dict[str, Any]], bool]:
    """Reads a stream to its end; returns its events, and whether the last line said that it is whole."""
    head, _, rest = read_all(client).partition(b"\r\n\r\n")
    assert b" 200 " in head.splitlines()[0], head
    body = b""
    while rest:  # chunks, whose sizes stand before them
        size, _, rest = rest.partition(b"\r\n")
        body, rest = body + rest[: int(size, 16)], rest[int(size, 16) + 2 :]
    lines = [line.removeprefix(b"data: ") for line in body.split(b"\n\n") if line]
    return [json.loads(line) for line in lines if line != b"[DONE]"], lines[-1:] == [b"[DONE]"]


def join_text(events: list[dict[str, Any]], index: int = 0) -> str:
    """Returns the text of one choice of a stream."""
    choices = [choice for event in events for choice in event.get("choices", ())]
    return "".join(choice["text"] for choice in choices if choice["index"] == index)


def wait_until(condition: Callable[[], object], seconds: float = 10.0) -> None:
    """Looks now and then; fails when it does not come true."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come true"
        time.sleep(0.02)


def check_idle(server: RunningServer, text: str) -> None:
    """The server does nothing, holds nothing, has lost nothing, and says the same as before."""
    wait_until(lambda: not any(server.metric(f"jaxserve:{name}") for name in _GAUGES))
    started = server.metric("jaxserve:requests_total")
    assert server.metric("jaxserve:request_success_total") == started
    assert probe(server) == text
    assert server.metric("jaxserve:compiles_total") == 0
    assert server.process.poll() is None

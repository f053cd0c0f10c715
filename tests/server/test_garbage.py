"""Requests leave nothing to the garbage collector, whose pauses grow with what it finds and stop all streams."""

from __future__ import annotations

import asyncio
import gc
import json
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import uvicorn
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from jaxserve.request import Request as EngineRequest
from jaxserve.server.app import make_app
from jaxserve.server.http import make_protocol
from jaxserve.server.request_context import RequestContext
from tests.server.pressure import wait_until
from tests.server.test_live import Served, serve

OF_REQUESTS = (RequestContext, RequestResponseCycle, EngineRequest)


@contextmanager
def listen(served: Served) -> Iterator[tuple[str, int]]:
    """Yields the address of a server in this process, over the fake device."""
    protocol = make_protocol(max_head_bytes=4096, head_timeout=30, reading_timeout=30, max_connections=8)
    app = make_app(served.state)
    config = uvicorn.Config(app, port=0, http=protocol, ws="none", lifespan="off", log_config=None)
    server = uvicorn.Server(config)
    thread = threading.Thread(
        target=lambda: asyncio.run(server.serve(), loop_factory=config.get_loop_factory()), daemon=True
    )
    thread.start()
    wait_until(lambda: server.started)
    try:
        yield server.servers[0].sockets[0].getsockname()
        wait_until(lambda: not server.server_state.connections and not server.server_state.tasks)
    finally:
        server.should_exit = True
        thread.join(10)


def ask(address: tuple[str, int], *, stream: bool, leaves: bool) -> None:
    """Sends a request on a connection of its own; reads its answer, or leaves in the middle."""
    raw = json.dumps({"prompt": [5, 6, 7], "max_tokens": 200 if leaves else 5, "stream": stream}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nhost: a\r\nconnection: close\r\ncontent-type: application/json\r\n"
    with socket.create_connection(address, timeout=20) as client:
        client.sendall(f"{head}content-length: {len(raw)}\r\n\r\n".encode() + raw)
        while client.recv(64) and not leaves:
            pass


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("leaves", [False, True])
def test_requests_leave_no_garbage(stream: bool, leaves: bool) -> None:
    debug = gc.get_debug()
    with serve() as served, listen(served) as address:
        ask(address, stream=stream, leaves=leaves)  # the first one imports
        time.sleep(0.1)
        gc.collect()
        gc.disable()
        try:
            for _ in range(3):
                ask(address, stream=stream, leaves=leaves)
            wait_until(lambda: served.state.metrics.num_requests >= 4 and not served.engine.has_unfinished)
            time.sleep(0.1)
            gc.set_debug(gc.DEBUG_SAVEALL)
            gc.collect()
            found = Counter(type(each).__name__ for each in gc.garbage if isinstance(each, OF_REQUESTS))
        finally:
            gc.set_debug(debug)
            gc.garbage.clear()
            gc.enable()
    assert not found

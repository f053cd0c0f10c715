"""The ingress of Ray Serve, with a replica in this process: keys come before bodies."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import pytest
from starlette.types import Message, Receive, Scope, Send

from jaxserve.server.app import make_app
from jaxserve.server.keys import NO_TENANT, hash_key
from jaxserve.tools.cluster.asgi_bridge import ForwardedRequest, run_asgi
from jaxserve.tools.cluster.forwarding import ForwardingApp
from tests.server.asgi import make_state

KEY = "a-key-of-this-test"


class Answer:
    """What a call of a handle returns."""

    def __init__(self, messages: AsyncGenerator[Message]) -> None:
        self._messages = messages
        self.is_cancelled = False

    def __aiter__(self) -> AsyncIterator[Message]:
        return self._messages

    def cancel(self) -> None:
        self.is_cancelled = True


class Handle:
    """One replica, which has the server's own gate; `seen` are the requests that reach it."""

    def __init__(self, app: Any = None) -> None:
        self._app = app or make_app(make_state(), {hash_key(KEY): NO_TENANT})
        self.seen: list[ForwardedRequest] = []
        self.answers: list[Answer] = []

    def remote(self, request: ForwardedRequest) -> Answer:
        self.seen.append(request)
        self.answers.append(Answer(run_asgi(self._app, request)))
        return self.answers[-1]


class Client:
    """A client whose body comes in parts; `read` counts those that were taken."""

    def __init__(self, *parts: bytes) -> None:
        self._parts = list(parts)
        self.read = 0
        self.sent: list[Message] = []

    async def receive(self) -> Message:
        if self.read == len(self._parts):
            await asyncio.Event().wait()  # it neither goes on nor leaves
        part = self._parts[self.read]
        self.read += 1
        return {"type": "http.request", "body": part, "more_body": self.read < len(self._parts)}

    async def send(self, message: Message) -> None:
        self.sent.append(message)

    def ask(self, app: ForwardingApp, method: str, path: str, key: str | None = KEY, **headers: str) -> int:
        """Asks, and returns the status."""
        given = {"host": "engine.example", "content-type": "application/json"} | headers
        given |= {} if key is None else {"authorization": f"Bearer {key}"}
        scope = {
            **{"type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": method, "scheme": "http"},
            **{"path": path, "raw_path": path.encode(), "query_string": b"", "root_path": ""},
            "headers": [(name.replace("_", "-").encode(), value.encode()) for name, value in given.items()],
        }
        asyncio.run(asyncio.wait_for(app(scope, self.receive, self.send), 60))
        return int(self.sent[0]["status"])

    @property
    def error(self) -> Any:
        return json.loads(b"".join(message.get("body", b"") for message in self.sent))["error"]


@pytest.mark.parametrize("key", [None, "another-key"])
def test_a_stranger_is_refused_before_the_body_is_read(key: str | None) -> None:
    handle, client = Handle(), Client(b"{", b"}")
    assert client.ask(ForwardingApp(handle, 100), "POST", "/v1/completions", key) == 401
    assert client.error["code"] == "invalid_api_key"
    assert client.read == 0
    assert [request.scope["path"] for request in handle.seen] == ["/version"]


def test_who_has_the_key_is_answered_by_the_replica() -> None:
    handle, client = Handle(), Client(b'{"prompt": ', b'"Once"}')
    assert client.ask(ForwardingApp(handle, 100), "POST", "/v1/completions", content_length="18") == 503, "no engine"
    last = handle.seen[-1]
    assert (last.scope["path"], last.body, last.prompt) == ("/v1/completions", b'{"prompt": "Once"}', "Once")
    assert not any(name == b"content-length" for name, _ in handle.seen[0].scope["headers"])


@pytest.mark.parametrize(("headers", "read"), [({"content_length": "101"}, 0), ({}, 2)])
def test_a_body_beyond_the_limit_is_read_no_further(headers: dict[str, str], read: int) -> None:
    handle, client = Handle(), Client(b"a" * 60, b"a" * 60, b"a" * 60)
    assert client.ask(ForwardingApp(handle, 100), "POST", "/v1/completions", **headers) == 413
    assert client.read == read and [request.scope["path"] for request in handle.seen] == ["/version"]


def test_what_has_no_body_is_sent_at_once() -> None:
    handle, client = Handle(), Client()
    assert client.ask(ForwardingApp(handle, 100), "GET", "/health/live", None) == 200
    assert [(request.scope["path"], request.body) for request in handle.seen] == [("/health/live", b"")]


def test_a_client_that_leaves_cancels_its_answer() -> None:
    async def answer_never(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        await receive()

    class Leaving(Client):
        async def receive(self) -> Message:
            return {"type": "http.disconnect"}

    async def run() -> None:
        handle = Handle(answer_never)
        scope = {"type": "http", "method": "GET", "path": "/live", "headers": []}
        client = Leaving()
        await asyncio.wait_for(ForwardingApp(handle, 100)(scope, client.receive, client.send), 60)
        assert [answer.is_cancelled for answer in handle.answers] == [True]

    asyncio.run(run())

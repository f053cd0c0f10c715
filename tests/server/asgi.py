"""Requests without a network: an ASGI app is called, and what it sends is kept."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

from starlette.types import ASGIApp, Message, Scope

from jaxserve.config import EngineConfig
from jaxserve.engine.async_engine import AsyncLLM
from jaxserve.engine.engine import Engine
from jaxserve.engine.view import EngineView
from jaxserve.server.metrics import ServerMetrics
from jaxserve.server.options import ServerConfig
from jaxserve.server.server_state import Phase, ServerState


class Answer:
    """What an app sent."""

    def __init__(self) -> None:
        self.messages: list[Message] = []

    @property
    def status(self) -> int:
        return self.messages[0]["status"]

    @property
    def headers(self) -> dict[str, str]:
        return {name.decode().lower(): value.decode() for name, value in self.messages[0]["headers"]}

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.messages[1:])

    @property
    def error(self) -> dict[str, Any]:
        return json.loads(self.body)["error"]

    @property
    def is_whole(self) -> bool:
        return bool(self.messages) and self.messages[-1].get("more_body") is False


class Client:
    """One request: what it sends, when it leaves and when it reads."""

    def __init__(self, *, leaves: bool = False) -> None:
        self.answer = Answer()
        self.left, self.reads = asyncio.Event(), asyncio.Event()
        self.reads.set()
        if leaves:
            self.left.set()
        self._body: list[Message] = [{"type": "http.request", "body": b"{}", "more_body": False}]

    async def receive(self) -> Message:
        if self._body:
            return self._body.pop()
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        await self.reads.wait()
        self.answer.messages.append(message)

    async def ask(self, app: ASGIApp, scope: Scope) -> Answer:
        await app(scope, self.receive, self.send)
        return self.answer


def make_scope(path: str, method: str = "POST", headers: Iterable[tuple[str, str]] = (), **changes: Any) -> Scope:
    raw = [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in headers]
    scope: Scope = {"type": "http", "method": method, "path": path, "headers": raw, "client": ("1.2.3.4", 5)}
    return scope | {"query_string": b"", "root_path": ""} | changes


def make_state(phase: Phase = Phase.READY, **options: Any) -> ServerState:
    config = ServerConfig.from_options(**options)
    return ServerState(config, EngineConfig.from_options(), ServerMetrics("demo"), phase=phase)


def wrap_engine(engine: Engine, **parts: Any) -> AsyncLLM:
    """Returns an AsyncLLM that has no thread; `parts` are those of `ReadyEngine` that a test needs."""
    llm = AsyncLLM.__new__(AsyncLLM)
    llm._ready = SimpleNamespace(engine=engine, **parts)  # type: ignore[assignment]
    llm.view = EngineView(llm._ready)
    return llm

"""Runs an ASGI application for a request that comes as one value and is answered by a stream of messages."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

from starlette.types import ASGIApp, Message

_UNREAD = 64  # messages that the application may be ahead of its reader


@dataclass(frozen=True)
class ForwardedRequest:
    """A request on its way to a replica. A router that knows prefixes reads `prompt`."""

    scope: dict[str, Any]  # of ASGI, without what only its server's process has
    body: bytes
    prompt: str  # what it begins with; never empty, as Ray's router divides by its length


def find_prompt(body: bytes) -> str:
    """Returns the prompt of a body, or its messages as JSON, whose prefixes are as long; empty if there are none."""
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        return ""
    if not isinstance(value, dict):
        return ""
    found = next((value[name] for name in ("messages", "prompt", "input") if value.get(name)), "")
    return found if isinstance(found, str) else json.dumps(found)


async def run_asgi(app: ASGIApp, request: ForwardedRequest) -> AsyncGenerator[Message]:
    """Yields the application's messages; if the generator is closed early, the application hears `http.disconnect`."""
    messages: asyncio.Queue[Message | None] = asyncio.Queue(_UNREAD)
    left, is_read = asyncio.Event(), False

    async def receive() -> Message:
        nonlocal is_read
        if not is_read:
            is_read = True
            return {"type": "http.request", "body": request.body, "more_body": False}
        await left.wait()
        return {"type": "http.disconnect"}

    async def run() -> None:
        try:
            await app(dict(request.scope), receive, messages.put)
        finally:
            await messages.put(None)

    running = asyncio.ensure_future(run())
    try:
        while (message := await messages.get()) is not None:
            yield message
        await running  # raises what it raised
    finally:
        left.set()
        if not running.done():
            await _end(running, messages)


async def _end(running: asyncio.Future[None], messages: asyncio.Queue[Message | None]) -> None:
    """Lets the application end by itself, as it does when a client leaves; what it still says is dropped."""
    while not running.done():
        with contextlib.suppress(asyncio.QueueEmpty):
            messages.get_nowait()
        await asyncio.sleep(0)
    with contextlib.suppress(Exception):
        running.result()

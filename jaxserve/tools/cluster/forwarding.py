"""An ASGI application whose answers come from a replica; it takes a body once a replica has accepted the key."""

from __future__ import annotations

import asyncio
from typing import Any, Protocol

from starlette.types import Receive, Scope, Send

from jaxserve.server.gate import too_large
from jaxserve.tools.cluster.asgi_bridge import ForwardedRequest, find_prompt

_SCOPE_FIELDS = ("type", "asgi", "http_version", "method", "scheme", "path", "raw_path", "query_string", "root_path")
_WITHOUT_BODY = ("GET", "HEAD", "OPTIONS")
_KEYED_PATH = "/version"  # needs a key where the server has any, and nothing else
_OF_BODY = (b"content-length", b"content-type", b"content-encoding", b"transfer-encoding", b"expect")


class Replicas(Protocol):
    """A handle of Ray Serve, whose calls are streamed."""

    def remote(self, request: ForwardedRequest) -> Any:
        """Returns the messages of an answer, to iterate over asynchronously; `cancel()` ends it."""
        ...


class ForwardingApp:
    """Sends each request to a replica, as one value.

    Args:
        max_body_bytes: larger bodies get a 413, and are read no further.
    """

    def __init__(self, replicas: Replicas, max_body_bytes: int) -> None:
        self._replicas, self._max_body_bytes = replicas, max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request; a client that leaves cancels its replica's work."""
        if scope["type"] == "lifespan":
            await _live(receive, send)
            return
        body: bytes | None = b""
        if scope["method"] not in _WITHOUT_BODY:
            if await self._is_refused(scope, send):
                return
            body = await self._read_body(scope, receive)
        if body is None:
            await too_large(self._max_body_bytes).to_response(scope["path"])(scope, receive, send)
            return
        answer = self._replicas.remote(_forward(scope, body))
        sending = asyncio.ensure_future(_pass_on(answer, send))
        leaving = asyncio.ensure_future(_wait_for_leave(receive))
        try:
            await asyncio.wait((sending, leaving), return_when=asyncio.FIRST_COMPLETED)
            if not sending.done():
                answer.cancel()
            else:
                sending.result()
        finally:
            sending.cancel()
            leaving.cancel()

    async def _is_refused(self, scope: Scope, send: Send) -> bool:
        """Whether a replica refuses the key, the host or the origin; its answer is then sent."""
        headers = [(name, value) for name, value in scope["headers"] if bytes(name).lower() not in _OF_BODY]
        path = {"path": _KEYED_PATH, "raw_path": _KEYED_PATH.encode(), "query_string": b""}
        head = _forward({**scope, "method": "GET", "headers": headers, **path}, b"")
        messages = [message async for message in self._replicas.remote(head)]
        if messages[0]["status"] < 400:
            return False
        for message in messages:
            await send(message)
        return True

    async def _read_body(self, scope: Scope, receive: Receive) -> bytes | None:
        """Returns the body; None as soon as it is too large."""
        length = next(
            (bytes(value) for name, value in scope["headers"] if bytes(name).lower() == b"content-length"), b""
        )
        if length.isdigit() and int(length[:20]) > self._max_body_bytes:
            return None
        parts, size, more = [], 0, True
        while more:
            message = await receive()
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            if size > self._max_body_bytes:
                return None
            more = message.get("more_body", False)
        return b"".join(parts)


async def _live(receive: Receive, send: Send) -> None:
    while (kind := (await receive())["type"]) != "lifespan.shutdown":
        await send({"type": f"{kind}.complete"})
    await send({"type": "lifespan.shutdown.complete"})


async def _wait_for_leave(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _pass_on(answer: Any, send: Send) -> None:
    async for message in answer:
        await send(message)


def _forward(scope: Scope, body: bytes) -> ForwardedRequest:
    kept = {name: scope[name] for name in _SCOPE_FIELDS if name in scope}
    kept["headers"] = [(bytes(name), bytes(value)) for name, value in scope["headers"]]
    kept["client"] = scope.get("client")
    return ForwardedRequest(kept, body, find_prompt(body) or scope["path"])

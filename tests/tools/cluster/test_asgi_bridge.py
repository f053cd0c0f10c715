"""An ASGI application whose request comes as one value."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from starlette.types import Message, Receive, Scope, Send

from jaxserve.tools.cluster.asgi_bridge import ForwardedRequest, find_prompt, run_asgi

REQUEST = ForwardedRequest({"type": "http", "path": "/", "headers": []}, b"hello", "hello")


async def collect(app: Any) -> list[Message]:
    return [message async for message in run_asgi(app, REQUEST)]


def test_messages_arrive_in_order_and_the_body_is_read_once() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        message = await receive()
        assert (message["body"], message["more_body"]) == (b"hello", False) and scope["path"] == "/"
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for index in range(200):  # more than may be unread
            await send({"type": "http.response.body", "body": str(index).encode(), "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    found = asyncio.run(collect(app))
    assert [message.get("body") for message in found[1:-1]] == [str(index).encode() for index in range(200)]


def test_an_error_of_the_application_reaches_the_reader() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        asyncio.run(collect(app))


def test_a_reader_that_stops_is_a_client_that_left() -> None:
    heard: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        async def talk() -> None:
            while True:
                await send({"type": "http.response.body", "body": b"x", "more_body": True})

        await receive()
        talking = asyncio.ensure_future(talk())
        heard.append((await receive())["type"])
        talking.cancel()

    async def leave() -> None:
        messages = run_asgi(app, REQUEST)
        for _ in range(100):
            await anext(messages)
        await messages.aclose()

    asyncio.run(asyncio.wait_for(leave(), 30))
    assert heard == ["http.disconnect"]


@pytest.mark.parametrize(
    ("body", "prompt"),
    [
        (b'{"prompt": "Once", "n": 2}', "Once"),
        (b'{"messages": [{"role": "user", "content": ""}]}', '[{"role": "user", "content": ""}]'),
        (b'{"input": ["a", "b"]}', '["a", "b"]'),
        (b'{"prompt": ""}', ""),
        (b'{"prompt": 3}', "3"),
        (b"[1]", ""),
        (b"nonsense", ""),
        (b"\xff", ""),
        (b"[" * 100_000, ""),
        (b"", ""),
    ],
)
def test_a_prompt_is_a_text_whatever_the_body(body: bytes, prompt: str) -> None:
    assert find_prompt(body) == prompt

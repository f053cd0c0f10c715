"""Bodies: how much of them the server holds at once, and how many members each may have."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.types import Message, Receive, Scope, Send

from jaxserve.request import ServiceTier
from jaxserve.server import body as bodies
from jaxserve.server.body import MAX_ITEMS, MAX_KEYS, read_body
from jaxserve.server.budget import FREE_BYTES
from jaxserve.server.errors import ApiError
from jaxserve.server.gate import Guard
from jaxserve.server.protocol.completions import CompletionRequest
from jaxserve.server.server_state import ServerState
from tests.engine.helpers import make_engine
from tests.server.asgi import Answer, make_scope, make_state, wrap_engine

JSON = ("Content-Type", "application/json")
MIB = 2**20


class Sender:
    """A client that sends its body piece by piece, when it is told to."""

    def __init__(self, state: ServerState, *, prepares: bool = False) -> None:
        self._pieces: asyncio.Queue[Message] = asyncio.Queue()
        self._goes_on = asyncio.Event()
        self._prepares = prepares
        self.answer = Answer()
        self._state = state
        state.llm = wrap_engine(make_engine()[0])
        scope = make_scope("/anything", "POST", [JSON])
        self.task = asyncio.ensure_future(Guard(self._take, state, {})(scope, self._pieces.get, self._keep))

    async def send(self, piece: bytes, *, more: bool = True) -> None:
        self._pieces.put_nowait({"type": "http.request", "body": piece, "more_body": more})
        for _ in range(5):
            await asyncio.sleep(0)

    async def end(self) -> Answer:
        self._goes_on.set()
        await asyncio.wait_for(self.task, 10)
        return self.answer

    async def _keep(self, message: Message) -> None:
        self.answer.messages.append(message)

    async def _take(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        body = await read_body(request, CompletionRequest, self._state)
        if self._prepares:
            scope["app"] = None
            await bodies.prepare(request, body, self._state, lambda *_: None)
            assert self._state.bodies.held == 0, "what is prepared is no body any more"
        await self._goes_on.wait()
        await PlainTextResponse("read")(scope, receive, send)


def make_body(size: int) -> bytes:
    return json.dumps({"prompt": "x" * size}).encode()


def test_bodies_that_are_held_together_have_a_bound() -> None:
    async def run() -> None:
        state = make_state(max_body_bytes_total=2 * MIB)
        held = [Sender(state) for _ in range(2)]
        for sender in held:
            await sender.send(b"x" * (MIB + FREE_BYTES))
        assert state.bodies.held == 2 * MIB
        late = Sender(state)
        await late.send(b"x" * FREE_BYTES)
        assert not late.task.done()
        await late.send(b"x")
        refused = await late.end()
        assert refused.status == 429 and int(refused.headers["retry-after"]) > 0
        assert refused.error["code"] == "too_many_body_bytes" and refused.headers["connection"] == "close"
        small = Sender(state)
        await small.send(make_body(100), more=False)
        assert (await small.end()).status == 200, "who says little is served beside them"
        for sender in held:
            await sender.send(b"", more=False)
            assert (await sender.end()).status == 400
        assert state.bodies.held == 0

    asyncio.run(run())


def test_a_body_that_does_not_come_to_its_end_is_given_back() -> None:
    async def run() -> None:
        state = make_state()
        left, cancelled = Sender(state), Sender(state)
        for sender in (left, cancelled):
            await sender.send(b"x" * MIB)
        assert state.bodies.held > MIB
        left._pieces.put_nowait({"type": "http.disconnect"})
        assert (await left.end()).status == 499
        cancelled.task.cancel()
        await asyncio.wait([cancelled.task])
        assert state.bodies.held == 0

    asyncio.run(run())


def test_a_body_is_given_back_when_it_is_prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"service_tier": ServiceTier.DEFAULT, "lora_request": None}
    monkeypatch.setattr(bodies, "make_request_options", lambda *_: options)

    async def run() -> None:
        sender = Sender(make_state(), prepares=True)
        await sender.send(make_body(MIB), more=False)
        assert (await sender.end()).status == 200

    asyncio.run(run())


@pytest.mark.parametrize(
    "pieces",
    [
        (b"{", b'"a":1,', b"}"),
        (b"{", b'"a" \n:\t1,', b"}"),
        (b'{"metadata":{', b'"a\\\\":"x",', b"}}"),  # its key ends with a backslash
        (b'{"logit_bias":{', b'"\\\\\\\\":1,', b"}}"),
    ],
)
def test_a_million_keys_are_refused_before_they_are_parsed(pieces: tuple[bytes, bytes, bytes]) -> None:
    raw = pieces[0] + pieces[1] * 1_000_000 + pieces[2]
    assert find_refusal(raw) == "body_too_large"


@pytest.mark.parametrize("member", [b"1", b"[]", b"{}", b'""'])
def test_so_are_too_many_items(member: bytes) -> None:
    assert find_refusal(b'{"prompt":[' + (member + b",") * MAX_ITEMS + member + b"]}") == "body_too_large"


@pytest.mark.parametrize(
    "text", [": " * 100_000, '"a": 1; ' * 100_000, '{\\"a\\": 1} ' * 100_000, json.dumps('{"a":1} ') * 100_000]
)
def test_texts_about_keys_hold_none(text: str) -> None:
    raw = json.dumps({"prompt": text}).encode()
    assert raw.count(b":") > MAX_KEYS
    assert find_refusal(raw) is None


def find_refusal(raw: bytes) -> str | None:
    try:
        bodies._parse_large(raw, CompletionRequest)
    except ApiError as error:
        return error.code
    return None


def test_a_large_body_passes() -> None:
    async def run(options: dict[str, Any]) -> Answer:
        sender = Sender(make_state(**options))
        await sender.send(make_body(MIB), more=False)
        return await sender.end()

    assert asyncio.run(run({})).status == 200
    assert asyncio.run(run({"max_body_bytes": MIB})).status == 413

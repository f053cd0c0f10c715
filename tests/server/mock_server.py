"""A small server that speaks the protocol of ours, with answers and an engine that tests decide."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from importlib import resources
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from starlette.responses import JSONResponse, Response, StreamingResponse

POLICY = (
    "default-src 'none'; style-src 'self' 'unsafe-inline'; script-src 'self' 'unsafe-inline'; "
    "connect-src 'self'; img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
MARKUP = '<img src=x onerror="window.hacked=1"> <b>bold</b> **bold**'
TEXTS = {"markup": [MARKUP], "long": [f"word{at} " for at in range(2000)]}  # of answers, by the question
WORDS = ["A ", "cache ", "of ", "keys."]
CALLS = (("add", ['{"a": 2', ', "b": 40}']), ("lookup", ['{"term": ', '"a wug"}']))
NUM_ROWS, NUM_RUNNING = 8, 3
PAGE_MAP = "3" * 4 + "2" * 16 + "1" * 10 + "0" * 34


class MockServer:
    """What the playground sees of a server."""

    def __init__(self) -> None:
        self.key: str | None = None
        self.health: dict[str, Any] = {"status": "ready"}
        self.drops_live = False
        self.models = ["demo"]
        self.chats: list[dict[str, Any]] = []
        self.completions: list[dict[str, Any]] = []
        self.num_aborted = self.num_live = 0
        self.app = FastAPI()
        self.app.add_api_route("/", lambda: read_page("index.html"))
        self.app.add_api_route("/playground/{name}", read_page)
        self.app.add_api_route("/health", lambda: JSONResponse(self.health, self.status))
        self.app.add_api_route("/v1/models", self.list_models)
        self.app.add_api_route("/live", self.watch)
        self.app.add_api_route("/tokenize", self.tokenize, methods=["POST"])
        self.app.add_api_route("/v1/completions", self.complete, methods=["POST"])
        self.app.add_api_route("/v1/chat/completions", self.chat, methods=["POST"])
        self.server = uvicorn.Server(
            uvicorn.Config(self.app, port=0, log_level="warning", timeout_graceful_shutdown=1, lifespan="off")
        )
        self.thread = threading.Thread(target=self.server.run, daemon=True)

    @property
    def status(self) -> int:
        return 200 if self.health["status"] == "ready" else 503

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.servers[0].sockets[0].getsockname()[1]}"

    def refuse(self, http: Request) -> JSONResponse | None:
        """The answer to a request without the right key."""
        if self.key is None or http.headers.get("authorization") == f"Bearer {self.key}":
            return None
        return make_error(401, "Incorrect API key provided.", code="invalid_api_key")

    async def list_models(self, http: Request) -> Response:
        cards = [{"id": name, "object": "model"} for name in self.models]
        return self.refuse(http) or JSONResponse({"object": "list", "data": cards})

    async def tokenize(self, http: Request) -> Response:
        return self.refuse(http) or JSONResponse({"tokens": [1, 2, 3]})

    async def watch(self, http: Request) -> Response:
        async def look() -> AsyncIterator[str]:
            self.num_live += 1
            for step in range(10_000):
                yield f"data: {json.dumps(make_look(step))}\n\n"
                if self.drops_live and step == 3:
                    return
                await asyncio.sleep(0.05)

        return self.refuse(http) or StreamingResponse(look(), media_type="text/event-stream")

    async def complete(self, http: Request) -> Response:
        body = await http.json()
        self.completions.append(body)
        ends = [{"index": at, "text": "x", "finish_reason": "length"} for at in range(len(body["prompt"]))]
        events = [json.dumps({"choices": [end]}) for end in ends]
        return Response("".join(f"data: {each}\n\n" for each in [*events, "[DONE]"]), media_type="text/event-stream")

    async def chat(self, http: Request) -> Response:
        if (refusal := self.refuse(http)) is not None:
            return refusal
        body = await http.json()
        self.chats.append(body)
        if body.get("temperature", 1) > 2:
            return make_error(400, "temperature must be at most 2, got 3", param="temperature", code="invalid_value")
        answer = (
            self.call() if body["messages"][-1]["content"] == "call" else self.answer(body["messages"][-1]["content"])
        )
        return StreamingResponse(answer, media_type="text/event-stream")

    async def call(self) -> AsyncIterator[str]:
        """Two calls, in pieces."""
        yield make_chunk({"role": "assistant", "content": ""})
        for index, (name, pieces) in enumerate(CALLS):
            begun = {"index": index, "id": f"call_{index}", "type": "function"}
            yield make_chunk({"tool_calls": [begun | {"function": {"name": name, "arguments": ""}}]})
            for piece in pieces:
                yield make_chunk({"tool_calls": [{"index": index, "function": {"arguments": piece}}]})
        yield make_chunk({}, "tool_calls")
        yield "data: [DONE]\n\n"

    async def answer(self, question: str) -> AsyncIterator[str]:
        words, is_whole = TEXTS.get(question, WORDS), False
        deltas = [{"reasoning_content": "Let me see."}] if question == "think" else []
        deltas += [{"content": word} for word in words]
        try:
            yield make_chunk({"role": "assistant", "content": ""})
            for delta in deltas:
                await asyncio.sleep(0.02)
                yield make_chunk(delta)
            yield make_chunk({}, "stop")
            usage = {"prompt_tokens": 7, "completion_tokens": len(words), "total_tokens": 7 + len(words)}
            yield f"data: {json.dumps({'choices': [], 'usage': usage})}\n\ndata: [DONE]\n\n"
            is_whole = True
        finally:
            self.num_aborted += not is_whole


def read_page(name: str) -> Response:
    content = (resources.files("jaxserve.server") / "playground" / name).read_bytes()
    kind = {"html": "text/html", "js": "text/javascript", "css": "text/css"}[name.rpartition(".")[2]]
    return Response(content, media_type=kind, headers={"content-security-policy": POLICY})


def make_error(status: int, message: str, param: str | None = None, code: str | None = None) -> JSONResponse:
    error = {"message": message, "type": "invalid_request_error", "param": param, "code": code}
    return JSONResponse({"error": error}, status)


def make_chunk(delta: dict[str, Any], reason: str | None = None) -> str:
    return f"data: {json.dumps({'choices': [{'index': 0, 'delta': delta, 'finish_reason': reason}]})}\n\n"


def make_look(step: int) -> dict[str, Any]:
    """Three rows run; the middle one is in its prompt."""
    running = [
        {"row": row, "id": f"ab12c{row}", "prompt": 34, "computed": 34, "tokens": 34 + step, "phase": "decode"}
        for row in range(NUM_RUNNING)
    ]
    running[1] |= {"phase": "prefill", "tokens": 34}
    for row, (tier, tenant) in enumerate((("default", ""), ("flex", "crawler"), ("priority", "chat"))):
        running[row] |= {"service_tier": tier, "tenant": tenant, "priority": 0}
    names = ("prompt_tokens", "generation_tokens", "requests", "steps", "useful_tokens", "padded_tokens")
    return {
        "time": 100 + 0.25 * step,
        "model": "demo",
        "state": "ready",
        "rows": {"max": NUM_ROWS, "running": running, "waiting": 2, "waiting_by_tenant": {"crawler": 2}},
        "pages": {
            "total": 64,
            "used": 20,
            "cached": 10,
            "page_size": 32,
            "map": "3" * 4 + "2" * 16 + "1" * 10 + "0" * 34,
        },
        "counters": dict.fromkeys(names, 10 * step) | {"prefix_queries": 40 * step, "prefix_hits": 10 * step},
        "latency": {"ttft_ms": {"p50": 12.5, "p99": 80}, "itl_ms": {"p50": None, "p99": None}},
    }

"""The load of `soak_server.py`: every kind of request that a server meets, malformed and abandoned ones included."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import socket
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import httpx

STORIES = ("Once upon a time", "There was a cat", "In the morning", "The old house", "A robot", "Name: Ada")
CHAT = {"messages": [{"role": "user", "content": "What is a KV cache?"}]}
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
LONG_WORDS = 500  # in a long prompt
SLEEP_SECONDS = 6.0  # pause of a client that does not read, longer than the server waits
BAD_BODIES: tuple[tuple[bytes, int], ...] = (
    (b'{"prompt": "Once", "max_tok', 400),
    (b"\xff\xfe\x00", 400),
    (b"[" * 5000, 400),
    (b'{"prompt": "Once", "no_such_field": 1}', 400),
    (b'{"prompt": "Once", "temperature": -1}', 400),
    (b'{"prompt": "Once", "model": "another"}', 404),
    (b'{"prompt": ["' + b'","' * 5000 + b'"]}', 400),
)


@dataclass
class Tally:
    """The results of one kind of request."""

    seconds: list[float] = field(default_factory=list)  # durations of the successful requests
    num_left: int = 0  # requests whose client left on purpose
    failures: list[str] = field(default_factory=list)  # what should not have happened


class Load:
    """Users who each send one request after another until they are told to stop."""

    def __init__(self, url: str, seed: int) -> None:
        self._url, self._draw = url, random.Random(seed)
        address = urlsplit(url)
        assert address.hostname is not None and address.port is not None
        self._address = address.hostname, address.port
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=16)
        self._client = httpx.AsyncClient(base_url=url, timeout=120, limits=limits)
        self._texts: dict[str, str] = {}  # greedy answers, which never change
        self.kinds: dict[str, tuple[Callable[[], Awaitable[bool]], int]] = {
            "whole": (self._ask_whole, 4),
            "stream": (self._ask_stream, 6),
            "chat stream": (self._ask_chat, 4),
            "several, logprobs": (self._ask_several, 2),
            "structured": (self._ask_structured, 2),
            "embeddings": (self._ask_embeddings, 2),
            "long prompt": (self._ask_long, 1),
            "tokenize": (self._tokenize, 1),
            "deadline": (self._ask_late, 1),
            "bad body": (self._send_bad, 3),
            "leave": (self._leave, 5),
            "sleep": (self._sleep, 1),
        }
        self.tallies = {kind: Tally() for kind in self.kinds}

    async def close(self) -> None:
        await self._client.aclose()

    async def learn_texts(self) -> None:
        """Asks for each story alone and twice; the second time its prefix is cached."""
        for story in STORIES * 2:
            await self._compare(story, await self._read_story(story, streams=False))

    async def run(self, num_users: int, seconds: float) -> None:
        """Keeps `num_users` busy for `seconds`, then waits for their last answers."""
        end = time.monotonic() + seconds
        await asyncio.gather(*(self._use(end) for _ in range(num_users)))

    async def _use(self, end: float) -> None:
        names = list(self.kinds)
        weights = [weight for _, weight in self.kinds.values()]
        while time.monotonic() < end:
            (kind,) = self._draw.choices(names, weights)
            tally, start = self.tallies[kind], time.monotonic()
            try:
                has_answer = await self.kinds[kind][0]()
            except (httpx.HTTPError, OSError, AssertionError, KeyError, ValueError) as error:
                tally.failures.append(f"{type(error).__name__}: {error}"[:300])
                await asyncio.sleep(0.1)
                continue
            if has_answer:
                tally.seconds.append(time.monotonic() - start)
            else:
                tally.num_left += 1

    # Users who get an answer

    async def _post(self, path: str, body: dict[str, Any], status: int = 200) -> dict[str, Any]:
        response = await self._client.post(path, json=body)
        assert response.status_code == status, f"{path}: {response.status_code} {response.text[:200]}"
        return response.json()

    async def _read_events(self, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        """Returns the events of a stream, which must be complete."""
        events, is_whole = [], False
        async with self._client.stream("POST", path, json={**body, "stream": True}) as response:
            assert response.status_code == 200, f"{path}: {response.status_code}"
            async for line in response.aiter_lines():
                is_whole = line == "data: [DONE]" or (is_whole and not line)
                if line.startswith("data: {"):
                    events.append(json.loads(line.removeprefix("data: ")))
        assert is_whole, f"{path}: the stream was cut"
        assert not any("error" in event for event in events), f"{path}: {events[-1]}"
        return events

    async def _read_story(self, story: str, *, streams: bool) -> str:
        body = {"prompt": story, "temperature": 0, "max_tokens": 40}
        if not streams:
            return (await self._post("/v1/completions", body))["choices"][0]["text"]
        events = await self._read_events("/v1/completions", body)
        return "".join(choice["text"] for event in events for choice in event["choices"])

    async def _compare(self, story: str, text: str) -> None:
        assert self._texts.setdefault(story, text) == text, f"a greedy text has changed: {story!r} {text!r}"

    async def _ask_whole(self) -> bool:
        story = self._draw.choice(STORIES)
        await self._compare(story, await self._read_story(story, streams=False))
        return True

    async def _ask_stream(self) -> bool:
        story = self._draw.choice(STORIES)
        await self._compare(story, await self._read_story(story, streams=True))
        return True

    async def _ask_chat(self) -> bool:
        body = {**CHAT, "max_tokens": self._draw.randint(1, 80), "stream_options": {"include_usage": True}}
        events = await self._read_events("/v1/chat/completions", body)
        assert events[-1]["usage"]["completion_tokens"] >= 1
        return True

    async def _ask_several(self) -> bool:
        body = {"prompt": [self._draw.choice(STORIES)] * 2, "n": 3, "logprobs": 3, "max_tokens": 20, "temperature": 1.0}
        assert len((await self._post("/v1/completions", body))["choices"]) == 6
        return True

    async def _ask_structured(self) -> bool:
        schema = {"name": "person", "schema": SCHEMA}
        body = {**CHAT, "max_tokens": 80, "response_format": {"type": "json_schema", "json_schema": schema}}
        choice = (await self._post("/v1/chat/completions", body))["choices"][0]
        if choice["finish_reason"] == "stop":
            assert set(json.loads(choice["message"]["content"])) == {"name", "age"}
        return True

    async def _ask_embeddings(self) -> bool:
        data = (await self._post("/v1/embeddings", {"input": list(STORIES)}))["data"]
        assert len(data) == len(STORIES)
        return True

    async def _ask_long(self) -> bool:
        words = self._draw.choices(("cat", "dog", "house", "tree", "river"), k=LONG_WORDS)
        answer = await self._post("/v1/completions", {"prompt": " ".join(words), "max_tokens": 4})
        assert answer["usage"]["prompt_tokens"] >= LONG_WORDS
        return True

    async def _tokenize(self) -> bool:
        ids = (await self._post("/tokenize", {"prompt": "word " * 2000}))["tokens"]
        await self._post("/detokenize", {"tokens": ids[:500]})
        return True

    async def _ask_late(self) -> bool:
        body = {"prompt": "Once", "max_tokens": 900, "ignore_eos": True, "timeout": 0.2}
        await self._post("/v1/completions", body, status=504)
        return True

    async def _send_bad(self) -> bool:
        body, status = self._draw.choice(BAD_BODIES)
        headers = {"content-type": "application/json"}
        response = await self._client.post("/v1/completions", content=body, headers=headers)
        assert response.status_code == status, f"{body[:40]!r}: {response.status_code} instead of {status}"
        return True

    # Users who do not wait for one

    def _make_raw(self, body: dict[str, Any]) -> bytes:
        raw = json.dumps(body).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: {len(raw)}\r\n\r\n"
        return head.encode() + raw

    async def _leave(self) -> bool:
        body = {"prompt": self._draw.choice(STORIES), "max_tokens": 300, "stream": self._draw.random() < 0.5}
        data = self._make_raw(body)
        reader, writer = await asyncio.open_connection(*self._address)
        writer.write(data[: self._draw.randrange(1, len(data))] if self._draw.random() < 0.2 else data)
        await asyncio.sleep(self._draw.random() * 0.3)
        with contextlib.suppress(TimeoutError, ConnectionError):
            await asyncio.wait_for(reader.read(200), 0.05)
        writer.transport.abort()
        return False

    async def _sleep(self) -> bool:
        loop, client = asyncio.get_running_loop(), socket.socket()
        try:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.setblocking(False)
            await loop.sock_connect(client, self._address)
            body = {"prompt": "Once", "max_tokens": 900, "ignore_eos": True, "n": 2, "logprobs": 20, "stream": True}
            await loop.sock_sendall(client, self._make_raw(body))
            await asyncio.sleep(SLEEP_SECONDS)
        finally:
            client.close()
        return False

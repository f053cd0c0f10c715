"""A tiny OpenAI server in a thread, whose answers are scripts: what to send, and when."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

DONE = b"data: [DONE]\n\n"
MODELS = {"object": "list", "data": [{"id": "fake", "max_model_len": 1024}]}


@dataclass
class Script:
    """One answer. `cut` closes the connection instead of ending the answer; status 0 is no answer at all."""

    status: int = 200
    body: Any = None  # sent as JSON instead of events
    events: tuple[Any, ...] = ()  # dictionaries, or bytes that are sent as they are
    delay: float = 0.0  # seconds in front of each event
    cut: bool = False
    keeps_alive: bool = True
    at_once: int = 0  # requests that must have been here at once before this one is answered


def stream(num_tokens: int, *, delay: float = 0.0, usage: bool = True, chat: bool = False, cached: int = 0) -> Script:
    """A streamed answer of that many chunks of one token."""
    texts = [f"w{at} " for at in range(num_tokens)]
    choices = [{"delta": {"content": text}} if chat else {"text": text} for text in texts]
    choices[-1]["finish_reason"] = "length"
    events: list[Any] = [{"choices": [choice]} for choice in choices]
    if chat:
        events.insert(0, {"choices": [{"delta": {"role": "assistant", "content": ""}}]})
    if usage:
        counts = {"prompt_tokens": 7, "completion_tokens": num_tokens, "total_tokens": 7 + num_tokens}
        events.append({"choices": [], "usage": counts | {"prompt_tokens_details": {"cached_tokens": cached}}})
    return Script(events=(*events, DONE), delay=delay)


@dataclass
class FakeServer:
    """What has been asked, and how many at once."""

    answer: Callable[[dict[str, Any]], Script]
    get: Callable[[str], Script | None] = lambda path: None
    port: int = 0
    bodies: list[dict[str, Any]] = field(default_factory=list)
    heads: list[str] = field(default_factory=list)
    num_connections: int = 0
    at_once: int = 0
    most_at_once: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answers the requests of one connection."""
        self.num_connections += 1
        try:
            while head := (await reader.readuntil(b"\r\n\r\n")).decode():
                self.heads.append(head)
                method, path, _ = head.split(" ", 2)
                if method == "GET":
                    script = self.get(path) or Script(body=MODELS if path == "/v1/models" else {}, status=200)
                else:
                    length = next(line for line in head.lower().splitlines() if line.startswith("content-length"))
                    self.bodies.append(json.loads(await reader.readexactly(int(length.partition(":")[2]))))
                    script = self.answer(self.bodies[-1])
                self.at_once += 1
                self.most_at_once = max(self.most_at_once, self.at_once)
                try:
                    while self.most_at_once < script.at_once:
                        await asyncio.sleep(0.01)
                    await _play(script, writer)
                finally:
                    self.at_once -= 1
                if script.cut or not script.keeps_alive:
                    break
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


async def _play(script: Script, writer: asyncio.StreamWriter) -> None:
    if script.status == 0:
        return  # nothing at all
    if script.body is not None:
        is_text = isinstance(script.body, str)
        content = script.body.encode() if is_text else json.dumps(script.body).encode()
        head = f"HTTP/1.1 {script.status} X\r\ncontent-length: {len(content)}\r\n\r\n"
        writer.write(head.encode() + content)
        await writer.drain()
        return
    writer.write(b"HTTP/1.1 %d X\r\ntransfer-encoding: chunked\r\n\r\n" % script.status)
    for event in script.events:
        await asyncio.sleep(script.delay)
        data = event if isinstance(event, bytes) else f"data: {json.dumps(event)}\n\n".encode()
        writer.write(b"%x\r\n%s\r\n" % (len(data), data))
        await writer.drain()
    if not script.cut:
        writer.write(b"0\r\n\r\n")
        await writer.drain()


@contextmanager
def run_fake_server(
    answer: Callable[[dict[str, Any]], Script], get: Callable[[str], Script | None] = lambda path: None
) -> Iterator[FakeServer]:
    """Yields a listening server."""
    server, loop, ready = FakeServer(answer, get), asyncio.new_event_loop(), threading.Event()
    stop = asyncio.Event()

    async def run() -> None:
        listening = await asyncio.start_server(server.serve, "127.0.0.1", 0)
        server.port = listening.sockets[0].getsockname()[1]
        ready.set()
        await stop.wait()
        listening.close()
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()

    thread = threading.Thread(target=loop.run_until_complete, args=(run(),), daemon=True)
    thread.start()
    assert ready.wait(10)
    try:
        yield server
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(10)
        loop.close()

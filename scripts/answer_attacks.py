"""Attacks by answers: those that nobody reads, those that are long, and those whose clients leave."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from urllib.parse import urlsplit

from attacks import Attack, Notes, connect, hold_open, make_head, send, start_plain
from soak_server import MAX_FDS, MAX_GROWTH_MB, Sample, Server, wait_until_idle

MOST_CONNECTIONS, READING_SECONDS = 64, 2
NUM_PIPELINES, NUM_PIPELINED = 80, 330
NUM_STREAMS, LEAVING_SHARE = 512, 0.1
WORDS = "word " * 1900
PAGE = b"GET /playground/playground.js HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n"
CHAT = {"messages": [{"role": "user", "content": "What is a KV cache?"}]}
LONG_ANSWERS = (
    ("/v1/completions", {"prompt": [WORDS] * 24, "max_tokens": 1, "prompt_logprobs": 20}),  # refused
    ("/v1/completions", {"prompt": [WORDS] * 3, "max_tokens": 1, "prompt_logprobs": 20}),
    ("/v1/completions", {"prompt": WORDS, "max_tokens": 1, "echo": True, "logprobs": 20, "stream": True}),
    ("/v1/completions", {"prompt": "Once", "max_tokens": 16, "n": 8, "logprobs": 20, "ignore_eos": True}),
    ("/v1/chat/completions", CHAT | {"max_tokens": 8, "n": 16, "logprobs": True, "top_logprobs": 20, "stream": True}),
    ("/v1/embeddings", {"input": ["Once upon a time"] * 2048}),
    ("/v1/embeddings", {"input": ["Once upon a time"] * 2048, "encoding_format": "base64"}),
    ("/tokenize", {"prompt": WORDS * 4, "return_token_strs": True}),
)


@contextmanager
def hold_pipelines(server: Server, notes: Notes) -> Iterator[None]:
    """Connections that ask for hundreds of pages at once, more than there may be, and read nothing."""

    def ask() -> socket.socket:
        client = connect(server)
        client.settimeout(0.2)
        with suppress(OSError):  # the server takes no more, or has closed
            client.sendall(PAGE * NUM_PIPELINED)
        return client

    with hold_open([ask] * NUM_PIPELINES, notes, f"connections with {NUM_PIPELINED} requests each"):
        yield


@contextmanager
def hold_long_answers(server: Server, notes: Notes) -> Iterator[None]:
    """Bodies with long answers, which keep the processor busy where they are encoded."""
    asked = [lambda path=path, body=body: send(server, path, body) for path, body in LONG_ANSWERS]
    with hold_open(asked, notes, "bodies with long answers"):
        yield


@contextmanager
def hold_streams(server: Server, notes: Notes) -> Iterator[None]:
    """Streams of clients of which some leave; afterwards the server must be as it was after the first of them."""
    streams, start = Streams(server), time.monotonic()
    streams.run_once()
    before = asyncio.run(wait_until_idle(server, start))
    streams.begin()
    try:
        yield
    finally:
        streams.end()
    after = asyncio.run(wait_until_idle(server, start))
    notes.said.append(f"{streams.num_whole:,} streams whole, {streams.num_left:,} left")
    compare(before, after, notes)


def compare(before: Sample, after: Sample, notes: Notes) -> None:
    """Notes what an idle server has more than before."""
    growth, more_fds = after.memory_mb - before.memory_mb, after.fds - before.fds
    notes.said.append(f"{growth:+.0f} of {after.memory_mb:.0f} MB, {more_fds:+d} files")
    if growth > MAX_GROWTH_MB or more_fds > MAX_FDS:
        notes.wrong.append("memory or files grew")
    if any(after.gauges.values()):
        notes.wrong.append(f"at rest: {after.gauges}")


class Streams:
    """Clients that each ask for one stream after the other, in a thread of their own."""

    def __init__(self, server: Server) -> None:
        address = urlsplit(server.url)
        self._address = address.hostname, address.port
        self._ended = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)
        self._draw = random.Random(0)
        self.num_whole = self.num_left = 0

    def run_once(self) -> None:
        """Every client has one stream."""
        self._ended.set()
        asyncio.run(self._run())
        self.num_whole = self.num_left = 0

    def begin(self) -> None:
        self._ended.clear()
        self._thread.start()

    def end(self) -> None:
        """Waits for the last streams."""
        self._ended.set()
        self._thread.join()

    async def _run(self) -> None:
        await asyncio.gather(*(self._ask_often() for _ in range(NUM_STREAMS)))

    async def _ask_often(self) -> None:
        await self._ask()
        while not self._ended.is_set():
            await self._ask()

    async def _ask(self) -> None:
        """Asks for a stream; leaves it in the middle, or reads it to its end."""
        leaves = self._draw.random() < LEAVING_SHARE
        body = {"prompt": "Once upon a time", "stream": True, "ignore_eos": True}
        raw = json.dumps(body | {"max_tokens": self._draw.randint(8, 48)}).encode()
        reader, writer = await asyncio.open_connection(*self._address)
        try:
            writer.write(make_head("/v1/completions", len(raw)) + raw)
            data = await reader.readuntil(b"data: ")
            while not leaves and not data.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n"):
                if not (more := await reader.read(65536)):
                    raise ConnectionError("a stream was cut")
                data = (data + more)[-64:]
            self.num_left += leaves
            self.num_whole += not leaves
        finally:
            writer.close()


_FEW = ("--max-connections", str(MOST_CONNECTIONS), "--slow-reader-timeout", str(READING_SECONDS))
_MANY = ("--max-num-seqs", str(NUM_STREAMS + 1), "--max-model-len", "128")
ANSWER_ATTACKS = {
    "pipelines": Attack("80 connections that ask and never read", hold_pipelines, start_plain(*_FEW)),
    "answers": Attack("long answers", hold_long_answers, start_plain()),
    "streams": Attack("512 streams, a tenth left", hold_streams, start_plain(*_MANY), most_seconds=10.0),
}

"""Attacks of one tenant against another, and on the server's end."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
from attacks import Attack, Notes, hold_open, send, start_plain
from soak_server import Server

NUM_GRAMMARS = 30
MOST_SECONDS = 2.0  # for an ordinary chat meanwhile
LONG_TEXT = "What is a KV cache? " * 150  # 3 KB: prepared in the threads that grammars once took
CHAT = {"messages": [{"role": "user", "content": LONG_TEXT}], "max_tokens": 4, "truncate_prompt_tokens": 64}


def make_grammar(number: int) -> str:
    """Returns a grammar of 1 KB that the checker gives up after 5 s; each number's is another one."""
    return "start: A\nA: " + " & ".join(f"/(?s:.*)x{number}y{at}(?s:.*)/" for at in range(40))


@contextmanager
def hold_grammars(server: Server, notes: Notes) -> Iterator[None]:
    """Bodies with hostile grammars, while a client that has none is answered as ever."""
    found: Counter[str] = Counter()
    slowest, ended = 0.0, threading.Event()

    def chat() -> None:
        nonlocal slowest
        while not ended.wait(0.2):
            start = time.monotonic()
            with contextlib.suppress(httpx.HTTPError):
                answer = httpx.post(f"{server.url}/v1/chat/completions", json=CHAT, timeout=60)
                found[str(answer.status_code)] += 1
            slowest = max(slowest, time.monotonic() - start)

    body = {"prompt": "a", "max_tokens": 4}
    bodies = [body | {"structured_outputs": {"grammar": make_grammar(number)}} for number in range(NUM_GRAMMARS)]
    client = threading.Thread(target=chat, daemon=True)
    client.start()
    try:
        with hold_open([lambda b=b: send(server, "/v1/completions", b) for b in bodies], notes, "grammars"):
            yield
    finally:
        ended.set()
        client.join()
    notes.said.append(f"chats of 3 KB meanwhile: {dict(found)}, the slowest {slowest:.2f} s")
    if set(found) != {"200"} or slowest > MOST_SECONDS:
        notes.wrong.append("a client without grammars is not answered as ever")


@contextmanager
def hold_traced(server: Server, notes: Notes) -> Iterator[None]:
    """Requests whose traces nobody takes."""
    body = {"prompt": "Once upon a time", "max_tokens": 4}
    with hold_open([lambda: send(server, "/v1/completions", body)] * 32, notes, "requests"):
        yield


@contextmanager
def start_with_mute_collector(notes: Notes) -> Iterator[Server]:
    """A server whose collector of traces accepts connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0), backlog=64) as collector:
        address = f"http://127.0.0.1:{collector.getsockname()[1]}"
        with start_plain("--otlp-traces-endpoint", address)(notes) as server:
            yield server


TENANT_ATTACKS = {
    "grammars": Attack(f"{NUM_GRAMMARS} hostile grammars", hold_grammars, start_plain()),
    "collector": Attack("a collector that never answers", hold_traced, start_with_mute_collector),
}

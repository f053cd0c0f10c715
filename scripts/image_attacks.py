"""Attacks by images, on a server with a tiny model that reads them."""

from __future__ import annotations

import base64
import io
import socket
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import httpx
from attacks import BODY_BYTES, FEW_PROGRAMS, Attack, Notes, connect, hold_open, make_head, read_memory, start_plain
from PIL import Image
from soak_server import Server

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.engine.image_models import make_checkpoint
from tests.media.bombs import make_bombs

NUM_TINY, NUM_LARGE, NUM_ROUNDS, NUM_SLOW = 10_000, 4, 3, 6
NUM_CLIENTS = 4
MOST_MIB = 160  # that the server may have grown by when all is answered
SETTLING_SECONDS = 10.0  # for what it gives back
MOST_SECONDS = 10.0  # for a probe: it shares two cores with the processes that decode 64 megapixels
CHAT = "/v1/chat/completions"
# Hosts that the server's operator allowed by mistake, each with the port of a listener inside.
INSIDE = (
    *("127.0.0.1", "localhost", "127.1", "2130706433", "0x7f000001", "0.0.0.0", "[::1]", "[::]"),
    *("[::ffff:127.0.0.1]", "[::ffff:7f00:1]", "[::127.0.0.1]", "[64:ff9b::7f00:1]", "[2002:7f00:1::]", "[fe80::1]"),
)
ELSEWHERE = (  # that the operator did not allow
    *("http://169.254.169.254/latest/meta-data/", "http://[fd00:ec2::254]/", "http://metadata.google.internal/"),
    *("http://[fe80::1%25lo]/", "http://[::ffff:169.254.169.254]/", "http://[64:ff9b::a9fe:a9fe]/"),
    *("file:///etc/passwd", "file:///proc/self/environ", "file://localhost/etc/hosts", "gopher://127.0.0.1/", "//a/b"),
)


def encode(data: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


def make_chat(*urls: str) -> dict[str, Any]:
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return {"messages": [{"role": "user", "content": parts}], "max_tokens": 8, "temperature": 0}


def make_picture() -> bytes:
    file = io.BytesIO()
    Image.linear_gradient("L").resize((48, 32)).save(file, "PNG")
    return file.getvalue()


class ImageAttack:
    """One server with two listeners beside it, on one port of 127.0.0.1 and ::1, which nothing may connect to."""

    def __init__(self) -> None:
        self._port = 0

    @contextmanager
    def start(self, notes: Notes) -> Iterator[Server]:
        """Starts the server; notes at the end whether it has connected to a listener."""
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="jaxserve-attack-")))
            listeners = [stack.enter_context(socket.create_server(("127.0.0.1", 0)))]
            self._port = listeners[0].getsockname()[1]
            with suppress(OSError):  # no IPv6 here
                other = socket.create_server(("::1", self._port), family=socket.AF_INET6)
                listeners.append(stack.enter_context(other))
            flags = (str(make_checkpoint(folder)), "--load-format", "dummy", "--dtype", "float32", *FEW_PROGRAMS)
            domains = ("--allowed-media-domains", *(f"{host}:{self._port}" for host in INSIDE))
            yield stack.enter_context(start_plain(*flags, *domains)(notes))
            for each in listeners:
                each.setblocking(False)
                with suppress(BlockingIOError):
                    each.accept()
                    notes.wrong.append("the server connected to a listener inside")

    @contextmanager
    def hold(self, server: Server, notes: Notes) -> Iterator[None]:
        """Sends what must be refused again and again, from a few clients, beside bodies that come slowly."""
        text = self._ask(server)
        memory = read_memory(server)
        found: Counter[int] = Counter()
        ended = threading.Event()

        def attack() -> None:
            for name, expected, body in self._list_bodies():
                if ended.is_set():
                    return
                answer = httpx.post(f"{server.url}{CHAT}", json=body, timeout=120)
                found[answer.status_code] += 1
                if answer.status_code not in (expected, 429):
                    notes.wrong.append(f"{name}: {answer.status_code} {answer.text[:100]}")

        slow = [partial(send_in_part, server, share) for share in (0.1, 0.5, 0.999)] * (NUM_SLOW // 3)
        with hold_open(slow, notes, "slow bodies"), ThreadPoolExecutor(NUM_CLIENTS) as clients:
            working = [clients.submit(attack) for _ in range(NUM_CLIENTS)]
            yield
            for each in working:  # all of it once, however long the probes are
                each.result()
            ended.set()
        is_same = self._ask(server) == text
        deadline = time.monotonic() + SETTLING_SECONDS
        while (grown := read_memory(server) - memory) > MOST_MIB and time.monotonic() < deadline:
            time.sleep(0.2)
        notes.said.append(", ".join(f"{number} x {status}" for status, number in found.most_common()))
        notes.said.append(f"{grown:+,} MiB")
        if grown > MOST_MIB:
            notes.wrong.append(f"the server grew by {grown:,} MiB")
        if not is_same:
            notes.wrong.append("an ordinary image has another answer than before")

    def _ask(self, server: Server) -> str:
        """Returns the answer to an ordinary image."""
        answer = httpx.post(f"{server.url}{CHAT}", json=make_chat(encode(make_picture())), timeout=60)
        return str(answer.raise_for_status().json()["choices"][0]["message"]["content"])

    def _list_bodies(self) -> Iterator[tuple[str, int, Mapping[str, Any]]]:
        """Yields names, statuses and bodies."""
        picture, large = make_picture(), "A" * (BODY_BYTES - 4096)
        cut = encode(picture)
        for url in (*(f"http://{host}:{self._port}/secret" for host in INSIDE), *ELSEWHERE):
            yield url, 400, make_chat(url)
        for bomb in make_bombs():
            yield bomb.title, bomb.status, make_chat(encode(bomb.data))
            yield f"{bomb.title}, four times", bomb.status, make_chat(*[encode(bomb.data)] * 4)
        for at in (0, 30, len(cut) // 2, len(cut) - 5):
            yield f"base64 cut at {at}", 400, make_chat(cut[:at])
        for _ in range(NUM_ROUNDS):
            yield "10,000 tiny parts", 400, make_chat(*[cut] * NUM_TINY)
        for _ in range(NUM_LARGE):
            yield "one image as large as a body may be", 400, make_chat(f"data:;base64,{large}")


def send_in_part(server: Server, share: float) -> socket.socket:
    """Returns a connection on which a part of a body has been sent."""
    body = httpx.Request("POST", "http://a", json=make_chat(encode(make_picture() + bytes(4 << 20)))).content
    client = connect(server)
    client.sendall(make_head(CHAT, len(body)) + body[: int(share * len(body))])
    return client


def make_attack() -> Attack:
    attack = ImageAttack()
    start: Callable[[Notes], Any] = attack.start
    return Attack("images: addresses inside, bombs, 10,000 parts, cut data", attack.hold, start, MOST_SECONDS)


IMAGE_ATTACKS = {"images": make_attack()}

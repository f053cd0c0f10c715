"""The attacks of `attack_server.py`: each begins, continues while the server is probed, and ends."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import httpx
from soak_server import Server, start_server

NUM_IDLE, NUM_VIEWERS, NUM_BODIES, NUM_TEMPLATES, NUM_REQUESTS = 10_000, 400, 12, 8, 32
NUM_PROMPTS, NUM_COMPLETIONS = 1024, 128
BODY_BYTES = 32 << 20
MOST_BODIES_MIB = 320  # memory of all bodies together, buffers included
MEMORY_BYTES = 500 << 20
SHUTDOWN_SECONDS = 3
SPARE_FILES = 500  # descriptors that this process keeps for other uses
OPENING_SECONDS = 30.0  # limit for opening all connections of an attack
LOOPS = "{% for a in range(9999) %}" * 4 + "{% endfor %}" * 4
FLAGS = (
    *("--port", "0", "--host", "127.0.0.1", "--no-access-log", "--status-interval", "0"),
    *("--shutdown-timeout", str(SHUTDOWN_SECONDS)),
)
# Where memory is small. With the programs of the defaults a server needs up to 690 MiB.
FEW_PROGRAMS = ("--max-num-seqs", "8", "--max-num-batched-tokens", "128", "--max-model-len", "1024")
CLOCKED = (str(Path(__file__).with_name("clocked_server.py")),)  # `jaxserve` that names slow callbacks
FEW_FILES = ("sh", "-c", 'ulimit -Sn 1024 && exec "$@"', "sh")  # the default limit of many systems


class SkippedError(Exception):
    """The attack cannot be made on this machine; the message says why."""


@dataclass
class Notes:
    """The findings of an attack, for the table."""

    said: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)  # failures beside those of the probes


Hold = Callable[[Server, Notes], AbstractContextManager[None]]
Start = Callable[[Notes], AbstractContextManager[Server]]


@dataclass(frozen=True)
class Attack:
    """How to start the server, and what to do to it while it is probed."""

    title: str
    hold: Hold
    start: Start
    most_seconds: float = 2.0  # for each probe


def start_plain(*flags: str, prefix: Sequence[str] = ()) -> Start:
    """Returns a starter of a server with more flags."""

    @contextmanager
    def start(notes: Notes) -> Iterator[Server]:
        server = start_server((*FLAGS, *flags), prefix, CLOCKED)
        try:
            yield server
        finally:
            server.process.kill()
            server.process.wait()

    return start


def connect(server: Server) -> socket.socket:
    """Returns a connection to the server."""
    address = urlsplit(server.url)
    return socket.create_connection((address.hostname or "", address.port or 0), timeout=OPENING_SECONDS)


def make_head(path: str, length: int) -> bytes:
    """Returns the head of a request with a JSON body."""
    lines = f"POST {path} HTTP/1.1", "host: 127.0.0.1", "content-type: application/json", f"content-length: {length}"
    return "\r\n".join((*lines, "", "")).encode()


def send(server: Server, path: str, body: object) -> socket.socket:
    """Sends a complete request and reads nothing."""
    raw = json.dumps(body).encode()
    client = connect(server)
    client.sendall(make_head(path, len(raw)) + raw)
    return client


def count_statuses(clients: Sequence[socket.socket]) -> str:
    """Returns the answers that have arrived so far, without waiting for others."""
    found: Counter[str] = Counter()
    for client in clients:
        client.setblocking(False)
        try:
            line = client.recv(64)
        except BlockingIOError:
            found["no answer yet"] += 1
        except OSError:
            found["reset"] += 1
        else:
            found[line.split()[1].decode() if line.startswith(b"HTTP") else "open" if line else "closed"] += 1
    return ", ".join(f"{number} x {status}" for status, number in found.most_common())


@contextmanager
def hold_open(opened: Sequence[Callable[[], socket.socket]], notes: Notes, name: str) -> Iterator[None]:
    """Opens connections one after the other and keeps them open; notes their number and their answers."""
    clients: list[socket.socket] = []
    deadline = time.monotonic() + OPENING_SECONDS
    refused = 0
    with contextlib.ExitStack() as stack:
        for each in opened:
            if time.monotonic() > deadline:
                break
            try:
                clients.append(stack.enter_context(each()))
            except OSError:
                refused += 1
        yield
        notes.said.append(f"{len(clients):,} {name}" + (f", {refused:,} refused" if refused else ""))
        notes.said.append(count_statuses(clients))


@contextmanager
def hold_connections(server: Server, notes: Notes) -> Iterator[None]:
    """Silent connections, as many as this process may have."""
    import resource

    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    count = NUM_IDLE if hard == resource.RLIM_INFINITY else min(NUM_IDLE, hard - SPARE_FILES)
    with hold_open([lambda: connect(server)] * count, notes, "connections"):
        yield


@contextmanager
def hold_viewers(server: Server, notes: Notes) -> Iterator[None]:
    """Viewers of /live that read their events."""

    def view() -> socket.socket:
        client = connect(server)
        client.sendall(b"GET /live HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n")
        client.setblocking(False)
        clients.append(client)
        return client

    def read() -> None:
        while not ended.wait(0.25):
            for client in list(clients):
                with contextlib.suppress(OSError):
                    client.recv(1 << 20)

    clients: list[socket.socket] = []
    ended = threading.Event()
    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        with hold_open([view] * NUM_VIEWERS, notes, "viewers"):
            yield
            ended.set()
            reader.join()
    finally:
        ended.set()


@contextmanager
def hold_sequences(server: Server, notes: Notes) -> Iterator[None]:
    """One small body that asks for very many sequences."""
    body = {"prompt": ["a"] * NUM_PROMPTS, "n": NUM_COMPLETIONS, "max_tokens": 64, "ignore_eos": True, "stream": True}
    with hold_open([lambda: send(server, "/v1/completions", body)], notes, "request"):
        yield


@contextmanager
def hold_bodies(server: Server, notes: Notes) -> Iterator[None]:
    """Large bodies whose last byte never comes."""
    start = b'{"prompt": "'

    def upload() -> socket.socket:
        client = connect(server)
        client.sendall(make_head("/v1/completions", BODY_BYTES) + start)
        left = BODY_BYTES - len(start) - 1
        with contextlib.suppress(OSError):  # refused: its answer has arrived already
            while left:
                left -= client.send(b"a" * min(left, 1 << 20))
        return client

    before = read_memory(server)
    with hold_open([upload] * NUM_BODIES, notes, f"bodies of {BODY_BYTES >> 20} MiB"):
        growth = read_memory(server) - before
        notes.said.append(f"{growth:+,} MiB")
        if growth > MOST_BODIES_MIB:
            notes.wrong.append(f"more than {MOST_BODIES_MIB} MiB")
        yield


@contextmanager
def hold_templates(server: Server, notes: Notes) -> Iterator[None]:
    """Requests with templates that never end, or that exhaust memory."""
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
    sources = [LOOPS, "{{ '%2000000000d' % 1 }}"] * (NUM_TEMPLATES // 2)
    ask = [lambda s=s: send(server, "/v1/chat/completions", chat | {"chat_template": s}) for s in sources]
    before = read_memory(server)
    with hold_open(ask, notes, "templates"):
        yield
        notes.said.append(f"{read_memory(server) - before:+,} MiB")


@contextmanager
def hold_nothing(server: Server, notes: Notes) -> Iterator[None]:
    """Does nothing: the attack is in how the server is started."""
    yield


@contextmanager
def hold_requests(server: Server, notes: Notes) -> Iterator[None]:
    """Usual requests, more than there are rows and as many as may wait."""
    body = {"prompt": "Once upon a time", "max_tokens": 16}
    with hold_open([lambda: send(server, "/v1/completions", body)] * NUM_REQUESTS, notes, "requests"):
        yield


def read_memory(server: Server) -> int:
    """Returns the resident memory of the server's process in MiB."""
    return int(Path(f"/proc/{server.process.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") >> 20


@contextmanager
def start_with_cut_cache(notes: Notes) -> Iterator[Server]:
    """A server whose compiled programs were written by half, as on a full disk; the third start of its kind."""
    with tempfile.TemporaryDirectory(prefix="jaxserve-attack-") as folder:
        start = start_plain("--compilation-cache-dir", folder, *FEW_PROGRAMS)
        with start(notes):
            pass
        sizes = {path: path.stat().st_size for path in Path(folder).rglob("*") if path.is_file()}
        cut = {path: size for path, size in sizes.items() if size > 1024}
        for path, size in cut.items():
            os.truncate(path, size // 2)
        with start(notes):
            pass
        left = [path for path, size in cut.items() if path.exists() and path.stat().st_size <= size // 2]
        notes.said.append(f"{len(cut)} entries cut, {len(left)} of them still so after a start")
        if left:
            notes.wrong.append("cut entries are not replaced")
        with start(notes) as server:
            yield server


@contextmanager
def start_in_group(notes: Notes) -> Iterator[Server]:
    """A server in a control group with little memory. It is a second start, because compiling takes 840 MiB."""
    with start_plain(*FEW_PROGRAMS)(Notes()):
        pass
    root = Path("/sys/fs/cgroup")
    is_old = (root / "memory" / "memory.limit_in_bytes").exists()
    group = root / ("memory" if is_old else "") / f"jaxserve-attack-{os.getpid()}"
    try:
        group.mkdir()
        (group / ("memory.limit_in_bytes" if is_old else "memory.max")).write_text(str(MEMORY_BYTES))
    except OSError as error:
        with contextlib.suppress(OSError):
            group.rmdir()
        raise SkippedError(f"no control group can be made here: {error}") from error
    try:
        enter = ("sh", "-c", 'echo $$ > "$0" && exec "$@"', str(group / "cgroup.procs"))
        with start_plain(*FEW_PROGRAMS, prefix=enter)(notes) as server:
            notes.said.append(f"{httpx.get(f'{server.url}/health/ready').status_code} at {read_memory(server):,} MiB")
            yield server
    finally:
        deadline = time.monotonic() + 5  # processes leave the group a little after they end
        while group.exists() and time.monotonic() < deadline:
            with contextlib.suppress(OSError):
                group.rmdir()
            time.sleep(0.05)


ATTACKS = {
    "connections": Attack("10,000 idle connections", hold_connections, start_plain(prefix=FEW_FILES)),
    "viewers": Attack("400 viewers of /live", hold_viewers, start_plain()),
    "sequences": Attack("131,072 sequences in one request", hold_sequences, start_plain()),
    "bodies": Attack("12 held bodies of 32 MiB", hold_bodies, start_plain()),
    "templates": Attack("hung and huge templates", hold_templates, start_plain("--allow-request-chat-template")),
    "cache": Attack("a compile cache cut by half", hold_nothing, start_with_cut_cache),
    "memory": Attack("500 MiB of memory", hold_requests, start_in_group),
}

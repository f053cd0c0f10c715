"""Attacks of `attack_server.py` on several processes: copies behind a router, and nodes of one engine."""

from __future__ import annotations

import contextlib
import http.server
import importlib.util
import os
import random
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import httpx
from attacks import FEW_PROGRAMS, SHUTDOWN_SECONDS, Attack, Notes, SkippedError
from soak_server import START_SECONDS, Server

from jaxserve.tools.cluster.nginx import find_nginx

NUM_DRIPS, DRIP_SECONDS = 16, 1.0
STRANGER = "127.0.0.2"  # where strangers come from, who share the machine with the nodes
FLAGS = (
    *("--no-access-log", "--status-interval", "0", "--shutdown-timeout", str(SHUTDOWN_SECONDS)),
    *FEW_PROGRAMS,
)
# Control endpoints of vllm-router, by which a stranger became the server of all requests.
CONTROL = (
    *("/add_worker?url={url}", "/v1/../add_worker?url={url}", "//add_worker?url={url}", "/%61dd_worker?url={url}"),
    *("/workers", "/remove_worker?url={copy}", "/flush_cache", "/list_workers", "/get_loads"),
)


@dataclass
class Leader(Server):
    """Rank 0 of two nodes."""

    follower: Server = field(kw_only=True)


def find_ports(count: int) -> list[int]:
    """Returns neighbouring free ports, below those of outgoing connections."""
    while True:
        ports = list(range(first := random.randrange(15_000, 30_000), first + count))
        with contextlib.suppress(OSError):
            for port in ports:
                socket.create_server(("127.0.0.1", port)).close()
            return ports


def launch(port: int, *flags: str, **environment: str) -> Server:
    """Starts `jaxserve serve` on a port; it is not ready yet."""
    command = [sys.executable, "-m", "jaxserve", "serve", "--port", str(port), *FLAGS, *flags]
    process = subprocess.Popen(
        command,
        env={**os.environ, "JAX_PLATFORMS": "cpu", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    server = Server(process, url=f"http://127.0.0.1:{port}")
    threading.Thread(target=server.listen, daemon=True).start()
    return server


def wait_until_ready(server: Server) -> None:
    """Waits until a server is ready; SystemExit if it does not become so."""
    deadline = time.monotonic() + START_SECONDS
    while server.process.poll() is None and time.monotonic() < deadline:
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(f"{server.url}/health/ready").status_code == httpx.codes.OK:
                return
        time.sleep(0.1)
    raise SystemExit("the server did not start:\n" + "\n".join(server.last_lines))


@contextmanager
def kill_later(servers: Sequence[Server]) -> Iterator[None]:
    """Kills what still runs at the end."""
    try:
        yield
    finally:
        for server in servers:
            server.process.kill()
            server.process.wait()


@contextmanager
def start_copies(notes: Notes) -> Iterator[Server]:
    """Two copies behind nginx and vllm-router."""
    if importlib.util.find_spec("vllm_router") is None or find_nginx() is None:
        raise SkippedError("needs vllm-router and nginx")
    server = launch(*find_ports(1), "--data-parallel-size", "2")
    with kill_later([server]):
        wait_until_ready(server)
        yield server


@contextmanager
def hold_control(server: Server, notes: Notes) -> Iterator[None]:
    """Asks the router's control endpoints for a server of its own in place of the copies."""
    taken: list[str] = []

    class Page(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            taken.append(self.path)
            self.send_response(200)
            self.end_headers()

        do_POST = do_GET

        def log_message(self, *_: object) -> None:
            pass

    def attack() -> None:
        with httpx.Client(timeout=10) as client:
            while not ended.is_set():
                for path in CONTROL:  # with the server's address before it: a base URL takes `//x` for another host
                    target = server.url + path.format(url=url, copy="http://127.0.0.1:8000")
                    for method in ("GET", "POST", "DELETE"):
                        with contextlib.suppress(httpx.HTTPError):
                            found.add(client.request(method, target).status_code)

    found: set[int] = set()
    ended = threading.Event()
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Page) as stranger:
        threading.Thread(target=stranger.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{stranger.server_port}"
        attacker = threading.Thread(target=attack)
        attacker.start()
        try:
            yield
        finally:
            ended.set()
            attacker.join()
            stranger.shutdown()
    notes.said.append(f"answers: {', '.join(map(str, sorted(found)))}")
    if taken:
        notes.wrong.append(f"the stranger got {len(taken)} requests")
    if found & {200, 202}:
        notes.wrong.append("an endpoint of the router was answered")


@contextmanager
def drip(port: int) -> Iterator[None]:
    """Strangers who send a byte now and then, and come again."""

    def run() -> None:
        while not ended.is_set():
            with (
                contextlib.suppress(OSError),
                socket.create_connection(("127.0.0.1", port), 10, (STRANGER, 0)) as client,
            ):
                while not ended.wait(DRIP_SECONDS):
                    client.sendall(b"\0")
            ended.wait(0.1)  # refused, or closed

    ended = threading.Event()
    threads = [threading.Thread(target=run, daemon=True) for _ in range(NUM_DRIPS)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        ended.set()
        for thread in threads:
            thread.join()


@contextmanager
def start_nodes(notes: Notes) -> Iterator[Server]:
    """Two nodes of one engine, which come together while strangers drip at the port of greetings."""
    master, _, port, probes = find_ports(4)
    common = ("-tp", "2", "--nnodes", "2", "--master-port", str(master))
    leader = launch(port, *common, JAX_NUM_CPU_DEVICES="1")
    with kill_later([leader]), drip(master):
        time.sleep(1.0)
        follower = launch(probes, *common, "--node-rank", "1", "--health-port", str(probes), JAX_NUM_CPU_DEVICES="1")
        with kill_later([follower]):
            wait_until_ready(leader)
            wait_until_ready(follower)
            yield Leader(leader.process, leader.url, leader.last_lines, follower=follower)


@contextmanager
def hold_probes(server: Server, notes: Notes) -> Iterator[None]:
    """Strangers who drip at a follower's probes."""
    assert isinstance(server, Leader)
    url = server.follower.url
    with drip(httpx.URL(url).port or 0):
        yield
        start = time.monotonic()
        status = httpx.get(f"{url}/health/live", timeout=10).status_code
        notes.said.append(f"the follower's probe: {status} in {time.monotonic() - start:.2f} s")
        if status != httpx.codes.OK:
            notes.wrong.append("the follower's probe failed")


CLUSTER_ATTACKS = {
    "router": Attack("the router's control endpoints", hold_control, start_copies),
    "nodes": Attack("strangers among the nodes of an engine", hold_probes, start_nodes),
}

"""Two processes of two CPU devices that run one engine, and one process of four."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from tests.programs import PROGRAMS

ROOT = Path(__file__).parents[2]
START_SECONDS = 240.0
FLAGS = ("--dtype", "float32", "--max-num-seqs", "4", "--max-num-batched-tokens", "64", "--max-model-len", "256")
TOKEN = "a secret of this test"


@dataclass
class Node:
    """One process and every line that it has logged."""

    process: subprocess.Popen[str]
    port: int  # of its API or its probes
    lines: list[str] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def log(self) -> str:
        return "\n".join(self.lines[-60:])

    def wait_until_ready(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline and self.process.poll() is None:
            try:
                if httpx.get(f"{self.url}/health/ready", timeout=5).status_code == 200:
                    return
            except httpx.HTTPError:
                pass
            time.sleep(0.1)
        raise AssertionError(f"not ready:\n{self.log}")

    def metric(self, name: str) -> float:
        """Returns the sum of a metric's series."""
        lines = httpx.get(f"{self.url}/metrics", timeout=10).text.splitlines()
        values = [line.rpartition(" ")[2] for line in lines if line.startswith((f"{name} ", f"{name}{{"))]
        assert values, f"no metric {name}"
        return sum(map(float, values))


def find_ports(count: int) -> list[int]:
    """Returns neighbouring free ports, below those that the system gives to outgoing connections."""
    while True:
        first = random.randrange(15_000, 30_000)
        ports = list(range(first, first + count))
        if all(_is_free(port) for port in ports):
            return ports


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0


def launch(*flags: str, port: int, devices: int, token: str | None = TOKEN, folder: Path = ROOT) -> Node:
    """Starts `jaxserve serve` in a folder, on some CPU devices, where the node's code may use no collective."""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(devices)}
    environment |= {} if token is None else {"JAXSERVE_CLUSTER_TOKEN": token}
    command = [sys.executable, str(ROOT / "tests/nodes/strict.py"), "serve", *flags]
    command += ["--compilation-cache-dir", str(PROGRAMS)]
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    node = Node(process, port)
    threading.Thread(target=_read, args=(node,), daemon=True).start()
    return node


def launch_pair(model: str, *flags: str, tokens: tuple[str | None, str | None] = (TOKEN, TOKEN)) -> list[Node]:
    """Starts rank 0 and rank 1 of one engine of four devices."""
    master, _, api, probes = find_ports(4)
    common = (model, "-tp", "4", "--nnodes", "2", "--master-port", str(master), *FLAGS, *flags)
    return [
        launch(*common, "--port", str(api), port=api, devices=2, token=tokens[0]),
        launch(*common, "--node-rank", "1", "--health-port", str(probes), port=probes, devices=2, token=tokens[1]),
    ]


@contextmanager
def run_pair(model: str, *flags: str) -> Iterator[list[Node]]:
    """Yields rank 0 and rank 1, ready, and ends them."""
    nodes = launch_pair(model, *flags)
    try:
        for node in nodes:
            node.wait_until_ready()
        yield nodes
    finally:
        end(nodes)


@contextmanager
def run_one(model: str, *flags: str) -> Iterator[Node]:
    """Yields the same engine in one process."""
    (port,) = find_ports(1)
    node = launch(model, "-tp", "4", "--port", str(port), *FLAGS, *flags, port=port, devices=4)
    try:
        node.wait_until_ready()
        yield node
    finally:
        end([node])


def end(nodes: list[Node]) -> None:
    """Kills what still runs."""
    for node in nodes:
        if node.process.poll() is None:
            node.process.send_signal(signal.SIGCONT)
            node.process.kill()
        node.process.wait(20)


def _read(node: Node) -> None:
    assert node.process.stdout is not None
    for line in node.process.stdout:
        node.lines.append(line.rstrip("\n"))

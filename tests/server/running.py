"""A real server in a process of its own, as users start it, on a free port."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from tests.e2e.helpers import PROGRAMS

ROOT = Path(__file__).parents[2]
START_SECONDS = 240.0  # where all programs are to be compiled, by several servers at once, on a busy machine
_ADDRESS = re.compile(r'listening on (https?://[^\s"]+)')


@dataclass
class RunningServer:
    """The process, its address, and every line that it has logged."""

    process: subprocess.Popen[str]
    url: str = ""
    lines: list[str] = field(default_factory=list)

    def wait_until_ready(self) -> None:
        """Waits for /health/ready; fails with the log when the process ends before."""
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline and self.process.poll() is None:
            if self.url and _ask(f"{self.url}/health/ready") == 200:
                return
            time.sleep(0.05)
        raise AssertionError("the server is not ready:\n" + "\n".join(self.lines[-50:]))

    def metric(self, name: str, **labels: str) -> float:
        """Returns one number of /metrics, the sum over series that have these labels; 0 when there is none."""
        total = 0.0
        for line in httpx.get(f"{self.url}/metrics", timeout=30).text.splitlines():
            series, _, value = line.rpartition(" ")
            if re.match(rf"{re.escape(name)}(\{{|$)", series) and all(
                f'{k}="{v}"' in series for k, v in labels.items()
            ):
                total += float(value)
        return total

    def stop(self, seconds: float = 30.0) -> int:
        """Sends SIGTERM and returns the exit status; kills the process when it does not end."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise


def launch(*flags: str, program: Path | None = None) -> RunningServer:
    """Starts `jaxserve serve`, or a program of the tests' own that takes the same flags, and returns at once."""
    command = [sys.executable, "-m", "jaxserve"] if program is None else [sys.executable, str(program)]
    command += ["serve", "--port", "0", "--compilation-cache-dir", str(PROGRAMS), *flags]
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    )
    server = RunningServer(process)
    threading.Thread(target=_read, args=(server,), daemon=True).start()
    return server


@contextmanager
def run_server(*flags: str, program: Path | None = None) -> Iterator[RunningServer]:
    """Yields a server that is ready, and ends it."""
    server = launch(*flags, program=program)
    try:
        server.wait_until_ready()
        yield server
    finally:
        server.stop()


def _read(server: RunningServer) -> None:
    assert server.process.stdout is not None
    for line in server.process.stdout:
        server.lines.append(line.rstrip("\n"))
        if not server.url and (found := _ADDRESS.search(line)):
            server.url = found[1]


def _ask(url: str) -> int:
    try:
        return httpx.get(url, timeout=5, verify=False).status_code
    except httpx.HTTPError:
        return 0

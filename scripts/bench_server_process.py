"""The server's process for `bench_server.py`, with its CPU clocks."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PROGRAM = Path(__file__).with_name("bench_server_null.py")
START_SECONDS = 60.0
_ADDRESS = re.compile(r"listening on http://127\.0\.0\.1:(\d+)")


@dataclass(frozen=True)
class CpuTimes:
    """Seconds of CPU that the server has used."""

    process: float
    kernel: float  # system time of the process, in steps of 10 ms
    event_loop: float  # the main thread


@dataclass
class ServerProcess:
    """The server under test."""

    process: subprocess.Popen[bytes]
    log: Path
    profile: Path | None = None
    port: int = 0

    def wait_until_ready(self) -> None:
        """Waits for /health/ready; RuntimeError with the log if it takes too long or the process ends."""
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline and self.process.poll() is None:
            found = _ADDRESS.search(self.log.read_text())
            if found is not None:
                self.port = int(found[1])
                with contextlib.suppress(urllib.error.URLError):
                    self.get("/health/ready")
                    return
            time.sleep(0.1)
        raise RuntimeError(f"the server is not ready:\n{self.log.read_text()[-4000:]}")

    def get(self, path: str) -> str:
        """Returns the body of the answer to GET `path`."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=30) as answer:
            text: str = answer.read().decode()
            return text

    def read_cpu(self) -> CpuTimes:
        """Returns the CPU time used so far; the process's own clock counts nanoseconds."""
        pid = self.process.pid
        process_clock = (~pid << 3) | 2  # Linux's number for the CPU clock of a process
        main_thread = int(Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()[0])
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        kernel = int(fields[12]) / os.sysconf("SC_CLK_TCK")
        return CpuTimes(time.clock_gettime(process_clock), kernel, main_thread / 1e9)

    def read_generated(self) -> float:
        """Returns the number of tokens generated so far."""
        found = re.search(r"^jaxserve[_:]generation_tokens_total\S* (\S+)$", self.get("/metrics"), re.MULTILINE)
        return float(found[1]) if found else 0.0

    def toggle_profile(self) -> None:
        """Starts or ends the sampler."""
        self.process.send_signal(signal.SIGUSR1)

    def read_profile(self) -> dict[str, Any]:
        """Waits for the sampler's file, at most 10 s, and returns its content."""
        assert self.profile is not None
        deadline = time.monotonic() + 10
        while not self.profile.exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        document: dict[str, Any] = json.loads(self.profile.read_text())
        self.profile.unlink()
        return document


@contextlib.contextmanager
def run_server(rows: int, ms: float, *, profile: bool = False) -> Iterator[ServerProcess]:
    """Yields a ready server on a null device, and ends it."""
    with tempfile.TemporaryDirectory() as folder:
        samples = Path(folder, "profile.json") if profile else None
        command = [sys.executable, str(PROGRAM), "serve", "--rows", str(rows), "--ms", str(ms)]
        command += ["--profile", str(samples)] if samples is not None else []
        with run_command(command, samples) as server:
            yield server


@contextlib.contextmanager
def run_command(command: Sequence[str], profile: Path | None = None) -> Iterator[ServerProcess]:
    """Yields the server started by a command once it is ready, and ends it."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "log")
        with log.open("wb") as file:
            process = subprocess.Popen(command, stdout=file, stderr=file)
        server = ServerProcess(process, log, profile)
        try:
            server.wait_until_ready()
            yield server
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                raise


def read_busy() -> float:
    """Returns the CPU seconds used by everything on this machine."""
    first = Path("/proc/stat").read_text().partition("\n")[0].split()
    user, nice, system, _, _, irq, softirq = map(int, first[1:8])
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")

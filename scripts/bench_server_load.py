"""The two ends of `bench_server.py`: the server's process with its CPU clocks, and light client streams."""

from __future__ import annotations

import asyncio
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
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PROGRAM = Path(__file__).with_name("bench_server_null.py")
START_SECONDS = 60.0
_END = b"\r\n0\r\n\r\n"  # the last bytes of a chunked answer
_HEAD_SHOWN = 300  # bytes
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


class Stream(asyncio.Protocol):
    """One request on a connection of its own. Events are counted by their ends, not parsed."""

    def __init__(self, wave: Wave, request: bytes) -> None:
        self._wave, self._request = wave, request
        self._tail = b""  # the last bytes, for marks that arrive in two pieces
        self.start, self.first, self.last = time.perf_counter(), 0.0, 0.0
        self.head = b""
        self.num_events = 0
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.transport = transport
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        tail = self._tail
        count = data.count(b"\n\n") + (tail[-1:] == b"\n" and tail[-2:] != b"\n\n" and data[:1] == b"\n")
        self._tail = (tail + data if len(data) < len(_END) else data)[-len(_END) :]
        if len(self.head) < _HEAD_SHOWN:
            self.head += data[:_HEAD_SHOWN]
        if count:
            if not self.num_events:
                self.first = now
                self._wave.note_first()
            elif self._wave.records:
                self._wave.gaps.append(now - self.last)
                self._wave.num_events += count
            self.last = now
            self.num_events += count

    @property
    def is_whole(self) -> bool:
        """Whether the answer has status 200 and has been received whole."""
        return b" 200 " in self.head[:16] and self._tail == _END

    def connection_lost(self, error: Exception | None) -> None:
        self._wave.note_end(self)


class Wave:
    """Streams that begin together."""

    def __init__(self, port: int, requests: Sequence[bytes]) -> None:
        self._port, self._requests = port, requests
        loop = asyncio.get_running_loop()
        self._all_begun, self._all_ended = loop.create_future(), loop.create_future()
        self._num_begun = self.num_ended = 0
        self._closes = False
        self.streams: list[Stream] = []
        self.records = False  # whether gaps and events are counted now
        self.gaps = array("d")
        self.num_events = 0

    async def begin(self) -> None:
        """Sends all requests and waits for the first event of each."""
        loop = asyncio.get_running_loop()
        made = [Stream(self, request) for request in self._requests]
        self.streams = made

        async def connect(stream: Stream) -> None:
            stream.start = time.perf_counter()
            await loop.create_connection(lambda: stream, "127.0.0.1", self._port)

        await asyncio.gather(*map(connect, made))
        await asyncio.wait_for(asyncio.shield(self._all_begun), 120)

    async def finish(self) -> None:
        """Waits until every answer has ended; RuntimeError when one was cut short."""
        await asyncio.wait_for(self._all_ended, 600)

    async def close(self) -> None:
        """Aborts all streams."""
        self._closes = True
        for stream in self.streams:
            assert stream.transport is not None
            stream.transport.abort()
        await self._all_ended

    def first_times(self) -> list[float]:
        """Returns the seconds from each request to its first event."""
        return [stream.first - stream.start for stream in self.streams]

    def note_first(self) -> None:
        self._num_begun += 1
        if self._num_begun == len(self._requests) and not self._all_begun.done():
            self._all_begun.set_result(None)

    def note_end(self, stream: Stream) -> None:
        self.num_ended += 1
        if not self._closes and not stream.is_whole:
            error = RuntimeError(f"a stream was refused or cut short: {stream.head!r}")
            for future in (self._all_begun, self._all_ended):
                if not future.done():
                    future.set_exception(error)
        elif self.num_ended == len(self._requests) and not self._all_ended.done():
            self._all_ended.set_result(None)


def make_chat_request(index: int, max_tokens: int, prompt: str) -> bytes:
    """Returns the HTTP request of a streamed chat completion."""
    body = {"messages": [{"role": "user", "content": prompt}], "max_tokens": max_tokens, "stream": True}
    return _encode("/v1/chat/completions", body | {"ignore_eos": True, "temperature": 0})


def make_completion_request(index: int, max_tokens: int, prompt: str) -> bytes:
    """Returns the HTTP request of a streamed completion."""
    body = {"prompt": prompt, "max_tokens": max_tokens, "stream": True, "ignore_eos": True, "temperature": 0}
    return _encode("/v1/completions", body)


def _encode(path: str, body: dict[str, Any]) -> bytes:
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(content)}\r\n\r\n".encode() + content


def read_busy() -> float:
    """Returns the CPU seconds used by everything on this machine."""
    first = Path("/proc/stat").read_text().partition("\n")[0].split()
    user, nice, system, _, _, irq, softirq = map(int, first[1:8])
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


def count_cores() -> int:
    """Returns the cores that server and client share."""
    return len(os.sched_getaffinity(0))

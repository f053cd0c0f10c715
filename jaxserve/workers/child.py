"""The program of a process that can be killed.

Run as a file, with the standard library only. It speaks JSON lines over stdin and stdout. The first line names the
program, its options and its limits, and is answered by {"ready": true}. Each further line is a job, answered by
{"reply": ..., "last": ...}; after "last": true the process exits to free its memory. A job and a reply may have bytes
beside JSON, under "attachment": the line has their number there, and they follow the line.

It ends with its parent: at the end of stdin, when its parent's id changes, and at the latest by the alarm that runs
during a job.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import resource
import select
import signal
import sys
from collections.abc import Callable
from typing import Any

_POLL_S = 5.0  # how often an idle process checks that its parent is alive
_READ_BYTES = 1 << 16  # cheap for malloc: with 1 MiB a read costs more than the rest of a job
_ATTACHMENT_BYTES = 1 << 20
_STACK_BYTES = 2 << 20  # a quarter of the stack of the parent's threads: what fits here fits there


class Pipe:
    """JSON lines over stdin and stdout; other code's prints go to stderr."""

    def __init__(self) -> None:
        self._in, self._out = os.dup(0), os.dup(1)
        os.dup2(2, 1)
        self._parent = os.getppid()

    def read(self) -> dict[str, Any] | None:
        """Returns the next message, None when the parent is gone. At most one message is under way."""
        data, end = bytearray(), -1
        while end < 0:
            read = self._read(_READ_BYTES)
            if not read:
                return None
            end = read.find(b"\n")
            end = len(data) + end if end >= 0 else -1
            data += read
        attached = data[end + 1 :]
        del data[end:]  # not a copy of the rest: a line may take much of the memory that there is
        message = json.loads(data.decode("utf-8", "surrogatepass"))
        if "attachment" in message:
            while len(attached) < message["attachment"]:
                read = self._read(_ATTACHMENT_BYTES)
                if not read:
                    return None
                attached += read
            message["attachment"] = attached
        return message

    def write(self, message: dict[str, Any], attachment: bytes = b"") -> None:
        """Sends a message, and the bytes that its reply is to have."""
        line = json.dumps(message, ensure_ascii=False).encode("utf-8", "surrogatepass") + b"\n"
        for part in (line, attachment):
            data = memoryview(part)
            while data:
                data = data[os.write(self._out, data) :]

    def _read(self, most: int) -> bytes:
        """Returns some bytes, none when the parent is gone."""
        while True:
            readable, _, _ = select.select([self._in], [], [], _POLL_S)
            if os.getppid() != self._parent:
                return b""
            if readable:
                return os.read(self._in, most)


def load(program: str) -> Any:
    """Returns the module in a file, without importing its package, which may be slow."""
    spec = importlib.util.spec_from_file_location("program", program)
    assert spec is not None and spec.loader is not None
    module = sys.modules["program"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Memory:
    """The address space of this process, capped at its current size plus `extra_bytes`."""

    def __init__(self, extra_bytes: int) -> None:
        try:
            self._file = os.open("/proc/self/statm", os.O_RDONLY)  # stays open: read after each job
        except OSError:  # not every system has it
            self._most = 0
            return
        size = self._read()
        resource.setrlimit(resource.RLIMIT_AS, (size + extra_bytes, size + extra_bytes))
        self._most = size + extra_bytes // 4

    @property
    def is_kept(self) -> bool:
        """Whether a job left so much in use that the next one could run out of memory."""
        return self._most > 0 and self._read() > self._most

    def _read(self) -> int:
        return int(os.pread(self._file, 64, 0).split()[0]) * resource.getpagesize()


def step_forward() -> None:
    """Makes the kernel kill this process before its parent when the machine runs out of memory."""
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
        file.write("1000")


def main() -> None:
    """Answers jobs until the parent ends or too much memory stays in use."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in a terminal reaches the whole group; the parent decides
    step_forward()
    for limit, value in (("RLIMIT_CORE", 0), ("RLIMIT_FSIZE", 0), ("RLIMIT_STACK", _STACK_BYTES)):
        with contextlib.suppress(ValueError, OSError):  # not every system can lower each limit
            resource.setrlimit(getattr(resource, limit), (value, value))
    pipe = Pipe()
    start = pipe.read()
    if start is None:
        return
    sys.path[:] = start["sys_path"]
    do: Callable[[dict[str, Any]], dict[str, Any]] = load(start["program"]).prepare(start["options"])
    memory = Memory(start["memory_bytes"])
    pipe.write({"ready": True})
    while (job := pipe.read()) is not None:
        signal.setitimer(signal.ITIMER_REAL, start["time_limit_s"] + 1.0)  # its default action ends the process
        reply = do(job)
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        last = memory.is_kept
        attachment = reply.pop("attachment", b"")
        if attachment:
            reply["attachment"] = len(attachment)
        pipe.write({"reply": reply, "last": last}, attachment)
        if last:
            return


if __name__ == "__main__":
    main()

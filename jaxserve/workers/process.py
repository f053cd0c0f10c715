"""The parent's side of a process that can be killed."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, final

from jaxserve.errors import JaxServeError

_CHILD = Path(__file__).with_name("child.py")
_START_LIMIT_S = 60.0  # for a cold file system and options as large as a vocabulary
_READ_BYTES = 1 << 16
_SHORTEST_S = 0.001  # with 0 a socket does not wait at all, and raises no TimeoutError


class WorkerStartError(JaxServeError, RuntimeError):
    """The process could not be started: a fault of the host, never of the job."""


class WorkerTimeoutError(JaxServeError, TimeoutError):
    """The job took too long, and the process was killed. A busy host can be the reason."""


class WorkerEndedError(JaxServeError, RuntimeError):
    """The process ended in the middle of the job: it crashed, ran out of memory or was killed.

    `status`: its exit status, negative for a signal.
    """

    def __init__(self, name: str, status: int | None) -> None:
        super().__init__(f"{name} ended (exit status {status})")
        self.status = status


@final
class Worker:
    """A process that runs one job at a time. It starts with the first job, or by `start`, and again after it ended.

    A socket pair joins parent and child, so nothing else can connect; messages are JSON lines, never pickles. Only
    `kill` may be called while another thread is in `ask`.
    """

    def __init__(
        self,
        program: Path,
        options: Callable[[], dict[str, Any]],
        *,
        name: str,
        time_limit_s: float,
        memory_bytes: int,
    ) -> None:
        """Starts nothing.

        Args:
            program: file with a function `prepare(options) -> Callable[[job], reply]`; options, job and reply are JSON.
            options: returns the options; called at each start.
            name: the process's name in errors.
            time_limit_s: seconds for one job.
            memory_bytes: address space that a job may take beyond what the process has after `prepare`.
        """
        self._program, self._options, self._name = program, options, name
        self._time_limit_s, self._memory_bytes = time_limit_s, memory_bytes
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None

    @property
    def process_id(self) -> int | None:
        """The id of the process, None if there is none."""
        return None if self._process is None else self._process.pid

    @property
    def is_running(self) -> bool:
        """Whether the process runs, so that a job needs no start."""
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Starts the process unless it runs; returns when it is ready.

        Raises:
            WorkerStartError: the process cannot be started.
        """
        if self.is_running:
            return
        self.stop()
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-P", str(_CHILD)], stdin=theirs, stdout=theirs, stderr=subprocess.DEVNULL
                )
            except OSError as error:
                ours.close()
                raise WorkerStartError(f"{self._name} cannot be started: {error}") from error
        self._socket = ours
        limits = {"time_limit_s": self._time_limit_s, "memory_bytes": self._memory_bytes}
        start = {"sys_path": sys.path, "program": str(self._program), "options": self._options(), **limits}
        try:
            self._exchange(start, _START_LIMIT_S)
        except OSError as error:
            status = self.stop()
            raise WorkerStartError(f"{self._name} did not start (exit status {status}): {error}") from error
        except BaseException:
            self.stop()
            raise

    def ask(self, job: dict[str, Any], limit_s: float | None = None) -> dict[str, Any]:
        """Returns the reply to a job, which may take `limit_s` seconds; default: the time limit.

        Raises:
            WorkerStartError: the process cannot be started.
            WorkerTimeoutError: the job took longer; the process has been killed.
            WorkerEndedError: the process ended before its reply was complete.
            ValueError, RecursionError: JSON cannot express the job; nothing was sent.
        """
        line = _encode(job)
        self.start()
        try:
            reply = self._exchange(line, max(self._time_limit_s if limit_s is None else limit_s, _SHORTEST_S))
        except TimeoutError as error:
            self.stop()
            raise WorkerTimeoutError(f"{self._name} took too long") from error
        except (OSError, ValueError) as error:  # the process ended before or within its reply
            raise WorkerEndedError(self._name, self.stop()) from error
        except BaseException:  # Ctrl-C: a reply that comes later must not be taken for the next job's
            self.stop()
            raise
        if reply["last"]:
            self.stop()
        return reply["reply"]

    def kill(self) -> None:
        """Kills the process; a thread that waits in `ask` gets a WorkerEndedError."""
        process = self._process
        if process is not None:
            process.kill()

    def stop(self) -> int | None:
        """Kills the process; returns its exit status, None if there was no process."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        if self._process is None:
            return None
        process, self._process = self._process, None
        process.kill()
        return process.wait()

    def _exchange(self, message: dict[str, Any] | bytes, limit_s: float) -> dict[str, Any]:
        """Sends one line and returns the answer; OSError (also TimeoutError) when none comes."""
        assert self._socket is not None, "started"
        deadline = time.monotonic() + limit_s
        self._socket.settimeout(limit_s)
        self._socket.sendall(message if isinstance(message, bytes) else _encode(message))
        reply = bytearray()
        while not reply.endswith(b"\n"):
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                raise TimeoutError
            self._socket.settimeout(remaining)
            data = self._socket.recv(_READ_BYTES)
            if not data:
                raise ConnectionError("it ended")
            reply += data
        return json.loads(reply.decode("utf-8", "surrogatepass"))


def _encode(message: dict[str, Any]) -> bytes:
    """Returns a line of JSON. Lone surrogates are not escaped: two escapes could come out as one character."""
    return json.dumps(message, ensure_ascii=False).encode("utf-8", "surrogatepass") + b"\n"

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

    A socket pair joins parent and child, so nothing else can connect; messages are JSON lines, never pickles. A job and
    a reply may have `bytes` or a `bytearray` as "attachment", which cost no JSON. Only `kill` may be called while
    another thread is in `ask`.
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
            self._exchange(_encode(start), b"", _START_LIMIT_S)
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
        data = job.get("attachment")
        line = _encode(job if data is None else {**job, "attachment": len(data)})
        self.start()
        try:
            reply = self._exchange(
                line, data or b"", max(self._time_limit_s if limit_s is None else limit_s, _SHORTEST_S)
            )
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

    def _exchange(self, line: bytes, attachment: bytes, limit_s: float) -> dict[str, Any]:
        """Sends a message and returns the answer; OSError (also TimeoutError) when none comes."""
        assert self._socket is not None, "started"
        deadline = time.monotonic() + limit_s
        self._socket.settimeout(limit_s)
        self._socket.sendall(line)
        if attachment:
            self._socket.settimeout(_find_rest(deadline))
            self._socket.sendall(attachment)
        data = bytearray()
        end = -1
        while end < 0:
            received = self._receive(_READ_BYTES, deadline)
            end = received.find(b"\n")
            end = len(data) + end if end >= 0 else -1
            data += received
        begun = data[end + 1 :]
        del data[end:]
        answer = json.loads(data.decode("utf-8", "surrogatepass"))
        size = answer.get("reply", {}).get("attachment", 0)
        if size:
            if not 0 < size <= self._memory_bytes:
                raise ValueError(f"no process like this one has {size} bytes")
            answer["reply"]["attachment"] = self._receive_all(size, begun, deadline)
        return answer

    def _receive_all(self, size: int, begun: bytearray, deadline: float) -> bytearray:
        """Returns `size` bytes, of which the first are there already. None is copied twice."""
        assert self._socket is not None, "started"
        found = bytearray(size)
        found[: len(begun)] = begun
        rest = memoryview(found)[len(begun) :]
        while rest:
            self._socket.settimeout(_find_rest(deadline))
            count = self._socket.recv_into(rest)
            if not count:
                raise ConnectionError("it ended")
            rest = rest[count:]
        return found

    def _receive(self, most: int, deadline: float) -> bytes:
        assert self._socket is not None, "started"
        self._socket.settimeout(_find_rest(deadline))
        received = self._socket.recv(most)
        if not received:
            raise ConnectionError("it ended")
        return received


def _find_rest(deadline: float) -> float:
    """Returns the seconds up to a deadline; TimeoutError if there are none."""
    rest = deadline - time.monotonic()
    if rest <= 0:
        raise TimeoutError
    return rest


def _encode(message: dict[str, Any]) -> bytes:
    """Returns a line of JSON. Lone surrogates are not escaped: two escapes could come out as one character."""
    return json.dumps(message, ensure_ascii=False).encode("utf-8", "surrogatepass") + b"\n"

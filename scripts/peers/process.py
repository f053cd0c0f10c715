"""The parent's side of `protocol.py`: a participant's process, which waits stopped while others run."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

_END_SECONDS = 10.0
_LOG_SHOWN = 4000  # characters


class PeerError(RuntimeError):
    """A participant is not installed, failed, or gave no answer in time; the message is one line."""


class PeerProcess:
    """One participant. Faults are `PeerError`s, after which only `close` is of use.

    Args:
        command: the program and its interpreter.
        environment: all variables of its environment.
        timeout: seconds that loading with the first run, and each run, may take.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], timeout: float) -> None:
        self._timeout, self._is_faulty = timeout, False
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._log = tempfile.NamedTemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                env=dict(environment),
                text=True,
                start_new_session=True,
            )
        except OSError as error:
            raise PeerError(f"cannot be started: {error}") from error
        assert self._process.stdin is not None and self._process.stdout is not None
        self._stdin: TextIO = self._process.stdin
        threading.Thread(target=self._read, args=(self._process.stdout,), daemon=True).start()

    def load(self, job: Mapping[str, Any]) -> dict[str, Any]:
        """Sends the job and returns what the participant says of itself once it is loaded and warm."""
        return self._try(job, "loading")

    def run(self) -> dict[str, Any]:
        """Runs all requests once; returns seconds and outputs."""
        return self._try({}, "a run")

    def stop(self) -> None:
        """Stops all its processes until `resume`: an idle one may poll, or have threads that spin."""
        self._signal("SIGSTOP")

    def resume(self) -> None:
        """Lets it go on."""
        self._signal("SIGCONT")

    def read_log(self) -> str:
        """Returns the end of what it wrote to its standard error."""
        return Path(self._log.name).read_text(encoding="utf-8", errors="replace")[-_LOG_SHOWN:]

    def close(self) -> None:
        """Ends it, with all processes that it started; at once if it gave an error or no answer."""
        self.resume()
        with contextlib.suppress(OSError):
            self._stdin.close()
        if not self._is_faulty:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_END_SECONDS)
        self._signal("SIGKILL")
        self._process.wait()
        self._log.close()

    def _try(self, message: Mapping[str, Any], what: str) -> dict[str, Any]:
        try:
            return self._ask(message, what)
        except PeerError:
            self._is_faulty = True
            raise

    def _ask(self, message: Mapping[str, Any], what: str) -> dict[str, Any]:
        try:
            self._stdin.write(json.dumps(message) + "\n")
            self._stdin.flush()
            line = self._lines.get(timeout=self._timeout)
        except queue.Empty:
            raise PeerError(f"no answer within {self._timeout:g} s of {what}") from None
        except OSError:
            line = None
        if line is None:
            raise PeerError(f"its process ended: {self._find_reason()}")
        try:
            answer: dict[str, Any] = json.loads(line)
        except ValueError:
            raise PeerError(f"an answer is not JSON: {line[:100]!r}") from None
        if "error" in answer:
            raise PeerError(" ".join(str(answer["error"]).split()))
        return answer

    def _find_reason(self) -> str:
        lines = [line.strip() for line in self.read_log().splitlines() if line.strip()]
        return lines[-1] if lines else f"status {self._process.wait(_END_SECONDS)}"

    def _read(self, stdout: TextIO) -> None:
        for line in stdout:
            self._lines.put(line)
        self._lines.put(None)

    def _signal(self, name: str) -> None:
        """Signals the participant's group; on systems without groups only an end reaches its process."""
        if hasattr(os, "killpg"):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, getattr(signal, name))
        elif name == "SIGKILL":
            self._process.kill()

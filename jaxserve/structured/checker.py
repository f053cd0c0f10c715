"""Asks the worker process whether a grammar compiles within the limits."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from jaxserve.structured.errors import CheckerError
from jaxserve.structured.vocabulary import Vocabulary

WORKER = Path(__file__).with_name("worker.py")
_START_LIMIT_S = 60.0  # a cold file system and a large vocabulary
_READ_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the checker found."""

    error: str | None  # None: the grammar compiles
    is_certain: bool = True  # False: a busy host could be the reason, so it is worth asking again later


@final
class Checker:
    """One worker process, started when the first grammar comes and again after it was killed.

    A socket pair joins the two, so nobody else can connect; messages are JSON lines, never pickles. Safe to use from
    several threads: grammars are checked one after the other.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        *,
        limits: dict[str, Any],
        time_limit_s: float,
        memory_bytes: int,
        worker: Path = WORKER,
    ) -> None:
        self._vocabulary = vocabulary
        self._limits = limits
        self._time_limit_s = time_limit_s
        self._memory_bytes = memory_bytes
        self._worker = worker
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None

    def check(self, source: str) -> Verdict:
        """Compiles a grammar in the worker.

        Raises:
            CheckerError: the worker cannot be started.
        """
        with self._lock:
            self._start()
            try:
                reply = self._ask({"source": source}, self._time_limit_s)
            except TimeoutError:
                self._stop()
                return Verdict(f"takes more than {self._time_limit_s:g} s to compile", is_certain=False)
            except (OSError, ValueError):  # it ended before or in the middle of its answer
                status = self._stop()
                memory = self._memory_bytes >> 20
                return Verdict(f"needs more than {memory} MiB or crashed its compiler (exit status {status})")
            except BaseException:  # Ctrl-C: an answer that comes later must not be taken for the next grammar's
                self._stop()
                raise
            if reply["last"]:
                self._stop()
            return Verdict(reply["error"])

    def start(self) -> None:
        """Starts the worker now rather than with the first grammar.

        Raises:
            CheckerError: it cannot be started.
        """
        with self._lock:
            self._start()

    def close(self) -> None:
        """Ends the worker."""
        with self._lock:
            self._stop()

    @property
    def process_id(self) -> int | None:
        """The worker's process id while it runs."""
        return None if self._process is None else self._process.pid

    def _start(self) -> None:
        if self._process is not None and self._process.poll() is None:
            return
        self._stop()
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-P", str(self._worker)],
                    stdin=theirs,
                    stdout=theirs,
                    stderr=subprocess.DEVNULL,
                )
            except OSError as error:
                ours.close()
                raise CheckerError(f"the grammar checker cannot be started: {error}") from error
        self._socket = ours
        vocabulary = self._vocabulary
        try:
            self._ask(
                {
                    "sys_path": sys.path,
                    "tokens": [token.decode("latin-1") for token in vocabulary.tokens],
                    "special_token_ids": vocabulary.special_token_ids,
                    "eos_token_ids": vocabulary.eos_token_ids,
                    "limits": self._limits,
                    "time_limit_s": self._time_limit_s,
                    "memory_bytes": self._memory_bytes,
                },
                _START_LIMIT_S,
            )
        except OSError as error:
            status = self._stop()
            raise CheckerError(f"the grammar checker did not start (exit status {status}): {error}") from error

    def _ask(self, message: dict[str, Any], limit_s: float) -> dict[str, Any]:
        """Sends one line and waits for the answering line; OSError (also TimeoutError) when there is none."""
        assert self._socket is not None, "started"
        deadline = time.monotonic() + limit_s
        self._socket.settimeout(limit_s)
        self._socket.sendall(json.dumps(message).encode() + b"\n")
        reply = b""
        while not reply.endswith(b"\n"):
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                raise TimeoutError
            self._socket.settimeout(remaining)
            data = self._socket.recv(_READ_BYTES)
            if not data:
                raise ConnectionError("it ended")
            reply += data
        return json.loads(reply)

    def _stop(self) -> int | None:
        """Kills the worker if there is one; returns its exit status."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        if self._process is None:
            return None
        process, self._process = self._process, None
        process.kill()
        return process.wait()

"""One process that is kept running: its start, whether it is ready, its lines, and when it may start again."""

from __future__ import annotations

import contextlib
import logging
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import IO

import httpx

from jaxserve.config import read_environment
from jaxserve.tools.cluster.child import wrap

_log = logging.getLogger(__name__)
_FIRST_DELAY, _LAST_DELAY = 1.0, 60.0  # seconds before a process that ended is started again
_STEADY = 60.0  # seconds after which its failures are forgotten
_PROBE_INTERVAL, _PROBE_TIMEOUT = 0.3, 2.0  # seconds


@dataclass(frozen=True)
class Service:
    """What is run."""

    name: str  # before each of its lines
    command: tuple[str, ...]
    environment: dict[str, str] = field(default_factory=dict)  # beside this process's
    ready_url: str | None = None  # answers with 200 once it is ready; None: as soon as it runs
    end_signal: int = signal.SIGKILL  # ends it at once, and with it the processes that it has started


class RunningService:
    """A service and its process. All methods are called on one thread.

    Args:
        show_name: write the name before each line.
        clock: seconds, monotonic.
    """

    def __init__(
        self, service: Service, *, show_name: bool = True, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.service = service
        self.was_ready = False  # at any time
        self._show_name, self._clock = show_name, clock
        self._process: subprocess.Popen[str] | None = None
        self._client = httpx.Client(timeout=_PROBE_TIMEOUT, trust_env=False)  # of this machine: no proxy
        self._is_ready, self._failures = False, 0
        self._ready_since = self._next_probe = self._next_start = 0.0

    @property
    def is_running(self) -> bool:
        """Whether there is a process that has not ended."""
        return self._process is not None and self._process.poll() is None

    @property
    def is_ready(self) -> bool:
        """Whether it answers."""
        return self._is_ready

    def start(self) -> None:
        """Starts the process, in a session of its own: a terminal's Ctrl-C reaches this process alone."""
        self._process = subprocess.Popen(
            wrap(self.service.command, self.service.end_signal),
            env=read_environment() | self.service.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        assert self._process.stdout is not None
        prefix = f"[{self.service.name}] " if self._show_name else ""
        threading.Thread(target=_pass_on, args=(self._process.stdout, prefix), daemon=True).start()

    def look(self) -> None:
        """Notes whether the process has become ready; an ended one is started again once its delay is over."""
        now = self._clock()
        if self.is_running:
            if not self._is_ready and now >= self._next_probe:
                self._next_probe = now + _PROBE_INTERVAL
                if self._answers():
                    self._is_ready = self.was_ready = True
                    self._ready_since = now
            if self._is_ready and now - self._ready_since > _STEADY:
                self._failures = 0
        elif now >= self._next_start:
            self.start()

    def note_end(self) -> int | None:
        """Returns the status of a process that has ended since the last call, and schedules the next start."""
        if self._process is None or (status := self._process.poll()) is None:
            return None
        self._process, self._is_ready = None, False
        delay = min(_LAST_DELAY, _FIRST_DELAY * 2**self._failures)
        self._failures += 1
        self._next_start = self._clock() + delay
        _log.warning("%s ended with status %d; it starts again in %g s", self.service.name, status, delay)
        return status

    def send(self, number: int) -> None:
        """Sends a signal."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)

    def wait(self, seconds: float) -> int | None:
        """Returns the status of the process; None if it does not end in time, or there is none."""
        if self._process is None:
            return None
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(seconds)
        return None

    def _answers(self) -> bool:
        if self.service.ready_url is None:
            return True
        try:
            return self._client.get(self.service.ready_url).status_code == httpx.codes.OK
        except httpx.HTTPError:
            return False


def _pass_on(lines: IO[str], prefix: str) -> None:
    """Writes each line to standard error, whole."""
    for line in lines:
        with contextlib.suppress(OSError, ValueError):  # a closed stream must not end the process
            sys.stderr.write(prefix + line)
            sys.stderr.flush()

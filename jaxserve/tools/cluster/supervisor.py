"""Keeps the processes of a group running, and ends them together."""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Callable, Sequence
from types import FrameType

from jaxserve.tools.cluster.service import RunningService, Service

_log = logging.getLogger(__name__)
_TURN = 0.1  # seconds between two looks
_CLOSING_TIME = 10.0  # seconds for each process in front to end after those behind it


class Supervisor:
    """Starts replicas, then what stands in front of them, and starts again what ends.

    The first signal lets the replicas drain and then ends the fronts; the second ends all at once. A process that ends
    before it was ever ready ends the group: it would fail again.

    Args:
        replicas: started together.
        fronts: each started once all before it are ready, the last of them in front; ended the other way round.
        on_ready: called once all are ready.
        show_names: write each process's name before its lines.
    """

    def __init__(
        self,
        replicas: Sequence[Service],
        fronts: Sequence[Service],
        *,
        on_ready: Callable[[], None] = lambda: None,
        show_names: bool = True,
    ) -> None:
        self._replicas = [RunningService(each, show_name=show_names) for each in replicas]
        self._fronts = [RunningService(each, show_name=show_names) for each in fronts]
        self._on_ready = on_ready
        self._was_ready = False
        self._signals = 0

    def run(self) -> int:
        """Runs until a signal, or until a process cannot start; returns the exit status: 0 after a drain, else 2.

        It must be called on the main thread.
        """
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._take)
        signal.signal(signal.SIGHUP, self._pass_on)
        try:
            return self._drain() if self._keep_running() else 2
        finally:
            self._kill()

    def _take(self, number: int, frame: FrameType | None) -> None:
        del frame
        self._signals += 1
        _log.info("%s: %s", signal.Signals(number).name, "draining" if self._signals == 1 else "ending at once")

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        """Servers read their keys again."""
        del frame
        for each in self._replicas:
            each.send(number)

    @property
    def _all(self) -> list[RunningService]:
        return [*self._replicas, *self._fronts]

    def _keep_running(self) -> bool:
        """Returns True at a signal, and False when a process ended that was never ready."""
        while not self._signals:
            for stage in (self._replicas, *([each] for each in self._fronts)):
                if not all(self._tend(each) for each in stage):
                    return False
                if not all(each.was_ready for each in stage):
                    break
            else:
                if not self._was_ready:
                    self._was_ready = True
                    self._on_ready()
            time.sleep(_TURN)
        return True

    def _tend(self, each: RunningService) -> bool:
        """Starts a process that is due; returns False if it ended and was never ready."""
        status = each.note_end()
        if status is not None and not each.was_ready:
            _log.critical("%s could not start (status %d), so all end", each.service.name, status)
            return False
        each.look()
        return True

    def _drain(self) -> int:
        for each in self._replicas:
            each.send(signal.SIGTERM)
        statuses = [self._wait(each) for each in self._replicas]
        for each in reversed(self._fronts):
            if each.is_running:
                each.send(signal.SIGTERM)
                each.wait(_CLOSING_TIME)
        return 0 if all(status in (0, None) for status in statuses) and self._signals == 1 else 2

    def _wait(self, each: RunningService) -> int | None:
        while each.is_running and self._signals == 1:
            each.wait(_TURN)
        return each.wait(0)

    def _kill(self) -> None:
        for each in self._all:
            if each.is_running:
                each.send(each.service.end_signal)
                each.wait(_CLOSING_TIME)

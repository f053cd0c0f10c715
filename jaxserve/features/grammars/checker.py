"""Asks the worker process whether a grammar compiles within the limits."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from jaxserve.features.grammars.errors import CheckerError
from jaxserve.features.grammars.vocabulary import Vocabulary
from jaxserve.workers import Worker, WorkerEndedError, WorkerStartError, WorkerTimeoutError

WORKER = Path(__file__).with_name("worker.py")


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of a check."""

    error: str | None  # None: the grammar compiles
    is_certain: bool = True  # False: a busy host may be the reason; check again later


@final
class Checker:
    """One worker process, started for the first grammar and again after it was killed.

    Safe to use from several threads; grammars are checked one after the other.
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
        self._lock = threading.Lock()
        self._worker = Worker(
            worker,
            self._make_options,
            name="the grammar checker",
            time_limit_s=time_limit_s,
            memory_bytes=memory_bytes,
        )

    def check(self, source: str) -> Verdict:
        """Returns whether a grammar compiles in the worker, and the error if not.

        Raises:
            CheckerError: the worker cannot be started.
        """
        with self._lock:
            try:
                return Verdict(self._worker.ask({"source": source})["error"])
            except WorkerTimeoutError:
                return Verdict(f"takes more than {self._time_limit_s:g} s to compile", is_certain=False)
            except WorkerEndedError as error:
                memory = self._memory_bytes >> 20
                return Verdict(f"needs more than {memory} MiB or crashed its compiler (exit status {error.status})")
            except WorkerStartError as error:
                raise CheckerError(str(error)) from error

    def start(self) -> None:
        """Starts the worker before the first grammar.

        Raises:
            CheckerError: the worker cannot be started.
        """
        with self._lock:
            try:
                self._worker.start()
            except WorkerStartError as error:
                raise CheckerError(str(error)) from error

    def close(self) -> None:
        """Ends the worker."""
        with self._lock:
            self._worker.stop()

    @property
    def process_id(self) -> int | None:
        """The worker's process id, None if it does not run."""
        return self._worker.process_id

    def _make_options(self) -> dict[str, Any]:
        return {
            "tokens": [token.decode("latin-1") for token in self._vocabulary.tokens],
            "special_token_ids": self._vocabulary.special_token_ids,
            "eos_token_ids": self._vocabulary.eos_token_ids,
            "limits": self._limits,
        }

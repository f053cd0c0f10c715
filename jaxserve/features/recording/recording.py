"""Writes the calls of the `Runner` protocol, and the token ids that they gave, as lines of JSON.

A line is written before its call reaches the device, so the step that ended a process is on file. The first line is a
header (identity.py). The others have a `call`:

    start     plan            a `StepPlan`; fields that are left out are those of the plan before
    sample    step, mask      masks have lines by number, see plan_codec.py; without a mask there is none
    result    step, ids, counts   as in `StepOutputs`; counts only where runs are longer than one
    failed    step, error     the call above, or the wait for the step's result, raised this
    reset
    weights   digest          parameters were replaced; `digest_params` afterwards
    adapter   load, digest    an adapter was read, which later plans name by the number of its load
"""

from __future__ import annotations

import json
import logging
import os
import threading
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from jaxserve.core.runtime.plan_codec import CallEncoder, encode_object
from jaxserve.core.runtime.protocol import ParamUpdates
from jaxserve.core.scheduler.step_plan import StepOutputs, StepPlan
from jaxserve.errors import ConfigError

_log = logging.getLogger(__name__)
_encode = json.JSONEncoder(separators=(",", ":"), check_circular=False, default=encode_object).encode
_MAX_ERROR = 500  # characters


def refuse_target(path: Path) -> None:
    """Raises ConfigError where a recording cannot be made: the file is there already, or its folder is not."""
    if os.path.lexists(path):
        message = f"{path} exists, and no recording is overwritten; move it, or give another name"
        raise ConfigError(message, field="record_steps", value=str(path))
    if not path.parent.is_dir() or not os.access(path.parent, os.W_OK | os.X_OK):
        message = f"{path} cannot be made: {path.parent} is not a directory that this user may write to"
        raise ConfigError(message, field="record_steps", value=str(path))


class RecordingFile:
    """A new file of JSON lines that only its owner may read. A write that fails ends the recording, not the engine."""

    def __init__(self, path: Path, header: Mapping[str, Any]) -> None:
        """Makes the file and writes its header; ConfigError if there is one, or it cannot be made."""
        try:
            self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except OSError as error:
            message = f"{path} cannot be made: {error.strerror}"
            raise ConfigError(message, field="record_steps", value=str(path)) from error
        self.close = weakref.finalize(self, os.close, self._descriptor)
        self._path, self._lock = path, threading.Lock()
        self.write(header)

    def write(self, line: Mapping[str, Any]) -> None:
        """Appends a line. It is the kernel's before the call returns, so it survives the process."""
        if not self.close.alive:
            return
        data = memoryview(f"{_encode(line)}\n".encode())
        try:
            with self._lock:  # adapters are read on other threads
                while data:
                    data = data[os.write(self._descriptor, data) :]
        except OSError as error:
            _log.error("record_steps: nothing more is recorded: %s: %s", self._path, error.strerror)
            self.close()


class Recording:
    """Writes the calls that a `TeeRunner` makes."""

    def __init__(self, file: RecordingFile, digest: Callable[[], str]) -> None:
        """`digest` returns the `digest_params` of the runner's parameters."""
        self._file, self._digest = file, digest
        self._calls = CallEncoder()

    def start(self, plan: StepPlan) -> None:
        """See `CallSink`."""
        self._file.write(self._calls.start(plan))

    def sample(self, step_id: int, mask: Any) -> None:
        """See `CallSink`."""
        self._file.write(self._calls.sample(step_id, mask))

    def finish(self, step_id: int, outputs: StepOutputs) -> None:
        """See `CallSink`."""
        line: dict[str, Any] = {"call": "result", "step": step_id, "ids": outputs.token_ids}
        if outputs.counts is not None:
            line["counts"] = outputs.counts
        self._file.write(line)

    def fail(self, step_id: int, error: BaseException) -> None:
        """See `CallSink`."""
        text = f"{type(error).__name__}: {error}"[:_MAX_ERROR]
        self._file.write({"call": "failed", "step": step_id, "error": text})

    def reset(self) -> None:
        """See `CallSink`."""
        self._file.write({"call": "reset"})

    def write_params(self, updates: ParamUpdates) -> None:
        """See `CallSink`; the digest is known afterwards."""

    def end_write(self) -> None:
        """See `CallSink`."""
        self._file.write({"call": "weights", "digest": self._digest()})

    def load_adapter(self, generation: int, path: str, digest: str) -> None:
        """Notes a load that all nodes have; its path is not in the file, which may be replayed elsewhere."""
        self._file.write({"call": "adapter", "load": generation, "digest": digest})

    def warm_thread(self) -> None:
        """See `CallSink`; tokens do not depend on it."""

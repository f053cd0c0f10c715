"""Runs the calls of a recording on a runner, without a scheduler, and compares every token id."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any

from jaxserve.core.runtime.plan_codec import MaskDecoder, PlanDecoder
from jaxserve.core.runtime.protocol import Runner, StartedStep, StepFuture
from jaxserve.core.scheduler.step_plan import StepOutputs, StepPlan, Ticket
from jaxserve.errors import InvalidRequestError, JaxServeError, RecordingError
from jaxserve.files import open_regular

_MAX_HEADER = 64 * 2**20  # bytes


class RecordingReader:
    """The lines of a recording: its header, then `lines`. A last line without its end is left out."""

    def __init__(self, path: Path) -> None:
        """Opens a recording and reads its header; RecordingError if it has none or cannot be read."""
        try:
            self._file = open_regular(path)
            self.size = os.fstat(self._file.fileno()).st_size  # bytes
            line = self._file.readline(_MAX_HEADER)
        except OSError as error:
            message = f"{path} cannot be read: {error.strerror}"
            raise RecordingError(message, field="recording", value=str(path)) from error
        self.is_cut = False  # known after the last line
        self.num_bytes_read = len(line)
        try:
            header = json.loads(line) if line.endswith(b"\n") else None
        except (ValueError, RecursionError):
            header = None
        if not isinstance(header, dict) or "recording" not in header:
            message = f"{path} does not begin with the header of a recording"
            raise RecordingError(message, field="recording", value=str(path))
        self.header: dict[str, Any] = header

    def lines(self) -> Iterator[dict[str, Any]]:
        """Yields the calls; RecordingError names a line that is not one."""
        for number, line in enumerate(self._file, 2):
            self.num_bytes_read += len(line)
            if not line.endswith(b"\n"):
                self.is_cut = True
                return
            try:
                read = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise RecordingError(f"line {number} is not JSON: {error}", field="recording") from error
            if not isinstance(read, dict):
                raise RecordingError(f"line {number} is not an object of JSON", field="recording")
            yield read

    def close(self) -> None:
        """Closes the file. Further calls do nothing."""
        self._file.close()


@dataclass(frozen=True, slots=True)
class Difference:
    """The first row whose ids are not those of the recording; or, without a row, a step that failed in the replay."""

    step_id: int
    row: int | None = None
    ticket: Ticket | None = None
    index: int = 0  # in the row's run
    recorded: int | None = None  # None: that run is shorter; negative ids are sentinels (core/scheduler/sequence.py)
    replayed: int | None = None
    num_rows: int = 0  # rows of the step that differ
    error: str = ""


@dataclass(slots=True)
class ReplaySummary:
    """What a replay did."""

    num_steps: int = 0  # started
    num_compared: int = 0  # whose ids are in the recording
    num_ids: int = 0  # compared, sentinels included
    num_failed: int = 0  # that failed when they were recorded
    num_resets: int = 0
    num_updates: int = 0  # of weights
    num_loads: int = 0  # of adapters
    difference: Difference | None = None


@dataclass(slots=True)
class _Step:
    plan: StepPlan
    started: StartedStep | None = None
    future: StepFuture | None = None
    error: Exception | None = None


@dataclass
class Replay:
    """Makes a recording's calls on a runner, in order."""

    runner: Runner
    masks: MaskDecoder
    update_weights: Callable[[int], str]  # writes the weights of the n-th update, from 0; returns their digest
    load_adapter: Callable[[int, str], None]  # has the adapter with a digest ready for plans, by the number of its load
    summary: ReplaySummary = field(default_factory=ReplaySummary)

    def __post_init__(self) -> None:
        self._plans = PlanDecoder()
        self._steps: dict[int, _Step] = {}  # not yet compared

    def run(self, lines: Iterable[dict[str, Any]]) -> Iterator[None]:
        """Makes the calls and yields after each; stops at the first difference.

        Raises:
            RecordingError: a line is not what it should be, or weights are not those that were recorded.
        """
        for number, line in enumerate(lines, 2):
            try:
                self._call(line)
            except (ValueError, TypeError, KeyError) as error:
                if isinstance(error, JaxServeError) and not isinstance(error, InvalidRequestError):
                    raise
                raise RecordingError(f"line {number} is malformed: {error!r}", field="recording") from error
            yield
            if self.summary.difference is not None:
                return

    def _call(self, line: dict[str, Any]) -> None:
        match line["call"]:
            case "start":
                self._start(self._plans.decode(line["plan"]))
            case "sample":
                step = self._steps[line["step"]]
                mask = self.masks.decode(line["mask"]) if "mask" in line else None
                num_lines = step.plan.num_rows * step.plan.width
                if mask is not None and len(mask) != num_lines:
                    raise ValueError(f"a mask of {len(mask)} lines for a step that wants {num_lines}")
                if step.started is not None:
                    step.future = _attempt(step, step.started.sample, mask)
            case "result":
                step = self._steps.pop(line["step"])
                self._compare(step, StepOutputs(line["ids"], line.get("counts")))
            case "failed":  # if it does not fail here, nothing comes of it: a reset follows
                self._steps.pop(line["step"])
                self.summary.num_failed += 1
            case "reset":
                self._steps.clear()
                self.summary.num_resets += 1
                self.runner.reset()
            case "weights":
                self._write_weights(line["digest"])
            case "adapter":
                self.load_adapter(line["load"], line["digest"])
                self.summary.num_loads += 1
            case other:
                raise ValueError(f"there is no call {other!r}")

    def _start(self, plan: StepPlan) -> None:
        step = self._steps[plan.step_id] = _Step(plan)
        self.summary.num_steps += 1
        step.started = _attempt(step, self.runner.start, plan)

    def _compare(self, step: _Step, recorded: StepOutputs) -> None:
        plan = step.plan
        future = step.future
        outputs = None if future is None else _attempt(step, future.result)
        if outputs is None:
            if step.error is None:
                raise ValueError(f"step {plan.step_id} has a result and was never sampled")
            self.summary.difference = Difference(plan.step_id, error=f"{type(step.error).__name__}: {step.error}")
            return
        self.summary.num_compared += 1
        self.summary.num_ids += len(recorded.token_ids)
        self.summary.difference = _find_difference(plan, recorded, outputs)

    def _write_weights(self, digest: str) -> None:
        found = self.update_weights(self.summary.num_updates)
        self.summary.num_updates += 1
        if found != digest:
            message = f"update {self.summary.num_updates} wrote other weights: their digest is {digest}, here {found}"
            raise RecordingError(message, field="weights", value=found)


def _attempt(step: _Step, function: Callable[..., Any], *arguments: Any) -> Any:
    """Calls a function of the device; its error is the step's, and counts only if the recording has a result."""
    try:
        return function(*arguments)
    except Exception as error:
        step.error = error
        return None


def _find_difference(plan: StepPlan, recorded: StepOutputs, replayed: StepOutputs) -> Difference | None:
    """Returns the first difference that means something: of a row that does not sample, only sentinels do."""
    rows = [*((row, True) for row in plan.decode_rows), *((chunk.row, chunk.is_last) for chunk in plan.chunks)]
    runs = zip_longest(recorded.split_runs(), replayed.split_runs(), fillvalue=())
    different = []
    for (row, samples), ticket, pair in zip(rows, plan.tickets, runs, strict=True):
        old, new = ([token_id for token_id in run if samples or token_id < 0] for run in pair)
        if old != new:
            different.append((row, ticket, old, new))
    if not different:
        return None
    row, ticket, *both = different[0]
    ids = list(zip_longest(*both))
    index = next(index for index, (old, new) in enumerate(ids) if old != new)
    return Difference(plan.step_id, row, ticket, index, *ids[index], num_rows=len(different))

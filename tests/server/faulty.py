"""`jaxserve serve` on a device with faults: a request's priority says which one it brings about.

Takes the flags of `jaxserve serve`; everything but the two objects wrapped here is the real server.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from jaxserve.core.scheduler import Scheduler, StepOutputs, StepPlan
from jaxserve.core.scheduler.sequence import NON_FINITE
from jaxserve.engine import async_engine
from jaxserve.engine.build import ReadyEngine, build_engine
from jaxserve.tools import cli

FAIL_START = 9001  # the step is not taken by the device
FAIL_RESULT = 9002  # it fails on the device
NOT_FINITE = 9003  # this row's logits are not finite
STUCK = 9004  # the step takes STUCK_SECONDS
FAIL_PLAN = 9005  # a fault of the host: the scheduler raises
STUCK_SECONDS = 6.0
SLOW = 9100  # and above: every step takes as many milliseconds more as the priority is above it


class FaultyFuture:
    """A step that may fail, or take its time."""

    def __init__(self, future: Any, priorities: Sequence[int]) -> None:
        self._future, self._priorities = future, priorities

    def result(self) -> StepOutputs:
        outputs: StepOutputs = self._future.result()
        if FAIL_RESULT in self._priorities:
            raise RuntimeError("the device failed, as it was asked to")
        if STUCK in self._priorities:
            time.sleep(STUCK_SECONDS)
        time.sleep(max([0, *(p - SLOW for p in self._priorities)]) / 1000)
        if NOT_FINITE not in self._priorities:
            return outputs
        pairs = zip(outputs.token_ids, self._priorities, strict=True)  # runs of one
        return dataclasses.replace(outputs, token_ids=[NON_FINITE if p == NOT_FINITE else token for token, p in pairs])


class FaultyStep:
    def __init__(self, step: Any, priorities: Sequence[int]) -> None:
        self._step, self._priorities = step, priorities

    def sample(self, mask: Any = None) -> FaultyFuture:
        return FaultyFuture(self._step.sample(mask), self._priorities)


class FaultyRunner:
    """The real runner, and what requests make of it."""

    def __init__(self, runner: Any, scheduler: Scheduler) -> None:
        self._runner, self._scheduler = runner, scheduler

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def start(self, plan: StepPlan) -> FaultyStep:
        rows = [self._scheduler.batch.by_ticket[ticket] for ticket in plan.tickets]
        priorities = [row.request.priority for row in rows]
        if FAIL_START in priorities:
            raise RuntimeError("the device took no step, as it was asked to")
        return FaultyStep(self._runner.start(plan), priorities)


def build_faulty(*args: Any, **options: Any) -> ReadyEngine:
    """Builds the engine and wraps its device and its plans."""
    ready = build_engine(*args, **options)
    scheduler = ready.engine.scheduler
    ready.engine.runner = FaultyRunner(ready.engine.runner, scheduler)
    plan = scheduler.plan

    def plan_or_fail() -> StepPlan | None:
        if any(sequence.request.priority == FAIL_PLAN for sequence in scheduler.waiting):
            raise ZeroDivisionError("a fault of the host, as it was asked for")
        return plan()

    scheduler.plan = plan_or_fail  # type: ignore[method-assign]
    return ready


if __name__ == "__main__":
    async_engine.build_engine = build_faulty
    sys.exit(cli.main())

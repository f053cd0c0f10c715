"""Rank 0's side of the steps: every call of its runner is sent to the other nodes before it is made."""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from jaxserve.core.runtime.plan_codec import CallEncoder
from jaxserve.core.runtime.protocol import ParamUpdates
from jaxserve.core.scheduler.step_plan import StepOutputs, StepPlan
from jaxserve.errors import ClusterError, WeightsError
from jaxserve.features.multinode.group import LeaderGroup
from jaxserve.features.multinode.processes import leave_processes
from jaxserve.features.multinode.wire import Link

_END_SECONDS = 0.5  # until it is noticed that the group has ended
_CHECKS = 20  # of the oldest step, in the time that it may take


class Followers:
    """Tells the other nodes of the calls that a `TeeRunner` makes; a fault anywhere is the loss of the group.

    Nothing waits for their answers. A thread looks whether the oldest step was answered in time.
    """

    def __init__(self, group: LeaderGroup) -> None:
        self._group, self._calls = group, CallEncoder()
        self._started: deque[tuple[int, float]] = deque()  # steps that some node has not answered, and when they began
        self._done = dict.fromkeys(range(1, group.size), -1)  # by rank, the last step answered
        self._loads: dict[int, queue.SimpleQueue[tuple[int, dict[str, Any]]]] = {}  # answers by generation
        self._dropped: deque[int] = deque()  # generations that the others still hold
        group.on_message = self._take
        threading.Thread(target=self._watch, name="jaxserve-steps", daemon=True).start()

    def start(self, plan: StepPlan) -> None:
        """See `CallSink`."""
        self._started.append((plan.step_id, time.monotonic()))
        self._tell_dropped()
        self._group.send(self._calls.start(plan))

    def sample(self, step_id: int, mask: Any) -> None:
        """See `CallSink`."""
        if mask is not None:  # else the others have sampled the step, too, as its plan says
            self._group.send(self._calls.sample(step_id, mask))

    def finish(self, step_id: int, outputs: StepOutputs) -> None:
        """See `CallSink`; the others have the same outputs."""

    def fail(self, step_id: int, error: BaseException) -> None:
        """See `CallSink`. The others may have run the step, or wait in it, so nothing can be recovered."""
        self._group.lose_step(step_id, error)

    def reset(self) -> None:
        """See `CallSink`."""
        self._group.send({"call": "reset"})

    def write_params(self, updates: ParamUpdates) -> None:
        """See `CallSink`. `updates` names a checkpoint's files."""
        assert not isinstance(updates, dict)
        self._group.send({"call": "weights", "path": str(updates.path)})

    def end_write(self) -> None:
        """See `CallSink`."""

    def warm_thread(self) -> None:
        """See `CallSink`."""
        self._group.send({"call": "warm"})

    def load_adapter(self, generation: int, path: str, digest: str) -> None:
        """Has the other nodes read an adapter on their own, while steps go on; any thread may call it.

        Raises:
            WeightsError: a node cannot read it, or has other files there; it is forgotten everywhere.
            ClusterError: the group has ended.
        """
        self._tell_dropped()
        answers = self._loads[generation] = queue.SimpleQueue()
        try:
            self._group.send({"call": "adapter", "load": generation, "path": path})
            found = dict(self._wait_for(answers) for _ in range(1, self._group.size))
        finally:
            del self._loads[generation]
        for rank, answer in sorted(found.items()):
            if answer.get("digest") != digest:
                self.drop_adapter(generation)
                self._tell_dropped()
                reason = answer.get("error") or f"has other files at {path} than rank 0"
                raise WeightsError(str(reason), field=f"rank {rank}", value=path)

    def drop_adapter(self, generation: int) -> None:
        """Notes that no plan will name a load any more; the others are told before the next call."""
        self._dropped.append(generation)  # and no more: this may run inside of any other call

    def _wait_for(self, answers: queue.SimpleQueue[tuple[int, dict[str, Any]]]) -> tuple[int, dict[str, Any]]:
        while True:
            try:
                return answers.get(timeout=_END_SECONDS)
            except queue.Empty:
                if self._group.wait_for_end(0):
                    raise ClusterError("the group has ended", field="nnodes") from None

    def _tell_dropped(self) -> None:
        loads = []
        while self._dropped:
            loads.append(self._dropped.popleft())
        if loads:
            self._group.send({"call": "drop", "loads": loads})

    def add_programs(self, change: Callable[[], None]) -> None:
        """Makes a change to the programs in use, of those compiled meanwhile, on all nodes."""
        self._group.send({"call": "programs"})
        change()

    def digest_params(self) -> None:
        """Has the other nodes take their part in `identity.digest_params`."""
        self._group.send({"call": "digest"})

    def stop(self) -> None:
        """Ends the other nodes. Further calls do nothing."""
        self._group.stop(leave_processes)

    def _take(self, link: Link, message: dict[str, Any]) -> bool:
        """Takes the answer to a step or to a load, on the thread that reads the link."""
        if "loaded" in message:
            if (answers := self._loads.get(message["loaded"])) is not None:
                answers.put((link.peer, message))
            return True
        step = message.get("done")
        if type(step) is not int:
            return False
        self._done[link.peer] = step
        answered = min(self._done.values())
        while self._started and self._started[0][0] <= answered:
            self._started.popleft()
        return True

    def _watch(self) -> None:
        limit = self._group.options.step_timeout
        while not self._group.wait_for_end(limit / _CHECKS):
            oldest = next(iter(tuple(self._started)), None)
            if oldest is not None and time.monotonic() - oldest[1] > limit:
                rank = min(self._done, key=lambda each: self._done[each])
                message = f"has not answered step {oldest[0]} for {limit:g} s"
                self._group.lose(ClusterError(message, field=f"rank {rank}"))

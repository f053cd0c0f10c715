"""A follower's steps: rank 0's calls, made in the same order on this node's runner."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from jaxserve.core.runtime.plan_codec import MaskDecoder, PlanDecoder
from jaxserve.core.runtime.protocol import ParamUpdates, Runner, StartedStep, StepFuture
from jaxserve.core.scheduler.step_plan import StepPlan
from jaxserve.errors import ClusterError
from jaxserve.features.multinode.group import FollowerGroup

_AHEAD = 1  # steps dispatched behind the one that is waited for
_ANSWER_SECONDS = 0.02  # between two answers: rank 0 wants to know that steps end, not each of them


class Follower:
    """Makes rank 0's calls, and says which steps have ended on this node's devices.

    A step is started when at most one is unanswered, so that a fault is told before more is built on it.

    Args:
        num_mask_words: of 32 bits, in a line of a mask.
        open_update: returns new weights for the path that rank 0 sent.
        digest_params: takes this node's part in a digest of the weights.
        load_adapter: reads the adapter of a generation from a path, keeps it, and returns its digest.
        drop_adapter: keeps it no longer.
        additions: changes to the programs in use, of those compiled meanwhile.
    """

    def __init__(
        self,
        group: FollowerGroup,
        runner: Runner,
        *,
        num_mask_words: int,
        open_update: Callable[[str], ParamUpdates],
        digest_params: Callable[[], object],
        load_adapter: Callable[[int, str], str],
        drop_adapter: Callable[[int], None],
        additions: queue.SimpleQueue[Callable[[], None]],
    ) -> None:
        self.num_steps = 0  # started
        self.last_call: float | None = None  # time.monotonic of rank 0's last
        self._group, self._runner = group, runner
        self._additions = additions
        self._open_update, self._load_adapter, self._drop_adapter = open_update, load_adapter, drop_adapter
        self._plain_calls = {
            "reset": self._reset,
            "warm": runner.warm_thread,
            "digest": digest_params,
            "programs": self._add_programs,
        }
        self._plans, self._masks = PlanDecoder(), MaskDecoder(num_mask_words)
        self._started: dict[int, StartedStep] = {}
        self._futures: queue.SimpleQueue[tuple[int, StepFuture | None]] = queue.SimpleQueue()
        self._room = threading.Semaphore(1 + _AHEAD)

    @property
    def num_compiles(self) -> int:
        """XLA compilations of this process since it was ready."""
        return self._runner.num_compiles

    def run(self) -> None:
        """Makes calls until rank 0 stops.

        Raises:
            ClusterError: a call is malformed, or another node is lost.
        """
        threading.Thread(target=self._answer, name="jaxserve-answer", daemon=True).start()
        while True:
            call = self._group.receive(0)
            self.last_call = time.monotonic()
            if call.get("call") == "stop":
                return
            try:
                make = self._read(call)
            except (ValueError, TypeError, KeyError) as error:
                raise ClusterError(f"sent a malformed call: {error!r}", field="rank 0") from error
            make()

    def _read(self, call: dict[str, Any]) -> Callable[[], object]:
        """Returns the function that makes a call."""
        match call["call"]:
            case "start":
                return partial(self._start, self._plans.decode(call["plan"]))
            case "sample":
                mask = self._masks.decode(call["mask"])
                return partial(self._sample, call["step"], self._started.pop(call["step"]), mask)
            case "weights":
                return lambda: self._runner.write_params(self._open_update(call["path"]))
            case "adapter":
                return partial(self._start_loading, call["load"], call["path"])
            case "drop":
                return partial(self._drop_adapters, call["loads"])
            case name if name in self._plain_calls:
                return self._plain_calls[name]
            case other:
                raise ValueError(f"there is no call {other!r}")

    def _start(self, plan: StepPlan) -> None:
        self._room.acquire()
        self.num_steps += 1
        started = self._runner.start(plan)
        if plan.is_masked:
            self._started[plan.step_id] = started
        else:
            self._sample(plan.step_id, started, None)

    def _sample(self, step: int, started: StartedStep, mask: np.ndarray | None) -> None:
        self._futures.put((step, started.sample(mask)))

    def _reset(self) -> None:
        for step in self._started:  # never to be sampled
            self._futures.put((step, None))
        self._started.clear()
        self._runner.reset()

    def _start_loading(self, generation: int, path: str) -> None:
        """Has a thread read an adapter, while steps go on; what is wrong with it is an answer and no fault here."""

        def load() -> None:
            try:
                answer = {"digest": self._load_adapter(generation, path)}
            except Exception as error:
                answer = {"error": str(error) or repr(error)}
            self._group.send({"loaded": generation, **answer})

        threading.Thread(target=load, name="jaxserve-adapter", daemon=True).start()

    def _drop_adapters(self, generations: list[int]) -> None:
        for generation in generations:
            self._drop_adapter(generation)

    def _add_programs(self) -> None:
        self._additions.get()()

    def _answer(self) -> None:
        """Waits for each step, and says that it and all before have ended; on a thread of its own."""
        ended, answered = None, 0.0
        while True:
            try:
                step, future = self._futures.get(timeout=None if ended is None else _ANSWER_SECONDS)
            except queue.Empty:
                self._group.send({"done": ended})
                ended, answered = None, time.monotonic()
                continue
            try:
                if future is not None:
                    future.wait()
            except Exception as error:
                self._group.lose_step(step, error)
                return
            self._room.release()
            ended = step
            if time.monotonic() - answered > _ANSWER_SECONDS:
                self._group.send({"done": ended})
                ended, answered = None, time.monotonic()

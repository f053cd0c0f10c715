"""Runs plans on the device. The two transfer lines of the engine are here: `device_put` and `device_get`."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping
from typing import Any

import jax

from jaxserve.errors import MissingProgramError
from jaxserve.runtime.buckets import Bucket, BucketTable
from jaxserve.runtime.inputs import InputLayout, StateShape, pack
from jaxserve.runtime.params import WeightWriter
from jaxserve.runtime.rows import RowMirror
from jaxserve.runtime.state import KVCache, RowState, make_zeros
from jaxserve.scheduler.plan import StepPlan


@dataclasses.dataclass(slots=True)
class StepCounts:
    """What has been run since the start, for tables and metrics."""

    steps: collections.Counter[Bucket] = dataclasses.field(default_factory=collections.Counter)
    useful_tokens: int = 0
    padded_tokens: int = 0  # the useful ones included


@dataclasses.dataclass(frozen=True)
class Programs:
    """Every compiled program; one that is missing is an error, never a compilation."""

    forward: dict[Bucket, Any]
    sample: dict[tuple[int, bool], Any]  # by rows and whether it is the plain (greedy) one

    def get_forward(self, bucket: Bucket) -> Any:
        return _get(self.forward, bucket, "forward")

    def get_sample(self, rows: int, greedy: bool) -> Any:
        return _get(self.sample, (rows, greedy), "sample")

    def __len__(self) -> int:
        return len(self.forward) + len(self.sample)


class StepFuture:
    """A step's sampled ids, on their way to the host since the dispatch."""

    def __init__(self, token_ids: jax.Array, num_rows: int) -> None:
        self._token_ids, self._num_rows = token_ids, num_rows
        token_ids.copy_to_host_async()

    def result(self) -> list[int]:
        """Waits for the device; returns one id per row of the plan."""
        return jax.device_get(self._token_ids)[: self._num_rows].tolist()


class ModelRunner:
    """Owns the parameters and the donated state. `dispatch` returns before the device has done anything."""

    def __init__(
        self,
        programs: Programs,
        buckets: BucketTable,
        *,
        params: Any,
        writer: WeightWriter,
        state_specs: tuple[KVCache, RowState],
        state_shape: StateShape,
        input_sharding: jax.sharding.Sharding,
    ) -> None:
        self.params = params
        self.counts = StepCounts()
        self._programs = programs
        self._buckets = buckets
        self._layouts = {bucket: InputLayout(bucket, state_shape) for bucket in buckets.buckets}
        self._writer = writer
        self._state_specs = state_specs
        self._state_shape = state_shape
        self._input_sharding = input_sharding
        self.reset()

    def reset(self) -> None:
        """Makes zeroed pools and rows, as at the start and after a step that failed."""
        self._cache = self._rows = None  # before the new ones: there is no room for two
        self._cache, self._rows = make_zeros(self._state_specs)
        self._mirror = RowMirror(self._state_shape.rows)

    def write_params(self, updates: Mapping[str, Any]) -> None:
        """Replaces parameters by canonical name; the steps in flight have been waited for."""
        self.params = self._writer.write(self.params, updates)

    def warm_up(self) -> None:
        """Runs every program once on nothing but padding."""
        for bucket, layout in self._layouts.items():
            for greedy in (True, False):
                self._run(bucket, greedy, layout.new())
        jax.block_until_ready((self._cache, self._rows))

    def dispatch(self, plan: StepPlan) -> StepFuture:
        """Starts a step; MissingProgramError when no program holds it."""
        bucket = self._buckets.find(plan.num_tokens, plan.num_rows)
        self._mirror.apply(plan.row_sets)
        packed, greedy = pack(plan, self._layouts[bucket], self._mirror)
        token_ids = self._run(bucket, greedy, packed)
        self.counts.steps[bucket] += 1
        self.counts.useful_tokens += plan.num_tokens
        self.counts.padded_tokens += bucket.tokens
        return StepFuture(token_ids, plan.num_rows)

    def _run(self, bucket: Bucket, greedy: bool, packed: Any) -> jax.Array:
        forward, sample = self._programs.get_forward(bucket), self._programs.get_sample(bucket.rows, greedy)
        inputs = jax.device_put(packed, self._input_sharding)
        self._cache, self._rows, selected = forward(self.params, self._cache, self._rows, inputs)
        self._rows, token_ids = sample(self._rows, selected)
        return token_ids


def _get(programs: dict[Any, Any], key: Any, kind: str) -> Any:
    if key not in programs:
        raise MissingProgramError(f"no {kind} program was compiled for {key}; there are {list(programs)}")
    return programs[key]

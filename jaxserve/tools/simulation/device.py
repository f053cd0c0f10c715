"""A device whose steps take as long as a formula says, and whose tokens are arbitrary."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxserve.core.runtime.buckets import Bucket, BucketTable
from jaxserve.core.runtime.step_counts import StepCounts
from jaxserve.core.scheduler import StepOutputs, StepPlan
from jaxserve.core.scheduler.step_plan import ChunkWork
from jaxserve.tools.simulation.clock import VirtualClock


@dataclass(frozen=True, slots=True)
class Attention:
    """The attention of the layers of one KV group."""

    key_seconds: float  # to read one token's keys and values
    pair_seconds: float = 0.0  # for the operations of one query and one key
    window: int | None = None  # tokens that a query sees, itself included; None: all

    def of_query(self, length: int) -> float:
        """Returns the seconds of one query at the end of `length` tokens, which only reads."""
        return self.key_seconds * (length if self.window is None else min(length, self.window))

    def of_chunk(self, start: int, end: int) -> float:
        """Returns the seconds of the queries [start, end): the longer of reading and of computing."""
        pairs = (end * (end + 1) - start * (start + 1)) // 2
        keys = end
        if self.window is not None:
            keys = min(end, end - start + self.window - 1)
            pairs -= _triangle(end - self.window) - _triangle(start - self.window)
        return max(self.key_seconds * keys, self.pair_seconds * pairs)


def _triangle(count: int) -> int:
    return count * (count + 1) // 2 if count > 0 else 0


@dataclass(frozen=True, slots=True)
class StepFormula:
    """The seconds of a step: max(W / BW, F / P) + KV / BW + c0 + c1 x rows, tokens and rows padded to the bucket.

    W are the weights that every step streams, F the operations of the matrix products, KV the keys and values that the
    rows see, BW and P the device's rates. The attention of a chunk takes at least the time of its operations.
    """

    weight_seconds: float = 0.0  # W / BW
    token_seconds: float = 0.0  # operations of one token in all layers, over P
    logit_seconds: float = 0.0  # operations of one row's logits, over P
    attention: tuple[Attention, ...] = ()  # by KV group
    load_seconds: tuple[float, ...] = ()  # by KV group: of one page from the host
    step_seconds: float = 0.0  # c0
    row_seconds: float = 0.0  # c1

    def of_bucket(self, bucket: Bucket) -> float:
        """Returns the seconds of a step without its attention."""
        return self.step_seconds + self.of_repeat(bucket)

    def of_repeat(self, bucket: Bucket) -> float:
        """Returns the seconds of each further decode step in the same dispatch: c0 is paid once."""
        operations = self.token_seconds * bucket.tokens + self.logit_seconds * bucket.rows
        return max(self.weight_seconds, operations) + self.row_seconds * bucket.rows


class VirtualFuture:
    """A step's outputs; waiting for them moves the clock to the end of the step."""

    def __init__(self, clock: VirtualClock, end: float, outputs: StepOutputs) -> None:
        self._clock, self._end, self._outputs = clock, end, outputs

    def result(self) -> StepOutputs:
        self._clock.advance_to(self._end)
        return self._outputs

    def sample(self, mask: Any = None) -> VirtualFuture:
        """The formula has the time of sampling in it, so that a started step is its own future."""
        assert mask is None, "a trace has no grammars"
        return self


class VirtualDevice:
    """Implements `Runner` on a virtual clock.

    A step starts when it is dispatched, or when the step before it ends if that is later. So the host plans step N + 1
    while the device runs step N, as it does in the real engine, and takes no time itself: c0 has the host's share.

    Pages from the host tier are on their way while steps run; the step that asked for them is complete when they are
    there. Saves take no time: nobody waits for them.
    """

    def __init__(self, formula: StepFormula, buckets: BucketTable, clock: VirtualClock) -> None:
        self.counts = StepCounts()
        self.num_programs, self.num_compiles = len(buckets.buckets), 0
        self.busy_seconds = 0.0
        self.works: Counter[tuple[int, int]] = Counter()  # steps by (tokens, rows), without padding
        self._buckets, self._clock = buckets, clock
        self._attention = formula.attention
        self._formula = formula
        self._sizes: dict[tuple[int, int], tuple[Bucket, float]] = {}  # the bucket of a step, and its seconds
        self._free_at = self._loaded_at = 0.0
        self._next_id = 1
        self.reset()

    def reset(self) -> None:
        self._lengths: dict[int, int] = {}  # tokens of each row
        self._free_at = max(self._free_at, self._clock.now)

    def write_params(self, updates: Mapping[str, Any]) -> None:
        """Does nothing: there are no weights."""

    def start(self, plan: StepPlan) -> VirtualFuture:
        num_tokens, num_rows, width = plan.num_tokens, plan.num_rows, plan.width
        work = num_tokens // width, num_rows  # of each decode step, where there are several
        seconds = self._count(work, width) if num_rows else 0.0  # without rows it only loads pages
        for new_row in plan.new_rows:
            self._lengths[new_row.row] = new_row.num_computed_tokens
        for _ in range(width):
            seconds += self._decode(plan.decode_rows)
        if plan.chunks:
            seconds += self._prefill(plan.chunks)
        self.busy_seconds += seconds
        start = max(self._free_at, self._clock.now)
        self._free_at = end = start + seconds
        if plan.page_loads:
            loads = sum(self._formula.load_seconds[group] for group, _, _ in plan.page_loads)
            self._loaded_at = max(self._loaded_at, start) + loads
            end = max(end, self._loaded_at)
        first, self._next_id = self._next_id, self._next_id + num_rows * width
        ids = list(range(first, self._next_id))
        return VirtualFuture(self._clock, end, StepOutputs(ids, None if width == 1 else [width] * num_rows))

    def _count(self, work: tuple[int, int], width: int) -> float:
        """Counts `width` steps of (tokens, rows) in one dispatch; returns their seconds without attention."""
        num_tokens, num_rows = work
        if work not in self._sizes:
            bucket = self._buckets.find(num_tokens, num_rows)
            self._sizes[work] = bucket, self._formula.of_bucket(bucket)
        bucket, seconds = self._sizes[work]
        self.counts.count(bucket, num_tokens * width, width)
        self.works[work] += width
        return seconds if width == 1 else seconds + (width - 1) * self._formula.of_repeat(bucket)

    def _decode(self, rows: Sequence[int]) -> float:
        """Adds a token to each row; returns the seconds of their attention."""
        lengths, seconds = self._lengths, 0.0
        for row in rows:
            lengths[row] += 1
        for each in self._attention:
            if each.window is None:
                seconds += each.key_seconds * sum(map(lengths.__getitem__, rows))
            else:
                seconds += sum(each.of_query(lengths[row]) for row in rows)
        return seconds

    def _prefill(self, chunks: Sequence[ChunkWork]) -> float:
        for chunk in chunks:
            self._lengths[chunk.row] = chunk.end
        return sum(each.of_chunk(chunk.start, chunk.end) for each in self._attention for chunk in chunks)

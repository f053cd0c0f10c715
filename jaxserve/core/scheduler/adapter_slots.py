"""The slots of adapters on the device: which load each slot holds, and which waiting sequences may have one."""

from __future__ import annotations

from collections.abc import Hashable

from jaxserve.core.scheduler.limits import SchedulerLimits
from jaxserve.core.scheduler.policy import can_yield, choose_drained, must_yield
from jaxserve.core.scheduler.running import Batch
from jaxserve.core.scheduler.sequence import Sequence, SequenceStatus, age
from jaxserve.request import Adapter


class AdapterSlots:
    """The slots, from 1 on. Adapters are known by their generation.

    A slot can be written anew as soon as no running sequence has its adapter: steps in flight have read it by then, as
    the device keeps the order of calls. If there is none, one adapter is drained for the sequences that wait: those
    behind the first of them join it no more, and its slot goes to whoever is first in line when it is free.
    """

    def __init__(self, limits: SchedulerLimits, batch: Batch) -> None:
        num_slots, self._limits = limits.num_adapters, limits
        self.held = dict.fromkeys(range(1, num_slots + 1), 0)  # generation by slot, least recently used first; 0: none
        self._batch = batch
        self._slots: dict[int, int] = {}  # by generation
        self._writes: dict[int, Adapter] = {}  # by slot, since the last plan
        self._written: list[Adapter] = []  # by the last plan, whose step has to find their copies
        self._drained = 0
        self._first: Sequence | None = None  # the oldest of those for whom it is drained

    def read_state(self) -> Hashable:
        """Returns a value on which `is_ready` depends, once the adapter to drain is chosen for the rows of now."""
        if not self.held:
            return None
        running, order = self._batch.num_by_adapter, -1
        if (first := self._first) is not None and self._is_waiting(first):
            order = first.order
            if first.request.generation not in self._slots and len(running) == len(self.held):
                self._drained = choose_drained(self._limits, self._batch, first, self._drained)
        return frozenset(self._slots), frozenset(running), self._drained, order

    def is_ready(self, sequence: Sequence) -> bool:
        """Whether a waiting sequence may have a row; if not, an adapter is drained from now on."""
        generation, running = sequence.request.generation, self._batch.num_by_adapter
        if not generation:
            return True
        if generation in self._slots:
            return not (generation == self._drained and self._is_behind(sequence))
        if any(held not in running for held in self.held.values()):
            return True
        if not self._is_behind(sequence):
            self._first = sequence
            self._drained = choose_drained(self._limits, self._batch, sequence, self._drained)
        return False

    def list_yielding(self) -> list[Sequence]:
        """Returns the running sequences of the drained adapter, the youngest first, if all must yield to who waits."""
        first = self._first
        if first is None or not self._is_waiting(first) or self._drained not in self._batch.num_by_adapter:
            return []
        rows = [each for each in (*self._batch.decoding, *self._batch.prefilling) if self._uses_drained(each)]
        yields = all(can_yield(self._limits, each) and must_yield(self._limits, each, first) for each in rows)
        return sorted(rows, key=age, reverse=True) if yields else []

    def _uses_drained(self, sequence: Sequence) -> bool:
        return sequence.request.generation == self._drained

    def _is_behind(self, sequence: Sequence) -> bool:
        """Whether an older sequence waits for the adapter that is drained."""
        first = self._first
        if first is None or not self._is_waiting(first):
            self._first = None
            return False
        return self._drained in self._batch.num_by_adapter and first.order < sequence.order

    @staticmethod
    def _is_waiting(sequence: Sequence) -> bool:
        return sequence.status in (SequenceStatus.WAITING, SequenceStatus.PREEMPTED)

    def take(self, sequence: Sequence) -> int:
        """Returns the slot of the adapter of a sequence that is ready and has just joined the batch; 0 without one."""
        generation, running = sequence.request.generation, self._batch.num_by_adapter
        self._first = None if self._first is sequence else self._first
        if not generation:
            return 0
        slot = self._slots.get(generation)
        if slot is None:
            idle = [slot for slot, held in self.held.items() if held not in running]
            slot = min((slot for slot in idle if not self.held[slot]), default=idle[0])
            self._slots.pop(self.held[slot], None)
            self._slots[generation] = slot
            assert sequence.request.adapter is not None
            self.held[slot], self._writes[slot] = generation, sequence.request.adapter
        self.held[slot] = self.held.pop(slot)  # the most recently used
        return slot

    @property
    def highest(self) -> int:
        """The highest slot of a running sequence; 0: none has an adapter."""
        return max((self._slots[generation] for generation in self._batch.num_by_adapter), default=0)

    def take_writes(self) -> tuple[tuple[int, int], ...]:
        """Returns the (slot, generation) of adapters to write, since the last call."""
        self._written = list(self._writes.values())
        writes = tuple((slot, adapter.generation) for slot, adapter in self._writes.items())
        self._writes.clear()
        return writes

    def forget(self) -> None:
        """Forgets what the slots hold, which the device has lost. No sequence may be running."""
        self.held = dict.fromkeys(sorted(self.held), 0)
        self._slots.clear()
        self._writes.clear()
        self._first = None

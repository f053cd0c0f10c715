"""The slots of adapters on the device: which load each slot holds, and which waiting sequences may have one."""

from __future__ import annotations

from jaxserve.core.scheduler.policy import choose_drained
from jaxserve.core.scheduler.running import Batch
from jaxserve.core.scheduler.sequence import Sequence, SequenceStatus


class AdapterSlots:
    """The slots, from 1 on. Adapters are known by their generation.

    A slot can be written anew as soon as no running sequence has its adapter: steps in flight have read it by then, as
    the device keeps the order of calls. If there is none, one adapter is drained for the sequences that wait: those
    behind the first of them join it no more, and its slot goes to whoever is first in line when it is free.
    """

    def __init__(self, num_slots: int, batch: Batch) -> None:
        self.held = dict.fromkeys(range(1, num_slots + 1), 0)  # generation by slot, least recently used first; 0: none
        self._batch = batch
        self._slots: dict[int, int] = {}  # by generation
        self._writes: dict[int, int] = {}  # generation by slot, since the last plan
        self._drained = 0
        self._first: Sequence | None = None  # the oldest of those for whom it is drained

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
            self._drained = self._drained if self._drained in running else choose_drained(self._batch)
        return False

    def _is_behind(self, sequence: Sequence) -> bool:
        """Whether an older sequence waits for the adapter that is drained."""
        first = self._first
        is_waiting = first is not None and first.status in (SequenceStatus.WAITING, SequenceStatus.PREEMPTED)
        return is_waiting and self._drained in self._batch.num_by_adapter and first.order < sequence.order

    def take(self, sequence: Sequence) -> int:
        """Returns the slot of the adapter of a sequence that is ready and has just joined the batch; 0 without one."""
        generation, running = sequence.request.generation, self._batch.num_by_adapter
        if not generation:
            return 0
        slot = self._slots.get(generation)
        if slot is None:
            idle = [slot for slot, held in self.held.items() if held not in running]
            slot = min((slot for slot in idle if not self.held[slot]), default=idle[0])
            self._slots.pop(self.held[slot], None)
            self._slots[generation] = slot
            self.held[slot] = self._writes[slot] = generation
        self.held[slot] = self.held.pop(slot)  # the most recently used
        return slot

    @property
    def highest(self) -> int:
        """The highest slot of a running sequence; 0: none has an adapter."""
        return max((self._slots[generation] for generation in self._batch.num_by_adapter), default=0)

    def take_writes(self) -> tuple[tuple[int, int], ...]:
        """Returns the (slot, generation) of adapters to write, since the last call."""
        writes = tuple(self._writes.items())
        self._writes.clear()
        return writes

    def forget(self) -> None:
        """Forgets what the slots hold, which the device has lost. No sequence may be running."""
        self.held = dict.fromkeys(sorted(self.held), 0)
        self._slots.clear()
        self._writes.clear()

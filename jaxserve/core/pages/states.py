"""Snapshots of recurrent states: the slots that keep them, found by the key of the page that ends where they do.

A slot is in one of three states:

    free      content unknown                             save: free or cached (evicts) -> pending
    pending   to be written by a step that is not         publish: pending -> cached; release, give_up: -> free
              committed, or by a later one
    cached    content known by its key                    a newer one of its sequence is published: cached -> free

A step reads snapshots before its forward pass and writes them behind it, and the device runs steps in order. So a slot
may be taken again at once: whoever was planned to read it has read it by then, and no reader needs to hold it.

Invariants, checked by `check`:
    S1  every slot is in exactly one state
    S2  the index and the slots' keys are inverses; a slot has a key if and only if it is cached
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class PendingSnapshot:
    """A snapshot that is not committed: that of the first `num_tokens` tokens, in a slot.

    `rolls`: it replaces the last one of its sequence that rolled.
    """

    num_tokens: int
    slot: int
    rolls: bool


@dataclass(slots=True)
class SequenceStates:
    """The snapshots of one sequence. Only `Snapshots` writes them."""

    start: int | None = None  # the slot of the attached prefix, from which the sequence goes on
    junction: int = 0  # tokens of a prefix whose pages are cached further than any snapshot reaches; 0: none
    num_lost_tokens: int = 0  # of that prefix, behind the snapshot
    rolling: tuple[bytes, int] | None = None  # key and slot of the last published one, which the next replaces
    pending: list[PendingSnapshot] = field(default_factory=list)  # in the order of their tokens

    def find_pending(self, num_tokens: int) -> PendingSnapshot | None:
        """Returns the first pending snapshot behind more than `num_tokens` tokens."""
        return next((each for each in self.pending if each.num_tokens > num_tokens), None)


class Snapshots:
    """Slots 0..num_slots-1: free ones are taken first, then the least recently used. With none it finds nothing."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._free = list(range(num_slots - 1, -1, -1))  # a stack: slot 0 on top
        self._pending: set[int] = set()
        self._cached: dict[bytes, int] = {}  # the index; the first is the least recently used
        self._keys: list[bytes | None] = [None] * num_slots

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_pending(self) -> int:
        return len(self._pending)

    def attach(self, states: SequenceStates, keys: Sequence[bytes], matches: Iterable[int], page_size: int) -> int:
        """Returns the pages of the longest prefix that has a snapshot, and notes the slot; 0 and None if none has.

        Args:
            keys: of the sequence's pages.
            matches: the lengths in pages of prefixes whose pages are all there, the longest first.
        """
        longest = states.num_lost_tokens = states.junction = 0
        states.start = None
        for num_pages in matches:
            longest = longest or num_pages
            key = keys[num_pages - 1]
            if (slot := self._cached.pop(key, None)) is not None:
                self._cached[key] = states.start = slot
                break
        else:
            num_pages = 0
        if longest > num_pages:
            states.junction, states.num_lost_tokens = longest * page_size, (longest - num_pages) * page_size
        return num_pages

    def save(self, states: SequenceStates, num_tokens: int, *, rolls: bool) -> PendingSnapshot | None:
        """Returns a snapshot for the state behind the first tokens; None while the slots of all are pending."""
        if not self._free and self._cached:
            self._forget(next(iter(self._cached)))
        if not self._free:
            return None
        slot = self._free.pop()
        self._pending.add(slot)
        states.pending.append(PendingSnapshot(num_tokens, slot, rolls))
        return states.pending[-1]

    def publish(self, states: SequenceStates, keys: Sequence[bytes], num_tokens: int, page_size: int) -> None:
        """Makes the snapshots of the first `num_tokens` committed tokens known by the keys of their last pages.

        The first one published under a key keeps it. Those that roll replace each other.
        """
        while states.pending and states.pending[0].num_tokens <= num_tokens:
            pending = states.pending.pop(0)
            key = keys[pending.num_tokens // page_size - 1]
            self._pending.remove(pending.slot)
            if pending.rolls and states.rolling is not None:
                last, slot = states.rolling
                if self._cached.get(last) == slot:  # else it gave way, and another sequence may have cached its own
                    self._forget(last)
            is_new = key not in self._cached
            if is_new:
                self._cached[key], self._keys[pending.slot] = pending.slot, key
            else:
                self._free.append(pending.slot)
            if pending.rolls:
                states.rolling = (key, pending.slot) if is_new else None

    def release(self, states: SequenceStates) -> None:
        """Frees what is pending, as its sequence ends or gives up its row."""
        self.give_up(states, 0)
        states.start = None

    def give_up(self, states: SequenceStates, num_tokens: int) -> None:
        """Frees what is pending behind more than `num_tokens` tokens, which no step has written."""
        while states.pending and states.pending[-1].num_tokens > num_tokens:
            slot = states.pending.pop().slot
            self._pending.remove(slot)
            self._free.append(slot)

    def drop_index(self) -> None:
        """Forgets all snapshots but the pending ones."""
        while self._cached:
            self._forget(next(iter(self._cached)))

    def check(self) -> None:
        """Raises AssertionError when an invariant does not hold."""
        slots = sorted([*self._free, *self._pending, *self._cached.values()])
        if slots != list(range(self.num_slots)):
            raise AssertionError("S1: a slot is lost or in two states")
        if {slot: key for slot, key in enumerate(self._keys) if key is not None} != {
            slot: key for key, slot in self._cached.items()
        }:
            raise AssertionError("S2: index and keys differ")

    def _forget(self, key: bytes) -> None:
        slot = self._cached.pop(key)
        self._keys[slot] = None
        self._free.append(slot)

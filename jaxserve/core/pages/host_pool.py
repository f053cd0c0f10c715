"""The host slots of one KV group: copies of evicted pages, found by the same keys as pages on the device.

A slot is in one of five states:

    free     content unknown                     take: free, spare or cached -> saving
    saving   its copy to the host is in flight   end_save: saving -> cached
    cached   content known, only here            begin_load: cached or spare -> loading; mark_spare: cached -> spare
    spare    content known, the device has it    touch: spare -> cached
    loading  a copy to the device is in flight   end_load: loading -> spare

`take` replaces free slots first, then spare ones, which lose nothing, then the least recently used cached one. So
device and host together hold almost as many different pages as they have room for. Slots with a copy in flight are
never freed or replaced.

Invariants, checked by `check`:
    H1  every slot is in exactly one state
    H2  the index and the slots' keys are inverses; no free slot has a key; every cached, spare or loading slot has one,
        unless the index was dropped while its copy was in flight
"""

from __future__ import annotations


class HostPool:
    """Slots 0..num_slots-1. With no slots it finds and takes nothing."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.num_evictions = 0  # cached content that was replaced
        self._free = list(range(num_slots - 1, -1, -1))  # a stack: slot 0 on top
        self._spare: dict[int, None] = {}
        self._cached: dict[int, None] = {}  # the first is the least recently used
        self._saving: set[int] = set()
        self._loading: set[int] = set()
        self._keys: list[bytes | None] = [None] * num_slots
        self._index: dict[bytes, int] = {}

    @property
    def num_cached(self) -> int:
        """Slots with known content that can be loaded, spare ones included."""
        return len(self._cached) + len(self._spare) + len(self._loading)

    def lookup(self, key: bytes) -> int | None:
        """Returns the slot with a page's content, or None; that of a copy in flight to the host is not there yet."""
        slot = self._index.get(key)
        return None if slot in self._saving else slot

    def is_loading(self, slot: int) -> bool:
        return slot in self._loading

    def take(self, key: bytes) -> int | None:
        """Returns a slot for a copy of new content, in flight until `end_save`.

        None: the content is here already or on its way, and is now the most recently used; or every slot is in flight.
        """
        if (slot := self._index.get(key)) is not None:
            self._touch(slot)
            return None
        if self._free:
            slot = self._free.pop()
        elif self._spare or self._cached:
            self.num_evictions += not self._spare
            slots = self._spare or self._cached
            slot = next(iter(slots))
            del slots[slot]
            self._forget(slot)
        else:
            return None
        self._keys[slot] = key
        self._index[key] = slot
        self._saving.add(slot)
        return slot

    def end_save(self, slot: int, is_valid: bool) -> None:
        """Makes a copy loadable; frees its slot if it failed or the index was dropped meanwhile."""
        self._saving.remove(slot)
        self._settle(slot, is_valid, self._cached)

    def begin_load(self, slot: int) -> None:
        """Keeps a slot that `lookup` returned, and that is not loading yet, until `end_load`."""
        del (self._spare if slot in self._spare else self._cached)[slot]
        self._loading.add(slot)

    def end_load(self, slot: int, is_valid: bool) -> bytes | None:
        """Ends a load; returns the key of what arrived, or None if it failed or the index was dropped meanwhile."""
        self._loading.remove(slot)
        key = self._keys[slot] if is_valid else None
        self._settle(slot, is_valid, self._spare)
        return key

    def mark_spare(self, key: bytes) -> None:
        """Notes that the device has the content of `key`, too."""
        slot = self._index.get(key)
        if slot is not None and slot in self._cached:
            del self._cached[slot]
            self._spare[slot] = None

    def drop_index(self) -> None:
        """Forgets all content. Slots with a copy in flight are freed when it ends."""
        self._free += [*self._spare, *self._cached]
        self._spare.clear()
        self._cached.clear()
        self._index.clear()
        self._keys = [None] * self.num_slots

    def abandon(self) -> None:
        """Frees the slots with a copy in flight, whose steps are lost, and forgets all content."""
        self._free += [*self._saving, *self._loading]
        self._saving.clear()
        self._loading.clear()
        self.drop_index()

    def check(self) -> None:
        """Raises AssertionError when an invariant does not hold."""
        states = (self._free, self._spare, self._cached, self._saving, self._loading)
        slots = [slot for state in states for slot in state]
        if sorted(slots) != list(range(self.num_slots)):
            raise AssertionError("H1: a slot is lost or in two states")
        keyed = {slot: key for slot, key in enumerate(self._keys) if key is not None}
        if keyed != {slot: key for key, slot in self._index.items()}:
            raise AssertionError("H2: index and keys differ")
        if keyed.keys() & set(self._free) or not {*self._spare, *self._cached} <= keyed.keys():
            raise AssertionError("H2: a free slot has a key, or one with content has none")

    def _touch(self, slot: int) -> None:
        """Makes the content of a slot the most recently used, because the device has just lost it."""
        if slot in self._spare or slot in self._cached:
            self._spare.pop(slot, None)
            self._cached.pop(slot, None)
            self._cached[slot] = None

    def _settle(self, slot: int, is_valid: bool, state: dict[int, None]) -> None:
        """Puts a slot whose copy has ended into `state`, or frees it."""
        if is_valid and self._keys[slot] is not None:
            state[slot] = None
        else:
            self._forget(slot)
            self._free.append(slot)

    def _forget(self, slot: int) -> None:
        key = self._keys[slot]
        if key is not None:
            del self._index[key]
            self._keys[slot] = None

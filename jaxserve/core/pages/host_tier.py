"""The host tier: which evicted pages are copied to host memory, and which copies are loaded again.

A step's plan carries both kinds of copies. A save reads its page before the step's forward pass writes to it. The copy
is loadable once the step is committed. A load goes into a page that nobody owns but the load, until its step is
committed. The page then enters the prefix index, so a hit on the host becomes a hit on the device some steps later, and
no sequence holds pages while it waits.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from jaxserve.core.pages.host_pool import HostPool

_log = logging.getLogger(__name__)
_MAX_FAILURES = 3  # copies; after as many the tier is off

PageCopy = tuple[int, int, int]  # (group, page, slot)
FailedCopies = Collection[tuple[int, int]]  # (group, slot)


@dataclass(frozen=True, slots=True)
class _Load:
    copy: PageCopy
    save: PageCopy | None  # of what the page held before; in the same plan at the latest


class HostTier:
    """Slots for each KV group, and the copies of the next steps.

    Args:
        num_slots: per group; 0: no tier.
        max_copies: pages that a step loads at most, and as many again that it saves for its rows. A load may add the
            save of the page that it replaces.
    """

    def __init__(self, num_groups: int, *, num_slots: int, max_copies: int) -> None:
        self.pools = tuple(HostPool(num_slots) for _ in range(num_groups))
        self.max_copies = max_copies
        self.is_on = num_slots > 0
        self.num_failures = 0  # copies that failed
        self.num_unsaved = 0  # pages evicted without a copy, because too many were evicted in a step
        self.num_arrived = 0  # loads that have ended, in the order in which they were asked for
        self._num_asked = 0
        self._saves: list[PageCopy] = []  # of the next plan
        self._queue: deque[_Load] = deque()  # for the next plans
        self._in_flight: deque[PageCopy] = deque()
        self._numbers: dict[tuple[int, int], int] = {}  # (group, slot) of a load that has not ended -> its number

    @property
    def num_evictions(self) -> int:
        """Pages whose content neither tier has any more, though the host had it or should have got it."""
        return sum(pool.num_evictions for pool in self.pools) + self.num_unsaved

    @property
    def has_loads(self) -> bool:
        """Whether loads wait for a plan."""
        return bool(self._queue)

    def list_loading(self, group: int) -> list[int]:
        """Returns the pages of a group that belong to loads."""
        copies = [*self._in_flight, *(load.copy for load in self._queue)]
        return [page for g, page, _ in copies if g == group]

    def has(self, group: int, key: bytes) -> bool:
        """Returns whether a page's content can be loaded."""
        return self.is_on and self.pools[group].lookup(key) is not None

    def save(self, group: int, page: int, key: bytes) -> None:
        """Saves the content of a page that the device has just evicted for a row, unless the host has it."""
        if not self.is_on:
            return
        if len(self._saves) >= self.max_copies and self.pools[group].lookup(key) is None:
            self.num_unsaved += 1
        elif (slot := self.pools[group].take(key)) is not None:
            self._saves.append((group, page, slot))

    def keep(self, group: int, key: bytes) -> int:
        """Keeps a slot for a load, if none is under way; returns it. `has` must be true."""
        slot = self.pools[group].lookup(key)
        assert slot is not None
        if not self.pools[group].is_loading(slot):
            self.pools[group].begin_load(slot)
        return slot

    def find_number(self, group: int, slot: int) -> int | None:
        """Returns the number of the load of a slot; None if nobody has asked for it."""
        return self._numbers.get((group, slot))

    def load(self, group: int, slot: int, page: int, evicted: bytes | None) -> int:
        """Queues the load of a kept slot into a page that was just allocated; returns its number.

        Args:
            evicted: the key of what the page held until now, which is saved first; None: nothing known.
        """
        taken = self.pools[group].take(evicted) if evicted is not None and self.is_on else None
        save = None if taken is None else (group, page, taken)
        self._queue.append(_Load((group, page, slot), save))
        self._num_asked += 1
        self._numbers[group, slot] = self._num_asked
        return self._num_asked

    def take_copies(self) -> tuple[tuple[PageCopy, ...], tuple[PageCopy, ...]]:
        """Returns the saves and the loads of the plan that is made now, and forgets them until `commit`."""
        if not self._saves and not self._queue:
            return (), ()
        loads = [self._queue.popleft() for _ in range(min(len(self._queue), self.max_copies))]
        saves = (*self._saves, *(load.save for load in loads if load.save is not None))
        self._saves = []
        self._in_flight += [load.copy for load in loads]
        return saves, tuple([load.copy for load in loads])

    def commit(
        self, saves: Collection[PageCopy], loads: Collection[PageCopy], failed: FailedCopies
    ) -> Iterator[tuple[int, int, bytes | None]]:
        """Ends the copies of a plan. Yields (group, page, key) of each load; the key is None if nothing valid came."""
        for group, _, slot in saves:
            self.pools[group].end_save(slot, (group, slot) not in failed)
        for group, page, slot in loads:
            copy = self._in_flight.popleft()
            assert copy == (group, page, slot), "steps are committed in order"
            del self._numbers[group, slot]
            self.num_arrived += 1
            yield group, page, self.pools[group].end_load(slot, (group, slot) not in failed)
        if failed:
            self._count_failures(len(failed))

    def drop_index(self) -> None:
        """Forgets the content of all slots; copies go on and end as misses."""
        for pool in self.pools:
            pool.drop_index()

    def abandon(self) -> list[tuple[int, int]]:
        """Forgets everything, copies in flight as well: their steps are lost. Returns (group, page) of all loads."""
        pages = [(group, page) for group in range(len(self.pools)) for page in self.list_loading(group)]
        for pool in self.pools:
            pool.abandon()
        self._saves.clear()
        self._queue.clear()
        self._in_flight.clear()
        self._numbers.clear()
        self.num_arrived = self._num_asked
        return pages

    def check(self) -> None:
        """Raises AssertionError when an invariant does not hold."""
        for pool in self.pools:
            pool.check()

    def _count_failures(self, count: int) -> None:
        self.num_failures += count
        if self.is_on and self.num_failures >= _MAX_FAILURES:
            self.is_on = False
            _log.error(
                "host KV tier: off after %d failed copies; serving goes on without it until the next start",
                self.num_failures,
            )
        elif self.is_on:
            _log.warning(
                "host KV tier: %d copies have failed; the tier is off after %d", self.num_failures, _MAX_FAILURES
            )

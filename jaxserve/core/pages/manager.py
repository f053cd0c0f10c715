"""Each sequence's pages: reserved as it grows, freed behind its windows, shared by content."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as TokenIds
from dataclasses import dataclass, field

from jaxserve.core.pages.host_tier import FailedCopies, HostTier, PageCopy
from jaxserve.core.pages.pool import NULL_PAGE, PagePool
from jaxserve.core.pages.prefix import extend_keys
from jaxserve.core.pages.states import SequenceStates, Snapshots
from jaxserve.media.items import MediaSpan

CHUNK_EDGE = 32  # tokens; chunks start at its multiples, so kernels never read-modify-write a tile

PageUpdate = tuple[int, int, int]  # (group, index in the row's page table, page id)


@dataclass(frozen=True, slots=True)
class PageGroup:
    """Layers that share one page table, as the host sees them."""

    num_pages: int  # the null page included
    window: int | None = None  # tokens a query can see, itself included; None: all


def count_window_pages(window: int, max_chunk: int, page_size: int) -> int:
    """Returns the most pages of a sequence in a windowed group: the window, a chunk and one partial page."""
    return -(-(window + max_chunk) // page_size) + 1


@dataclass(slots=True)
class SequencePages:
    """The pages of one sequence. Only `PageManager` writes them.

    `page_ids[g][i]` is the page of tokens [i * page_size, (i + 1) * page_size) in group g, or the null page once those
    tokens left the group's window.
    """

    salt: str  # sequences with different salts share no pages
    page_ids: tuple[list[int], ...]
    is_cached: bool = True  # uses the prefix index, for lookup and publication
    num_sharable: int = 2**62  # leading tokens whose pages may be in the prefix index
    images: TokenIds[MediaSpan] = ()  # of the prompt
    keys: list[bytes] = field(default_factory=list)  # content keys of the leading full pages; kept through preemption
    num_reserved_tokens: int = 0  # the capacity of the pages
    num_published: int = 0  # leading pages offered to the prefix index
    num_trimmed: list[int] = field(default_factory=list)  # leading null entries per group
    on_host: list[tuple[int, int]] = field(default_factory=list)  # (group, index) of the prefix's pages to be loaded
    awaited_load: int = 0  # number of the last load that it waits for
    num_loaded_tokens: int = 0  # of the prefix; they came from the host for this sequence or while it waited
    states: SequenceStates = field(default_factory=SequenceStates)  # of models with recurrent states

    def extend_keys(self, token_ids: TokenIds[int], num_pages: int, page_size: int) -> None:
        """Makes the keys of the first `num_pages` pages, which are full of `token_ids`."""
        sizes = {"page_size": page_size, "num_pages": num_pages}
        extend_keys(self.keys, token_ids, **sizes, salt=self.salt, images=self.images)


class PageManager:
    """Reserves, shares, trims, publishes and releases the pages of sequences over all groups.

    Only whole pages before the first token to compute are shared, so a page with several owners is never written.

    Args:
        num_host_slots: pages of each group that the host tier holds; 0: no tier.
        max_copies: see `HostTier`.
        num_snapshots: slots for recurrent states, of which a cached prefix then needs one; 0: the model has none.
        hit_grid: tokens; cached prefixes end at its multiples.
    """

    def __init__(
        self,
        groups: TokenIds[PageGroup],
        *,
        page_size: int,
        max_chunk: int,
        enable_prefix_caching: bool,
        num_host_slots: int = 0,
        max_copies: int = 0,
        num_snapshots: int = 0,
        hit_grid: int = CHUNK_EDGE,
    ) -> None:
        self.page_size = page_size
        self.groups = tuple(groups)
        self.pools = tuple(PagePool(group.num_pages) for group in groups)
        self.host = HostTier(len(self.groups), num_slots=num_host_slots, max_copies=max_copies)
        self.snapshots = Snapshots(num_snapshots)
        self._max_chunk = max_chunk
        self._has_windows = any(group.window is not None for group in self.groups)
        self.enable_prefix_caching = enable_prefix_caching
        self._hit_grid = math.lcm(page_size, hit_grid) // page_size  # pages

    def new_sequence(
        self,
        salt: str,
        *,
        cache: bool | None = None,
        num_sharable: int = 2**62,
        images: TokenIds[MediaSpan] = (),
    ) -> SequencePages:
        """Returns the empty page list of a new sequence; see `SequencePages`. `cache`: whether it `is_cached`."""
        is_cached = self.enable_prefix_caching if cache is None else cache
        page_ids: tuple[list[int], ...] = tuple([] for _ in self.groups)
        return SequencePages(salt, page_ids, is_cached, num_sharable, images, num_trimmed=[0] * len(self.groups))

    def first_unfit_group(self, num_tokens: int) -> tuple[int, int] | None:
        """Returns (pages needed, pages in the pool) of the first group too small for `num_tokens`; None: all fit."""
        for group in self.groups:
            needed = self._pages_for(num_tokens)
            if (most := self._most_pages(group)) is not None:
                needed = min(needed, most)
            if needed > group.num_pages - 1:
                return needed, group.num_pages - 1
        return None

    def attach_prefix(self, pages: SequencePages, token_ids: TokenIds[int]) -> int:
        """Shares the longest cached prefix with a sequence that holds nothing; returns its length in tokens.

        At least one token is left to compute. Every group has all pages visible to the next query, and recurrent states
        a snapshot. Pages that only the host has are null entries: if `load_prefix` finds any, it undoes this.
        """
        num_pages = self._match(pages, token_ids) if pages.is_cached else 0
        for g, (group, pool) in enumerate(zip(self.groups, self.pools, strict=True)):
            first = min(self._first_visible_page(group, num_pages * self.page_size), num_pages)
            entries = pages.page_ids[g]
            entries.extend([NULL_PAGE] * first)
            for index in range(first, num_pages):
                page = pool.lookup(pages.keys[index])
                if page is None:  # _match found it on the host
                    pages.on_host.append((g, index))
                    entries.append(NULL_PAGE)
                else:
                    pool.share(page)
                    entries.append(page)
            pages.num_trimmed[g] = first
        pages.num_reserved_tokens = num_pages * self.page_size
        pages.num_published = num_pages
        return num_pages * self.page_size

    def load_prefix(self, pages: SequencePages) -> bool:
        """Starts to load the pages of an attached prefix that only the host has; returns False if there are none.

        Otherwise the sequence holds nothing again, and `is_loading` until all have arrived. `has_room` must be true.
        """
        if not pages.on_host:
            return False
        pages.num_loaded_tokens += len({index for _, index in pages.on_host}) * self.page_size
        # All slots are kept before the first page is allocated: what a page held may replace any other slot.
        slots = [(g, self.host.keep(g, pages.keys[index])) for g, index in pages.on_host]
        for g, slot in slots:
            number = self.host.find_number(g, slot)
            if number is None:
                number = self.host.load(g, slot, *self.pools[g].allocate())
            pages.awaited_load = max(pages.awaited_load, number)
        self.release(pages)
        return True

    def is_loading(self, pages: SequencePages) -> bool:
        """Returns whether loads are under way that the sequence waits for."""
        return pages.awaited_load > self.host.num_arrived

    def commit_copies(self, saves: TokenIds[PageCopy], loads: TokenIds[PageCopy], failed: FailedCopies = ()) -> None:
        """Ends the copies of a committed step: saved pages can be loaded, and loaded ones enter the prefix index."""
        for g, page, key in self.host.commit(saves, loads, failed):
            if key is not None:
                self.pools[g].publish(page, key)
            self.pools[g].release([page])

    def list_updates(self, pages: SequencePages) -> list[PageUpdate]:
        """Returns the page-table entries of all pages that the sequence holds."""
        return [(g, i, page) for g, ids in enumerate(pages.page_ids) for i, page in enumerate(ids) if page]

    def count_missing(self, pages: SequencePages, num_tokens: int) -> list[int]:
        """Returns the pages of each group that the sequence lacks for `num_tokens`."""
        missing = []
        for g, group in enumerate(self.groups):
            num_entries, num_on_host = len(pages.page_ids[g]), sum(g == each for each, _ in pages.on_host)
            needed = self._pages_for(num_tokens) - num_entries + num_on_host
            if (most := self._most_pages(group)) is not None:
                needed = min(needed, most - (num_entries - num_on_host - pages.num_trimmed[g]))
            missing.append(max(needed, 0))
        return missing

    def has_room(self, missing: Iterable[int]) -> bool:
        """Returns whether every group's pool has so many available pages."""
        return all(count <= pool.num_available for count, pool in zip(missing, self.pools, strict=True))

    def reserve(self, pages: SequencePages, num_computed: int, num_tokens: int) -> list[PageUpdate] | None:
        """Makes room for tokens [num_computed, num_tokens); returns the new table entries, or None when a pool is full.

        Pages behind the windows are freed first, in either case; None reserves nothing.
        """
        if self._has_windows:
            self._trim(pages, num_computed)
        count = self._pages_for(num_tokens)
        for entries, pool in zip(pages.page_ids, self.pools, strict=True):
            if count - len(entries) > pool.num_available:
                return None
        updates: list[PageUpdate] = []
        for g, entries in enumerate(pages.page_ids):
            pool = self.pools[g]
            for index in range(len(entries), count):
                page, evicted = pool.allocate()
                if evicted is not None:
                    self.host.save(g, page, evicted)
                entries.append(page)
                updates.append((g, index, page))
        pages.num_reserved_tokens = max(pages.num_reserved_tokens, count * self.page_size)
        return updates

    def next_publish(self, pages: SequencePages) -> int:
        """Returns how many computed tokens fill the next page to publish; 2**62 if the sequence publishes none."""
        end = (pages.num_published + 1) * self.page_size
        return end if pages.is_cached and end <= pages.num_sharable else 2**62

    def publish(self, pages: SequencePages, token_ids: TokenIds[int], num_computed: int) -> None:
        """Puts the pages that are full after `num_computed` committed tokens into the prefix index."""
        num_full = min(num_computed, pages.num_sharable) // self.page_size
        pages.extend_keys(token_ids, num_full, self.page_size)
        for index in range(pages.num_published, num_full):
            key = pages.keys[index]
            for g, entries in enumerate(pages.page_ids):
                if entries[index] != NULL_PAGE:  # the window may have passed it before its step was committed
                    self.pools[g].publish(entries[index], key)
                    self.host.pools[g].mark_spare(key)
        pages.num_published = max(pages.num_published, num_full)
        if pages.states.pending:
            self.snapshots.publish(pages.states, pages.keys, num_full * self.page_size, self.page_size)

    def release(self, pages: SequencePages) -> None:
        """Releases all pages, the last first, so that the tail of a shared prefix is evicted before its head."""
        for g, (pool, entries) in enumerate(zip(self.pools, pages.page_ids, strict=True)):
            pool.release(reversed(entries))
            entries.clear()
            pages.num_trimmed[g] = 0
        pages.on_host.clear()
        self.snapshots.release(pages.states)
        pages.num_reserved_tokens = 0
        pages.num_published = 0

    def drop_prefix_index(self) -> None:
        """Empties the prefix index of both tiers. Copies in flight go on, and their content is forgotten."""
        for pool in self.pools:
            pool.drop_index()
        self.host.drop_index()
        self.snapshots.drop_index()

    def abandon_copies(self) -> None:
        """Empties the prefix index of both tiers, and ends the copies of steps that will never be committed."""
        for g, page in self.host.abandon():
            self.pools[g].release([page])
        self.drop_prefix_index()

    def check(self) -> None:
        """Raises AssertionError when an invariant of a pool, of the host tier or of snapshots does not hold."""
        for pool in self.pools:
            pool.check()
        self.host.check()
        self.snapshots.check()

    def _pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def _most_pages(self, group: PageGroup) -> int | None:
        window = group.window
        return None if window is None else count_window_pages(window, self._max_chunk, self.page_size)

    def _first_visible_page(self, group: PageGroup, position: int) -> int:
        """Returns the index of the first page visible to queries from `position` on."""
        return 0 if group.window is None else max(0, position - group.window + 1) // self.page_size

    def _trim(self, pages: SequencePages, num_computed: int) -> None:
        for g, (group, pool) in enumerate(zip(self.groups, self.pools, strict=True)):
            start, entries = pages.num_trimmed[g], pages.page_ids[g]
            stop = min(self._first_visible_page(group, num_computed), len(entries))
            if stop > start:
                pool.release(entries[start:stop])
                entries[start:stop] = [NULL_PAGE] * (stop - start)
                pages.num_trimmed[g] = stop

    def _match(self, pages: SequencePages, token_ids: TokenIds[int]) -> int:
        """Returns the length in pages of the longest usable prefix, and notes the snapshot at its end."""
        matches = self._list_matches(pages, token_ids)
        if not self.snapshots.num_slots:
            return next(matches, 0)
        return self.snapshots.attach(pages.states, pages.keys, matches, self.page_size)

    def _list_matches(self, pages: SequencePages, token_ids: TokenIds[int]) -> Iterator[int]:
        """Yields the lengths in pages, on the hit grid, of prefixes whose pages every group has, the longest first.

        A group has them if the pages visible to the next query are cached.
        """
        limit = max(0, min(len(token_ids) - 1, pages.num_sharable)) // self.page_size
        pages.extend_keys(token_ids, limit, self.page_size)
        runs = []  # runs[g][n]: cached pages directly before page n in group g, in either tier
        for g, pool in enumerate(self.pools):
            run = [0]
            for key in pages.keys[:limit]:
                run.append(run[-1] + 1 if pool.lookup(key) is not None or self.host.has(g, key) else 0)
            runs.append(run)
        for num_pages in range(limit - limit % self._hit_grid, 0, -self._hit_grid):
            if all(
                run[num_pages] >= num_pages - self._first_visible_page(group, num_pages * self.page_size)
                for run, group in zip(runs, self.groups, strict=True)
            ):
                yield num_pages

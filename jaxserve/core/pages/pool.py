"""The KV page pool of one group: reference counts, the free list and the prefix index.

A page is in one of four states:

    null        page 0: padded rows write there; it has no owner
    free        content unknown                     allocate: free -> referenced
    referenced  owned by one or more sequences      release:  referenced -> cached if published, else free
    cached      no owner, content known by its key  share, or allocate (evicts): cached -> referenced

Invariants, checked by `check`:
    I1  free + cached + referenced = num_pages - 1
    I2  no page is in the free list twice, or in two states
    I3  a referenced page has a count >= 1, every other page a count of 0
    I4  the index and the pages' keys are inverses; every cached page has a key, no free page has one
    I5  page 0 is never allocated
"""

from __future__ import annotations

from collections.abc import Iterable

NULL_PAGE = 0


class PagePool:
    """Allocates page ids 1..num_pages-1: free pages first, then the least recently used cached page."""

    def __init__(self, num_pages: int) -> None:
        if num_pages < 2:
            raise ValueError(f"num_pages: a pool needs the null page and one more, got {num_pages}")
        self.num_pages = num_pages
        self._counts = [0] * num_pages
        self._free = list(range(num_pages - 1, 0, -1))  # a stack: page 1 on top
        self._cached: dict[int, None] = {}  # in order of release: the first is the least recently used
        self._keys: list[bytes | None] = [None] * num_pages
        self._index: dict[bytes, int] = {}

    @property
    def num_available(self) -> int:
        """Pages that `allocate` can return: free and cached ones."""
        return len(self._free) + len(self._cached)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_referenced(self) -> int:
        return self.num_pages - 1 - self.num_available

    def allocate(self) -> tuple[int, bytes | None]:
        """Returns a page with one owner, and the key of the content that it lost; None if that was not known.

        `num_available` must be positive.
        """
        key = None
        if not self._free:
            page = next(iter(self._cached))
            del self._cached[page]
            key = self._keys[page]
            self._forget(page)
            self._free.append(page)
        page = self._free.pop()
        self._counts[page] = 1
        return page, key

    def lookup(self, key: bytes) -> int | None:
        """Returns the page published under `key`, or None. Without an owner it can be evicted until `share`."""
        return self._index.get(key)

    def share(self, page: int) -> None:
        """Adds an owner to a page that `lookup` returned."""
        if self._counts[page] == 0:
            del self._cached[page]
        self._counts[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """Removes one owner from each page; null pages are skipped. AssertionError if a page has no owner."""
        counts = self._counts
        for page in pages:
            if page == NULL_PAGE:
                continue
            if counts[page] <= 0:
                raise AssertionError(f"page {page} was released by somebody who does not own it")
            counts[page] -= 1
            if counts[page] == 0:
                if self._keys[page] is None:
                    self._free.append(page)
                else:
                    self._cached[page] = None

    def publish(self, page: int, key: bytes) -> None:
        """Adds a full, referenced page to the prefix index.

        The first page published under a key keeps it: page tables are append-only, so equal pages are not merged.
        """
        if self._keys[page] is None and key not in self._index:
            self._keys[page] = key
            self._index[key] = page

    def drop_index(self) -> None:
        """Empties the index; cached pages become free."""
        self._free.extend(self._cached)
        self._cached.clear()
        self._index.clear()
        self._keys = [None] * self.num_pages

    def draw(self, max_cells: int) -> str:
        """Returns the pages' states in order, one digit per cell, at most `max_cells` cells of nearly equal size.

        0: free, 1: cached, 2: one owner, 3: several owners. A cell shows the largest digit among its pages.
        """
        pages, cells = self.num_pages - 1, min(max_cells, self.num_pages - 1)
        digits = []
        for cell in range(cells):  # slices: a pool may have a million pages
            start, stop = 1 + cell * pages // cells, 1 + (cell + 1) * pages // cells
            owners = max(self._counts[start:stop])
            digits.append("3" if owners > 1 else "2" if owners else "1" if any(self._keys[start:stop]) else "0")
        return "".join(digits)

    def check(self) -> None:
        """Raises AssertionError when an invariant does not hold."""
        free, cached = set(self._free), set(self._cached)
        referenced = {page for page, count in enumerate(self._counts) if count > 0}
        _assert(len(free) == len(self._free), "I2: a page is twice in the free list")
        _assert(not (free & cached or free & referenced or cached & referenced), "I2: a page is in two states")
        _assert(len(free) + len(cached) + len(referenced) == self.num_pages - 1, "I1: pages are lost")
        _assert(NULL_PAGE not in free | cached | referenced, "I5: the null page was handed out")
        _assert(min(self._counts) >= 0, "I3: a count is negative")
        keyed = {page: key for page, key in enumerate(self._keys) if key is not None}
        _assert(keyed == {page: key for key, page in self._index.items()}, "I4: index and keys differ")
        _assert(
            cached <= keyed.keys() and not free & keyed.keys(),
            "I4: a cached page has no key, or a free one has",
        )

    def _forget(self, page: int) -> None:
        key = self._keys[page]
        if key is not None:
            del self._index[key]
            self._keys[page] = None


def _assert(holds: bool, what: str) -> None:
    if not holds:
        raise AssertionError(what)

"""The page pool: states, the order of eviction, and the faults that its invariants catch."""

from __future__ import annotations

import pytest

from jaxserve.core.pages import PagePool


def test_pages_are_handed_out_once_and_never_the_null_page() -> None:
    pool = PagePool(5)
    pages = [pool.allocate()[0] for _ in range(4)]
    assert sorted(pages) == [1, 2, 3, 4]
    assert (pool.num_available, pool.num_referenced) == (0, 4)
    pool.check()


def test_published_pages_are_found_until_they_are_evicted_least_recent_first() -> None:
    pool = PagePool(4)
    first, second, third = (pool.allocate()[0] for _ in range(3))
    pool.publish(first, b"first")
    pool.publish(second, b"second")
    pool.release([second, first, third])
    assert (pool.num_cached, pool.num_available) == (2, 3)
    assert pool.allocate() == (third, None), "a page of no known content goes first"
    pool.share(pool.lookup(b"second"))  # type: ignore[arg-type]
    assert pool.allocate() == (first, b"first")
    assert pool.lookup(b"first") is None and pool.lookup(b"second") == second
    pool.check()


def test_shared_pages_outlive_one_owner() -> None:
    pool = PagePool(3)
    page = pool.allocate()[0]
    pool.publish(page, b"key")
    pool.share(page)
    pool.release([page])
    assert pool.num_referenced == 1
    pool.release([page])
    assert (pool.num_referenced, pool.lookup(b"key")) == (0, page)
    pool.check()


def test_first_page_published_under_a_key_keeps_it() -> None:
    pool = PagePool(4)
    first, second = pool.allocate()[0], pool.allocate()[0]
    pool.publish(first, b"key")
    pool.publish(second, b"key")
    assert pool.lookup(b"key") == first
    pool.release([first, second])
    pool.check()


def test_dropping_the_index_forgets_owned_pages_too() -> None:
    pool = PagePool(4)
    owned, idle = pool.allocate()[0], pool.allocate()[0]
    pool.publish(owned, b"owned")
    pool.publish(idle, b"idle")
    pool.release([idle])
    pool.drop_index()
    assert pool.lookup(b"owned") is None and pool.lookup(b"idle") is None
    pool.release([owned])
    assert (pool.num_cached, pool.num_available) == (0, 3)
    pool.check()


def test_releasing_a_foreign_page_is_caught() -> None:
    pool = PagePool(3)
    page = pool.allocate()[0]
    pool.release([page, 0])  # the null page is passed over
    with pytest.raises(AssertionError, match="does not own"):
        pool.release([page])


@pytest.mark.parametrize("damage", ["lose", "double", "count", "key"])
def test_check_sees_damage(damage: str) -> None:
    pool = PagePool(4)
    page = pool.allocate()[0]
    pool.publish(page, b"key")
    if damage == "lose":
        pool._free.pop()
    elif damage == "double":
        pool._free.append(pool._free[0])
    elif damage == "count":
        pool._counts[pool._free[0]] = 1
    else:
        pool._index.clear()
    with pytest.raises(AssertionError, match=r"I\d"):
        pool.check()

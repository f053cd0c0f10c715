"""Pages of sequences: prefixes found by content and salt, windows that give pages back."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from jaxserve.core.pages import NULL_PAGE, PageGroup, PageManager
from jaxserve.core.pages.prefix import extend_keys


def make_manager(*groups: PageGroup, caching: bool = True, page_size: int = 32) -> PageManager:
    return PageManager(groups, page_size=page_size, max_chunk=64, enable_prefix_caching=caching)


def fill(manager: PageManager, tokens: list[int], salt: str = "") -> object:
    """Computes a whole sequence and publishes what is full."""
    pages = manager.new_sequence(salt)
    start = manager.attach_prefix(pages, tokens)
    assert manager.reserve(pages, start, len(tokens)) is not None
    manager.publish(pages, tokens, len(tokens))
    return pages


def test_hit_leaves_one_token_and_shares_whole_pages_only() -> None:
    manager = make_manager(PageGroup(20))
    first = fill(manager, list(range(100)))
    for length, hit in ((100, 96), (97, 96), (96, 64), (33, 32), (32, 0), (1, 0)):
        pages = manager.new_sequence("")
        assert manager.attach_prefix(pages, list(range(length))) == hit
        assert pages.page_ids[0] == first.page_ids[0][: hit // 32]
        manager.release(pages)
    manager.check()


def test_small_pages_hit_on_the_chunk_grid() -> None:
    manager = make_manager(PageGroup(40), page_size=8)
    fill(manager, list(range(100)))
    assert manager.attach_prefix(manager.new_sequence(""), list(range(60))) == 32


def test_salt_and_switch_keep_prefixes_apart() -> None:
    manager = make_manager(PageGroup(20))
    fill(manager, list(range(64)), salt="a")
    assert manager.attach_prefix(manager.new_sequence("b"), list(range(64))) == 0
    off = make_manager(PageGroup(20), caching=False)
    fill(off, list(range(64)))
    assert off.attach_prefix(off.new_sequence(""), list(range(64))) == 0


def test_a_changed_token_ends_the_hit_at_its_page() -> None:
    manager = make_manager(PageGroup(20))
    fill(manager, list(range(128)))
    changed = [*range(70), 999, *range(71, 128)]
    assert manager.attach_prefix(manager.new_sequence(""), changed) == 64


def test_a_page_is_given_back_when_its_last_token_leaves_the_window_and_no_step_sooner() -> None:
    manager = make_manager(PageGroup(20, window=40), caching=False)
    pages = manager.new_sequence("")
    assert manager.reserve(pages, 0, 64) is not None
    held = []
    for position in (70, 71):  # which see tokens from 31 and from 32 on
        assert manager.reserve(pages, position, position + 1) is not None
        held.append(pages.page_ids[0][0] != NULL_PAGE)
    assert held == [True, False]


def test_window_gives_pages_back_and_hits_need_only_what_is_visible() -> None:
    manager = make_manager(PageGroup(20), PageGroup(20, window=40))
    pages = fill(manager, list(range(256)))
    assert manager.reserve(pages, 256, 257) is not None
    assert pages.page_ids[1][:6] == [NULL_PAGE] * 6 and all(pages.page_ids[1][6:])
    assert all(pages.page_ids[0])
    again = manager.new_sequence("")
    assert manager.attach_prefix(again, list(range(256))) == 224
    assert again.page_ids[1][:5] == [NULL_PAGE] * 5
    assert all(again.page_ids[1][5:]), "positions 185..223 are visible to the query at 224"
    manager.check()


def test_reserve_is_all_or_nothing() -> None:
    manager = make_manager(PageGroup(20), PageGroup(3, window=1000))
    pages = manager.new_sequence("")
    before = [pool.num_available for pool in manager.pools]
    assert manager.reserve(pages, 0, 96) is None
    assert [pool.num_available for pool in manager.pools] == before
    assert manager.first_unfit_group(96) == (3, 2) and manager.first_unfit_group(64) is None


@given(st.lists(st.integers(0, 2**40), min_size=64, max_size=64), st.integers(0, 63))
def test_keys_depend_on_every_token_before(tokens: list[int], where: int) -> None:
    keys: list[bytes] = []
    extend_keys(keys, tokens, page_size=16, num_pages=4, salt="")
    changed, other = tokens.copy(), []
    changed[where] += 1
    extend_keys(other, changed, page_size=16, num_pages=4, salt="")
    assert [a == b for a, b in zip(keys, other, strict=True)] == [page < where // 16 for page in range(4)]

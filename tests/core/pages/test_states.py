"""Snapshots of recurrent states: each slot has one owner or one name, and what is found is what was saved."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from jaxserve.core.pages import PageGroup, PageManager
from jaxserve.core.pages.manager import SequencePages
from jaxserve.core.pages.states import PendingSnapshot
from tests.examples import scale_examples

PAGE, GRID, LONGEST = 8, 16, 96


class Text:
    """A sequence with pages for all of its tokens, of which some are computed."""

    def __init__(self, manager: PageManager, tokens: list[int]) -> None:
        self.tokens, self.pages = tokens, manager.new_sequence("")
        self.num_computed = self.num_committed = 0


class SnapshotMachine(RuleBasedStateMachine):
    """Texts over an alphabet of two letters, so that they often begin alike; slots hold the texts that they are of."""

    @initialize(num_slots=st.integers(1, 6), num_pages=st.integers(14, 60))
    def start(self, num_slots: int, num_pages: int) -> None:
        self.manager = PageManager(
            [PageGroup(num_pages)],
            page_size=PAGE,
            max_chunk=64,
            enable_prefix_caching=True,
            num_snapshots=num_slots,
            hit_grid=GRID,
        )
        self.texts: list[Text] = []
        self.slots: dict[int, list[int]] = {}

    @rule(tokens=st.lists(st.sampled_from([0] * 9 + [1]), min_size=1, max_size=LONGEST))
    def admit(self, tokens: list[int]) -> None:
        text, manager = Text(self.manager, tokens), self.manager
        hit = manager.attach_prefix(text.pages, tokens)
        slot = text.pages.states.start
        assert (slot is None) == (hit == 0) and hit < len(tokens) and hit % GRID == 0
        assert slot is None or self.slots[slot] == tokens[:hit]
        junction = text.pages.states.junction
        assert junction == 0 or (hit < junction < len(tokens) and junction % GRID == 0)
        if manager.reserve(text.pages, hit, len(tokens)) is None:
            manager.release(text.pages)
            return
        text.num_computed = text.num_committed = hit
        self.texts.append(text)

    @rule(pick=st.integers(0, 9), cells=st.integers(1, 3), saves=st.booleans(), rolls=st.booleans())
    def compute(self, pick: int, cells: int, saves: bool, rolls: bool) -> None:
        """A step that is not committed yet."""
        if not self.texts:
            return
        text = self.texts[pick % len(self.texts)]
        end = min(len(text.tokens), (text.num_computed // GRID + cells) * GRID)
        if end % GRID == 0 and end > text.num_computed and saves:
            snapshot = self.manager.snapshots.save(text.pages.states, end, rolls=rolls)
            if snapshot is not None:
                self.slots[snapshot.slot] = text.tokens[:end]
        text.num_computed = end

    @rule(pick=st.integers(0, 9))
    def commit(self, pick: int) -> None:
        if self.texts:
            text = self.texts[pick % len(self.texts)]
            self.manager.publish(text.pages, text.tokens, text.num_computed)
            assert not text.pages.states.pending

    @rule(pick=st.integers(0, 9))
    def end(self, pick: int) -> None:
        if self.texts:
            self.manager.release(self.texts.pop(pick % len(self.texts)).pages)

    @rule()
    def drop(self) -> None:
        self.manager.drop_prefix_index()
        assert not self.manager.snapshots.num_cached

    @invariant()
    def holds(self) -> None:
        if not hasattr(self, "manager"):
            return
        self.manager.check()
        pending = [each.slot for text in self.texts for each in text.pages.states.pending]
        assert len(set(pending)) == len(pending) == self.manager.snapshots.num_pending

    def teardown(self) -> None:
        if hasattr(self, "manager"):
            for text in self.texts:
                self.manager.release(text.pages)
            self.manager.check()
            assert not self.manager.snapshots.num_pending


SnapshotMachine.TestCase.settings = settings(max_examples=scale_examples(200), stateful_step_count=40, deadline=None)
TestSnapshotMachine = SnapshotMachine.TestCase


def make_manager(num_slots: int) -> PageManager:
    return PageManager(
        [PageGroup(60)],
        page_size=PAGE,
        max_chunk=64,
        enable_prefix_caching=True,
        num_snapshots=num_slots,
        hit_grid=GRID,
    )


def compute(manager: PageManager, tokens: list[int], *points: int, rolls: bool = False) -> SequencePages:
    """Computes a text that finds nothing, with snapshots at these points."""
    pages = manager.new_sequence("")
    assert manager.attach_prefix(pages, tokens) == 0 and manager.reserve(pages, 0, len(tokens)) is not None
    for point in points:
        manager.snapshots.save(pages.states, point, rolls=rolls)
        manager.publish(pages, tokens, point)
    manager.publish(pages, tokens, len(tokens))
    return pages


def find(manager: PageManager, tokens: list[int]) -> int:
    """The cached tokens of a text, which is not kept."""
    pages = manager.new_sequence("")
    found = manager.attach_prefix(pages, tokens)
    manager.release(pages)
    return found


def test_pages_behind_the_last_snapshot_are_a_junction_and_stay_with_others() -> None:
    manager, text = make_manager(3), list(range(90))
    owner = compute(manager, text, 48)
    again = manager.new_sequence("")
    assert manager.attach_prefix(again, [*text[:85], 7]) == 48
    assert again.page_ids[0] == owner.page_ids[0][:6] and again.states.start is not None
    assert (again.states.junction, again.states.num_lost_tokens) == (80, 32)


def test_the_least_recently_used_gives_way() -> None:
    manager = make_manager(2)
    texts = [[mark] * 20 for mark in range(3)]
    for text in texts[:2]:
        compute(manager, text, 16)
    assert find(manager, texts[0]) == 16  # and is the more recent of the two
    compute(manager, texts[2], 16)
    assert [find(manager, text) for text in texts] == [16, 0, 16]


def test_rolling_snapshots_replace_each_other_and_no_others() -> None:
    manager, text = make_manager(8), list(range(90))
    pages = compute(manager, text, 16)
    for point in (32, 48, 64):
        manager.snapshots.save(pages.states, point, rolls=True)
        assert manager.snapshots.num_cached == 1 + (point > 32), "the last stays until the next is committed"
        manager.publish(pages, text, point)
    assert [find(manager, text[:length]) for length in (30, 40, 60, 70)] == [16, 16, 16, 64]


def test_a_rolling_snapshot_does_not_replace_one_that_another_text_has_under_its_key() -> None:
    manager, text = make_manager(2), list(range(90))
    pages = compute(manager, text, 16, rolls=True)
    for mark in (101, 102):  # which evict it
        compute(manager, [mark] * 20, 16)
    again = manager.new_sequence("")
    assert manager.attach_prefix(again, text) == 0
    assert manager.reserve(again, 0, 90) is not None
    manager.snapshots.save(again.states, 16, rolls=False)
    manager.publish(again, text, 16)
    assert find(manager, text[:30]) == 16
    manager.snapshots.save(pages.states, 32, rolls=True)
    manager.publish(pages, text, 32)
    assert [find(manager, text[:length]) for length in (30, 40)] == [16, 32]


def test_what_is_not_committed_is_found_by_nobody_and_freed_with_its_sequence() -> None:
    manager, text = make_manager(1), list(range(40))
    pages = manager.new_sequence("")
    manager.attach_prefix(pages, text)
    manager.reserve(pages, 0, 40)
    assert manager.snapshots.save(pages.states, 32, rolls=False) == PendingSnapshot(32, 0, rolls=False)
    other = compute(manager, [5] * 40, 32)  # there is no slot for it
    assert not other.states.pending and find(manager, [5] * 40) == 0
    manager.release(pages)
    assert manager.snapshots.num_pending == manager.snapshots.num_cached == 0
    assert find(manager, text) == 0


def test_what_was_not_passed_is_given_up_and_what_was_stays() -> None:
    """A verify step may have written the first, and its row goes on in front of the second."""
    manager, text = make_manager(2), list(range(60))
    pages = manager.new_sequence("")
    manager.attach_prefix(pages, text)
    manager.reserve(pages, 0, 60)
    first, second = (manager.snapshots.save(pages.states, point, rolls=True) for point in (16, 32))
    assert [pages.states.find_pending(count) for count in (15, 16, 32)] == [first, second, None]
    manager.snapshots.give_up(pages.states, 17)
    assert pages.states.pending == [first]
    manager.publish(pages, text, 48)
    manager.check()
    assert (manager.snapshots.num_pending, manager.snapshots.num_cached, find(manager, text)) == (0, 1, 16)

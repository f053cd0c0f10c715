"""The host tier beside the page pools: no page or slot is lost, and a page that is shared holds what its key says."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from jaxserve.core.pages import PageGroup, PageManager
from jaxserve.core.pages.host_pool import HostPool
from jaxserve.core.pages.manager import SequencePages
from tests.examples import scale_examples

PAGE = 32
Place = tuple[int, int]  # (group, page) or (group, slot)


@dataclass
class Run:
    """A sequence that holds pages."""

    tokens: list[int]
    pages: SequencePages


@dataclass
class Step:
    """A plan in flight."""

    saved: dict[Place, bytes | None]
    loads: tuple[tuple[int, int, int], ...]
    loaded: dict[Place, bytes | None]  # by slot
    saves: tuple[tuple[int, int, int], ...]
    computed: list[Run]


class TierMachine(RuleBasedStateMachine):
    """Sequences of few families come and go on pools that hold about two of them, with up to two steps in flight."""

    @initialize(
        num_pages=st.sampled_from([8, 12, 20]),
        window=st.sampled_from([None, None, 40, 70]),
        slots=st.sampled_from([1, 3, 10, 40]),
        max_copies=st.sampled_from([1, 2, 8]),
    )
    def start(self, num_pages: int, window: int | None, slots: int, max_copies: int) -> None:
        groups = [PageGroup(num_pages)] + ([] if window is None else [PageGroup(max(7, num_pages - 3), window)])
        self.manager = PageManager(
            groups,
            page_size=PAGE,
            max_chunk=6 * PAGE,  # whole sequences are computed at once,
            enable_prefix_caching=True,
            num_host_slots=slots,
            max_copies=max_copies,
        )
        self.device: dict[Place, bytes | None] = {}  # what pages hold
        self.slots: dict[Place, bytes | None] = {}
        self.arrived: dict[Place, bytes | None] = {}
        self.flying: deque[Step] = deque()
        self.running: list[Run] = []
        self.waiting: list[Run] = []
        self.new: list[tuple[Run, list[tuple[int, int, bytes | None]]]] = []  # writes of the next step

    @rule(family=st.integers(0, 3), length=st.integers(1, 6 * PAGE), salt=st.sampled_from(["", "", "b"]))
    def begin(self, family: int, length: int, salt: str) -> None:
        tokens = [family * 1000 + index for index in range(length)]
        self.admit(Run(tokens, self.manager.new_sequence(salt)))

    @rule(family=st.integers(0, 3), length=st.integers(2 * PAGE, 6 * PAGE))
    def serve(self, family: int, length: int) -> None:
        """A request from beginning to end."""
        self.begin(family, length, "")
        self.plan()
        while self.flying:
            self.commit(0)
        self.retry()
        while self.running:
            self.finish(0)

    @rule()
    def retry(self) -> None:
        waiting, self.waiting = self.waiting, []
        for run in waiting:
            self.admit(run)

    def admit(self, run: Run) -> None:
        manager, pages = self.manager, run.pages
        if manager.is_loading(pages):
            self.waiting.append(run)
            return
        num_cached = manager.attach_prefix(pages, run.tokens)
        has_room = manager.has_room(manager.count_missing(pages, len(run.tokens)))
        if has_room and manager.load_prefix(pages):
            assert not any(pages.page_ids[0]) and manager.is_loading(pages)
            self.waiting.append(run)
            return
        if not has_room:
            manager.release(pages)
            return
        assert not pages.on_host
        for g, index, page in manager.list_updates(pages):
            held = self.arrived.get((g, page), self.device.get((g, page)))
            assert held == pages.keys[index], "a shared page holds something else"
        updates = manager.reserve(pages, num_cached, len(run.tokens))
        assert updates is not None
        writes = []
        for g, index, page in updates:
            is_full = index < len(run.tokens) // PAGE
            pages.extend_keys(run.tokens, len(run.tokens) // PAGE, PAGE)
            writes.append((g, page, pages.keys[index] if is_full else None))
        self.running.append(run)
        self.new.append((run, writes))

    @rule(pick=st.integers(0, 1000))
    def finish(self, pick: int) -> None:
        if self.running:
            self.manager.release(self.running.pop(pick % len(self.running)).pages)

    @rule()
    def plan(self) -> None:
        if len(self.flying) == 2:
            self.commit(0)
        saves, loads = self.manager.host.take_copies()
        assert len(loads) <= self.manager.host.max_copies and len(saves) <= 2 * self.manager.host.max_copies
        self.device |= self.arrived
        self.arrived = {}
        saved = {(g, slot): self.device[g, page] for g, page, slot in saves}
        loaded = {(g, slot): self.slots[g, slot] for g, _, slot in loads}
        busy = [slot for step in self.flying for copies in (step.saved, step.loaded) for slot in copies]
        used = [*busy, *saved, *loaded]
        assert len(used) == len(set(used)), "a slot with a copy in flight is used"
        for place in saved:
            self.slots[place] = None
        for g, page, _ in loads:
            self.device[g, page] = None
        for _, writes in self.new:
            for g, page, key in writes:
                self.device[g, page] = key
        self.flying.append(Step(saved, loads, loaded, saves, [run for run, _ in self.new]))
        self.new = []

    @rule(failures=st.sampled_from([0, 0, 0, 1, 2]))
    def commit(self, failures: int) -> None:
        if not self.flying:
            return
        step = self.flying.popleft()
        failed = set([*step.loaded, *step.saved][:failures])
        self.slots |= {slot: None if slot in failed else key for slot, key in step.saved.items()}
        for g, page, slot in step.loads:
            if (g, slot) not in failed:
                self.arrived[g, page] = step.loaded[g, slot]
        self.manager.commit_copies(step.saves, step.loads, failed)
        for run in step.computed:
            if run in self.running:
                self.manager.publish(run.pages, run.tokens, len(run.tokens))

    @rule(chance=st.integers(0, 5))
    def drop(self, chance: int) -> None:
        if chance == 0:
            self.manager.drop_prefix_index()

    @rule(chance=st.integers(0, 5))
    def lose_steps(self, chance: int) -> None:
        """The device's state is lost, with the steps in flight; everybody starts anew."""
        if chance:
            return
        for run in self.running:
            self.manager.release(run.pages)
        self.running, self.new = [], []
        self.flying.clear()
        self.device, self.slots, self.arrived = {}, {}, {}
        self.manager.abandon_copies()
        assert not any(self.manager.is_loading(run.pages) for run in self.waiting)
        assert all(pool.num_cached == 0 for pool in self.manager.host.pools)

    @invariant()
    def all_is_conserved(self) -> None:
        if not hasattr(self, "manager"):
            return
        self.manager.check()
        for g, pool in enumerate(self.manager.pools):
            owned = {page for run in self.running for page in run.pages.page_ids[g] if page}
            loading = self.manager.host.list_loading(g)
            assert len(loading) == len(set(loading)) and not owned & set(loading)
            assert pool.num_referenced == len(owned) + len(loading)
            for key, page in pool._index.items():
                held = self.arrived.get((g, page), self.device.get((g, page)))
                assert held == key, "the index names a page that holds something else"
        for g, slots in enumerate(self.manager.host.pools):
            for key, slot in slots._index.items():
                if slots.lookup(key) is not None:
                    assert self.slots[g, slot] == key, "the index names a slot that holds something else"

    def teardown(self) -> None:
        """Whoever waits gets its pages or a miss: every load ends."""
        if not hasattr(self, "manager"):
            return
        while self.running:
            self.finish(0)
        for _ in range(100):  # pages of a family's load, one in a step
            if not self.flying and not self.manager.host.has_loads:
                break
            self.plan()
            while self.flying:
                self.commit(0)
        assert not self.flying and not self.manager.host.has_loads
        assert not any(self.manager.is_loading(run.pages) for run in self.waiting)
        assert all(pool.num_referenced == 0 for pool in self.manager.pools)


TierMachine.TestCase.settings = settings(
    max_examples=scale_examples(200),
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
    print_blob=True,
)
TestTierMachine = TierMachine.TestCase


def make_manager(num_pages: int, slots: int, *, window: int | None = None, max_copies: int = 8) -> PageManager:
    groups = [PageGroup(num_pages)] + ([] if window is None else [PageGroup(num_pages, window)])
    return PageManager(
        groups,
        page_size=PAGE,
        max_chunk=64,
        enable_prefix_caching=True,
        num_host_slots=slots,
        max_copies=max_copies,
    )


def compute(manager: PageManager, tokens: list[int], salt: str = "") -> int:
    """Runs a sequence from its admission to its end, with its copies; returns the tokens it found cached."""
    pages = manager.new_sequence(salt)
    while True:
        start = manager.attach_prefix(pages, tokens)
        assert manager.has_room(manager.count_missing(pages, len(tokens)))
        if not manager.load_prefix(pages):
            break
        while manager.is_loading(pages):
            manager.commit_copies(*manager.host.take_copies())
    assert manager.reserve(pages, start, len(tokens)) is not None
    manager.commit_copies(*manager.host.take_copies())
    manager.publish(pages, tokens, len(tokens))
    manager.release(pages)
    return start


def test_an_evicted_page_is_found_on_the_host_under_its_salt_only() -> None:
    manager = make_manager(num_pages=5, slots=8)
    assert compute(manager, list(range(100))) == 0
    assert compute(manager, list(range(500, 600))) == 0, "which evicts the first"
    assert compute(manager, list(range(100)), salt="other") == 0
    assert compute(manager, list(range(100))) == 96
    manager.check()


def test_both_tiers_together_hold_as_many_pages_as_both_have_room_for() -> None:
    # Three sequences of four full pages and a part. Slots that are being loaded cannot be replaced: four more.
    manager = make_manager(num_pages=6, slots=7 + 4)
    families = [list(range(1000 * family, 1000 * family + 4 * PAGE + 5)) for family in range(3)]
    for tokens in families:
        compute(manager, tokens)
    for _ in range(3):
        assert [compute(manager, tokens) for tokens in families] == [4 * PAGE] * 3
    assert manager.host.num_evictions == 0


def test_a_windowed_group_loads_its_last_window_only() -> None:
    manager = make_manager(num_pages=9, slots=40, window=40, max_copies=20)
    compute(manager, list(range(230)))
    compute(manager, list(range(1000, 1250)))
    pages = manager.new_sequence("")
    assert manager.attach_prefix(pages, list(range(230))) == 224
    assert sorted(index for group, index in pages.on_host if group == 1) == [5, 6], "what the query at 224 sees"
    assert len([index for group, index in pages.on_host if group == 0]) == 7
    manager.release(pages)


def test_two_sequences_wait_for_one_load() -> None:
    manager = make_manager(num_pages=9, slots=8)
    compute(manager, list(range(100)))
    compute(manager, list(range(500, 750)))
    first, second = manager.new_sequence(""), manager.new_sequence("")
    for pages in (first, second):
        manager.attach_prefix(pages, list(range(100)))
        assert manager.load_prefix(pages)
    _, loads = manager.host.take_copies()
    assert len(loads) == 3
    manager.commit_copies((), loads)
    assert not manager.is_loading(first) and not manager.is_loading(second)


def test_a_failed_copy_is_a_miss_and_three_turn_the_tier_off(caplog: pytest.LogCaptureFixture) -> None:
    manager = make_manager(num_pages=5, slots=8)
    compute(manager, list(range(100)))
    compute(manager, list(range(500, 600)))
    pages = manager.new_sequence("")
    manager.attach_prefix(pages, list(range(100)))
    assert manager.load_prefix(pages)
    saves, loads = manager.host.take_copies()
    manager.commit_copies(saves, loads, {(group, slot) for group, _, slot in loads[:1]})
    assert manager.attach_prefix(pages, list(range(100))) == 0, "the first page is lost, and with it the prefix"
    manager.release(pages)
    assert manager.host.is_on and manager.host.num_failures == 1
    compute(manager, list(range(800, 900)))
    compute(manager, list(range(500, 600)))
    pages = manager.new_sequence("")
    manager.attach_prefix(pages, list(range(800, 900)))
    assert manager.load_prefix(pages)
    saves, loads = manager.host.take_copies()
    manager.commit_copies(saves, loads, {(group, slot) for group, _, slot in loads[:2]})
    assert not manager.host.is_on and "off after 3 failed copies" in caplog.text
    assert compute(manager, list(range(2000, 2100))) == 0
    assert manager.host.take_copies() == ((), ())
    manager.check()


def test_more_evictions_than_a_step_may_save_are_lost_and_counted() -> None:
    manager = make_manager(num_pages=7, slots=20, max_copies=2)
    compute(manager, list(range(6 * PAGE)))
    compute(manager, list(range(1000, 1000 + 6 * PAGE)))
    assert manager.host.num_unsaved == 4 == manager.host.num_evictions
    assert compute(manager, list(range(6 * PAGE))) == 0


def test_a_save_is_loadable_once_it_is_committed() -> None:
    pool = HostPool(2)
    slot = pool.take(b"a")
    assert slot is not None and pool.lookup(b"a") is None
    assert pool.take(b"a") is None, "it is on its way"
    pool.end_save(slot, is_valid=True)
    assert pool.lookup(b"a") == slot
    pool.check()


def test_a_slot_with_a_copy_in_flight_is_never_replaced() -> None:
    pool = HostPool(2)
    for key in (b"a", b"b"):
        pool.end_save(pool.take(key), is_valid=True)  # type: ignore[arg-type]
    pool.begin_load(pool.lookup(b"a"))  # type: ignore[arg-type]
    assert pool.take(b"c") == 1, "the least recently used is a's, which is loading"
    assert pool.take(b"d") is None, "both are in flight"
    assert pool.end_load(0, is_valid=True) == b"a"
    assert pool.take(b"d") == 0
    assert pool.num_evictions == 1, "a's content is on the device, too"
    pool.check()


@pytest.mark.parametrize("damage", ["lose", "double", "key"])
def test_check_sees_damage(damage: str) -> None:
    pool = HostPool(3)
    pool.end_save(pool.take(b"a"), is_valid=True)  # type: ignore[arg-type]
    if damage == "lose":
        pool._free.pop()
    elif damage == "double":
        pool._free.append(0)
    else:
        pool._index[b"b"] = 1
    with pytest.raises(AssertionError, match="H"):
        pool.check()


def begin_loads(max_copies: int) -> tuple[PageManager, SequencePages]:
    """A sequence that waits for three pages, some of whose loads are in flight and some queued."""
    manager = make_manager(num_pages=9, slots=12)
    compute(manager, list(range(100)))
    compute(manager, list(range(500, 750)))
    manager.host.max_copies = max_copies
    pages = manager.new_sequence("")
    manager.attach_prefix(pages, list(range(100)))
    assert manager.load_prefix(pages) and manager.is_loading(pages)
    return manager, pages


def test_steps_that_are_lost_give_back_pages_and_slots() -> None:
    manager, pages = begin_loads(max_copies=2)
    _, loads = manager.host.take_copies()
    assert len(loads) == 2 and manager.host.has_loads and manager.pools[0].num_referenced == 3
    manager.abandon_copies()
    assert not manager.is_loading(pages) and not manager.host.has_loads
    assert manager.pools[0].num_referenced == 0 and manager.host.pools[0].num_cached == 0
    assert manager.host.take_copies() == ((), ())
    manager.check()
    assert compute(manager, list(range(100))) == 0


def test_an_index_that_is_dropped_meanwhile_gets_no_page() -> None:
    manager, pages = begin_loads(max_copies=2)
    first = manager.host.take_copies()
    manager.drop_prefix_index()
    assert manager.pools[0].num_referenced == 3, "copies go on, so nobody else may have their pages"
    manager.commit_copies(*first)
    assert manager.is_loading(pages), "one is queued"
    manager.commit_copies(*manager.host.take_copies())
    assert not manager.is_loading(pages)
    assert manager.pools[0].num_referenced == manager.pools[0].num_cached == manager.host.pools[0].num_cached == 0
    manager.check()

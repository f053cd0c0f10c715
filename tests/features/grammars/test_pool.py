"""Masks of many rows: equal to one at a time, late rows wait alone, a failed row fails alone."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from jaxserve.features.grammars import Grammar, GrammarCompiler, MaskPool, Matcher, MatcherError
from jaxserve.structured_params import StructuredOutputsParams
from tests.features.grammars.schemas import REALISTIC
from tests.features.grammars.walks import read_bits

WAIT_S = 30.0


@pytest.fixture
def pool(compiler: GrammarCompiler) -> Iterator[MaskPool]:
    made = MaskPool(compiler.vocab_size, num_threads=2)
    yield made
    made.close()


@pytest.fixture
def grammar(compiler: GrammarCompiler) -> Grammar:
    return compiler.compile(StructuredOutputsParams(json=REALISTIC["order"]))


class HeldMatcher:
    """A matcher whose masks are computed when the test says so."""

    def __init__(self, matcher: Matcher) -> None:
        self._matcher = matcher
        self.version = 0
        self.mask_job = None
        self.go = threading.Event()
        self.num_calls = 0

    def fill_mask(self, row: np.ndarray) -> None:
        self.num_calls += 1
        assert self.go.wait(WAIT_S)
        self._matcher.fill_mask(row)


class Panic(BaseException):
    """What a library in Rust raises."""


class FailingMatcher(HeldMatcher):
    def __init__(self, matcher: Matcher, error: BaseException) -> None:
        super().__init__(matcher)
        self._error = error

    def fill_mask(self, row: np.ndarray) -> None:
        raise self._error


def compute_row(matcher: Matcher, like: np.ndarray) -> np.ndarray:
    row = np.zeros_like(like)
    matcher.fill_mask(row)
    return row


def test_batches_equal_single_rows(pool: MaskPool, grammar: Grammar) -> None:
    rng = np.random.default_rng(0)
    matchers: list[Matcher | None] = [grammar.new_matcher() if index % 4 else None for index in range(24)]
    for _ in range(12):
        batch = pool.start(matchers)
        assert pool.collect(batch, WAIT_S).all()
        for row, matcher in zip(batch.masks, matchers, strict=True):
            if matcher is None:
                assert (row == 0xFFFFFFFF).all()
            else:
                assert (row == compute_row(matcher, row)).all()
                if not matcher.is_finished:
                    matcher.accept(int(rng.choice(read_bits(row))))


def test_a_late_row_waits_alone(pool: MaskPool, grammar: Grammar) -> None:
    quick, late = grammar.new_matcher(), HeldMatcher(grammar.new_matcher())
    batch = pool.start([late, quick])  # type: ignore[list-item]
    while not pool.collect(batch, 0.01)[1]:
        pass
    assert pool.collect(batch, 0).tolist() == [False, True]
    for _ in range(3):  # steps that go on without it
        quick.accept(read_bits(batch.masks[1])[0])
        later = pool.start([quick, late])  # type: ignore[list-item]
        while not pool.collect(later, 0.01)[0]:
            pass
        assert pool.collect(later, 0).tolist() == [True, False]
        batch, batch.masks[1] = later, later.masks[0]
    late.go.set()
    assert pool.collect(later, WAIT_S).all()
    assert (later.masks[1] == compute_row(late._matcher, later.masks[1])).all()
    assert late.num_calls == 1, "one mask was computed, however many steps asked for it"


def test_an_unchanged_row_is_not_computed_again(pool: MaskPool, grammar: Grammar) -> None:
    held = HeldMatcher(grammar.new_matcher())
    held.go.set()
    for _ in range(3):
        batch = pool.start([held, held])  # type: ignore[list-item]
        assert pool.collect(batch, WAIT_S).all()
        assert (batch.masks[0] == batch.masks[1]).all() and batch.masks[0].any()
    assert held.num_calls == 1
    held.version += 1
    pool.collect(pool.start([held]), WAIT_S)  # type: ignore[list-item]
    assert held.num_calls == 2


@pytest.mark.parametrize("error", [MatcherError("the grammar cannot go on"), Panic()])
def test_a_failed_row_fails_alone(pool: MaskPool, grammar: Grammar, error: BaseException) -> None:
    matchers = [grammar.new_matcher(), FailingMatcher(grammar.new_matcher(), error), grammar.new_matcher()]
    batch = pool.start(matchers)  # type: ignore[arg-type]
    assert pool.collect(batch, WAIT_S).tolist() == [True, False, True]
    assert batch.errors == {1: error}
    again = pool.start(matchers)  # type: ignore[arg-type]
    assert pool.collect(again, WAIT_S).tolist() == [True, False, True], "the threads survive"


def test_an_empty_batch_and_a_closed_pool(grammar: Grammar, compiler: GrammarCompiler) -> None:
    pool = MaskPool(compiler.vocab_size, num_threads=2)
    assert pool.collect(pool.start([]), 0).shape == (0,)
    assert pool.collect(pool.start([None, None]), 0).tolist() == [True, True]
    before = threading.active_count()
    assert pool.collect(pool.start([grammar.new_matcher()]), WAIT_S).all()
    assert threading.active_count() == before + 2
    pool.close()
    assert threading.active_count() == before
    assert pool.collect(pool.start([grammar.new_matcher()]), WAIT_S).all(), "it starts again when asked"
    pool.close()


class WalkingMatcher(HeldMatcher):
    """One whose walks stop in front of a line until the test says so."""

    def __init__(self, matcher: Matcher, held_line: int) -> None:
        super().__init__(matcher)
        self.go.set()
        self._held_line = held_line
        self.go_on, self.is_held = threading.Event(), threading.Event()
        self.has_walked = threading.Event()

    def fill_along(self, drafts: list[int], lines: np.ndarray, version: int, go_on: Callable[[int], bool]) -> None:
        def hold(count: int) -> bool:
            goes = go_on(count)
            if count == self._held_line:
                self.is_held.set()
                assert self.go_on.wait(WAIT_S)
                return go_on(count)
            return goes

        self._matcher.fill_along(drafts, lines, version, hold)
        self.has_walked.set()


def take_greedily(matcher: Matcher, count: int) -> tuple[list[int], list[np.ndarray]]:
    """Returns tokens that may come next, and the masks there and after each."""
    there, ids, rows = matcher.copy(), [], []
    for _ in range(count + 1):
        rows.append(compute_row(there, np.zeros(-(-len(matcher.vocabulary.tokens) // 32), np.uint32)))
        ids.append(read_bits(rows[-1])[-1])
        there.accept(ids[-1])
    return ids[:count], rows


@pytest.mark.parametrize("timeout_s", [None, WAIT_S])
def test_lines_along_drafts(pool: MaskPool, grammar: Grammar, timeout_s: float | None) -> None:
    rng = np.random.default_rng(0)
    matchers: list[Matcher | None] = [grammar.new_matcher() if index % 3 else None for index in range(12)]
    width = 5
    for _ in range(10):
        drafts, expected, taken = [], [], []
        for matcher in matchers:
            if matcher is None:
                drafts.append([7, 7, 7, 7])
                taken.append(-1)
                expected.append([np.full(pool._num_words, 0xFFFFFFFF, np.uint32)] * width)
                continue
            ids, rows = take_greedily(matcher, width - 1)
            taken.append(ids[0])
            num_good = int(rng.integers(width))
            wrong = next(each for each in range(1536) if each not in read_bits(rows[num_good]))
            drafts.append([*ids[:num_good], *[[-4, wrong][num_good % 2]] * (width - 1 - num_good)])
            expected.append([*rows[: num_good + 1], *[np.zeros_like(rows[0])] * (width - 1 - num_good)])
        batch = pool.start(matchers, drafts, width)
        assert pool.collect(batch, timeout_s).all()
        np.testing.assert_array_equal(batch.read().reshape(len(matchers), width, -1), expected)
        assert batch.read() is batch.masks, "nothing is copied when all is done"
        for matcher, token_id in zip(matchers, taken, strict=True):
            if matcher is not None:
                matcher.accept(token_id)


def test_late_lines_are_not_waited_for(pool: MaskPool, grammar: Grammar) -> None:
    matcher = grammar.new_matcher()
    ids, rows = take_greedily(matcher, 3)
    held = WalkingMatcher(matcher, held_line=3)
    batch = pool.start([held, None], [ids, []], 4)  # type: ignore[list-item]
    assert held.is_held.wait(WAIT_S)
    batch.masks[3] = 0xDEADBEEF  # half a line
    assert pool.collect(batch, 0.01).tolist() == [True, True]
    found = batch.read()
    np.testing.assert_array_equal(found[:4], [*rows[:3], np.zeros_like(rows[0])])
    assert (found[4:] == 0xFFFFFFFF).all()
    held.go_on.set()
    matcher.accept(ids[0])  # waits until the walk has left the matcher
    assert held.has_walked.wait(WAIT_S)
    np.testing.assert_array_equal(found[3], np.zeros_like(rows[0]))
    assert matcher.token_ids == (ids[0],) and (compute_row(matcher, rows[1]) == rows[1]).all()
    assert pool.collect(batch, WAIT_S).tolist() == [True, True] and batch.num_lines == [3, 4], "it was cancelled"


def test_a_late_row_has_its_walk_in_the_next_step(pool: MaskPool, grammar: Grammar) -> None:
    matcher = grammar.new_matcher()
    ids, rows = take_greedily(matcher, 3)
    late = WalkingMatcher(matcher, held_line=-1)
    late.go.clear()
    first = pool.start([late], [ids], 4)  # type: ignore[list-item]
    assert pool.collect(first, 0.01).tolist() == [False] and not first.read().any()
    same = pool.start([None, late], [[], ids], 4)  # type: ignore[list-item]
    other = pool.start([late], [[*ids[:1], 5, 6]], 4)  # type: ignore[list-item]
    plain = pool.start([late])  # type: ignore[list-item]
    late.go.set()
    for batch, lines in [(same, rows), (other, rows[:2]), (plain, rows[:1])]:
        assert pool.collect(batch, WAIT_S).all()
        found = batch.read()[-batch.width :]
        np.testing.assert_array_equal(found[: len(lines)], lines)
        assert not found[len(lines) :].any(), "not along the drafts of another step"
    now = [ids[0], ids[1], 5]
    again = pool.start([late], [now], 4)  # type: ignore[list-item]
    assert pool.collect(again, WAIT_S).all()
    np.testing.assert_array_equal(again.read(), [*rows[:3], np.zeros_like(rows[0])])
    assert late.num_calls == 1, "only the walk is made anew"


def test_first_masks_come_before_walks(compiler: GrammarCompiler, grammar: Grammar) -> None:
    pool = MaskPool(compiler.vocab_size, num_threads=1)
    matchers = [grammar.new_matcher() for _ in range(3)]
    ids, _ = take_greedily(matchers[0], 3)
    held = [WalkingMatcher(matcher, held_line=2) for matcher in matchers]
    held[0].go.clear()
    batch = pool.start(held, [ids] * 3, 4)  # type: ignore[arg-type]
    held[0].go.set()
    assert held[0].is_held.wait(WAIT_S)
    assert pool.collect(batch, 0.01).tolist() == [True] * 3
    assert batch.num_lines == [2, 1, 1]
    held[0].go_on.set()
    pool.close()
    assert batch.all_done.is_set() and not held[1].is_held.is_set(), "walks that nobody wants do not begin"


def test_a_fault_in_a_walk_costs_its_lines(pool: MaskPool, grammar: Grammar, caplog: pytest.LogCaptureFixture) -> None:
    class Faulty(WalkingMatcher):
        def fill_along(self, drafts: list[int], lines: np.ndarray, version: int, go_on: Callable[[int], bool]) -> None:
            lines[1] = 0xDEADBEEF
            raise Panic

    matcher = grammar.new_matcher()
    ids, rows = take_greedily(matcher, 2)
    batch = pool.start([Faulty(matcher, -1), matcher], [ids, ids], 3)  # type: ignore[list-item]
    assert pool.collect(batch, WAIT_S).all() and batch.errors == {}
    np.testing.assert_array_equal(batch.read(), [rows[0], *np.zeros((2, len(rows[0])), np.uint32), *rows])
    assert "the masks along a row's drafts ended with a fault" in caplog.text


def test_a_failed_row_has_no_lines(pool: MaskPool, grammar: Grammar) -> None:
    error = MatcherError("the grammar cannot go on")
    failing = FailingMatcher(grammar.new_matcher(), error)
    batch = pool.start([failing, None], [[5, 6], []], 3)  # type: ignore[list-item]
    assert pool.collect(batch, WAIT_S).tolist() == [False, True]
    assert batch.errors == {0: error} and not batch.read()[:3].any() and (batch.read()[3:] == 0xFFFFFFFF).all()

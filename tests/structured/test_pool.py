"""Masks of many rows: equal to one at a time, late rows wait alone, a failed row fails alone."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest

from jaxserve.structured import Grammar, GrammarCompiler, MaskPool, Matcher, MatcherError
from jaxserve.structured_params import StructuredOutputsParams
from tests.structured.schemas import REALISTIC
from tests.structured.walks import read_bits

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

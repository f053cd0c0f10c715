"""The masks of a verify step: real grammars, and rows that jump, end, fail, are late or have no grammar."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from jaxserve.core.runtime.plan_codec import MaskDecoder, MaskEncoder
from jaxserve.core.scheduler import ChunkWork, StepPlan
from jaxserve.core.scheduler.sequence import Sequence as Row
from jaxserve.engine.grammars import GrammarRows, StepMasks
from jaxserve.features.grammars import Grammar, GrammarCompiler, Matcher, MatcherError
from jaxserve.presets import demo_model_dir
from jaxserve.request import FinishReason, Request
from jaxserve.sampling_params import SamplingParams
from jaxserve.structured_params import StructuredOutputsParams
from jaxserve.tokenizers import load_tokenizer
from tests.features.grammars.walks import read_bits

WAIT_S, NO_DRAFT, PROMPT = 30.0, -4, (5, 6, 7)


@pytest.fixture(scope="module")
def compiler() -> Iterator[GrammarCompiler]:
    made = GrammarCompiler(load_tokenizer(demo_model_dir()))
    yield made
    made.close()


@pytest.fixture
def letters(compiler: GrammarCompiler) -> Grammar:
    return compiler.compile(StructuredOutputsParams(regex="[ab]{1,4}(x|yes|no)"))


def spell(grammar: Grammar, text: str) -> list[int]:
    """Returns one token per character."""
    return [grammar.vocabulary.tokens.index(character.encode()) for character in text]


def make_row(grammar: Any, drafts: Sequence[int] = (), automaton: Any = None, **params: Any) -> Row:
    request = Request("a", PROMPT, SamplingParams(max_tokens=50, **params), grammar=grammar, automaton=automaton)
    row = Row(request, None, len(PROMPT) + 50)  # type: ignore[arg-type]
    row.drafts = drafts
    return row


def make_step(rows: list[Row | None], width: int, chunks: int = 0) -> tuple[StepPlan, Any]:
    """Returns a plan and the batch; the last `chunks` rows are chunks that do not sample."""
    count = len(rows) - chunks
    works = [ChunkWork(row, row, 0, PROMPT, is_last=False) for row in range(count, len(rows))]
    decoding = tuple(range(count))
    plan = StepPlan(0, decoding, decoding, tuple(works), (), (), width=width, num_drafts=width - 1)
    return plan, SimpleNamespace(by_ticket={ticket: row for ticket, row in enumerate(rows) if row is not None})


def make_masks(
    rows: list[Row | None], width: int, vocab_size: int, timeout: float | None = WAIT_S, chunks: int = 0
) -> tuple[np.ndarray, StepMasks, GrammarRows]:
    """Returns the masks [S, w, words], and what else the step learns."""
    grammars = GrammarRows(vocab_size, timeout)
    grammars.add([row for row in rows if row is not None])
    plan, batch = make_step(rows, width, chunks)
    found = grammars.make_masks(plan, batch)
    assert found.mask.shape == (len(rows) * width, -(-vocab_size // 32)) and found.mask.dtype == np.uint32
    return found.mask.reshape(len(rows), width, -1), found, grammars


def expect_lines(matcher: Matcher, token_ids: Sequence[int], width: int, words: int) -> np.ndarray:
    """Returns the masks at the matcher and after each of `token_ids`, accepted one at a time; then 0."""
    lines, matcher = np.zeros((width, words), np.uint32), matcher.copy()
    matcher.fill_mask(lines[0])
    for index, token_id in enumerate(token_ids, 1):
        matcher.accept(token_id)
        matcher.fill_mask(lines[index])
    return lines


def test_lines_of_every_kind_of_row(compiler: GrammarCompiler, letters: Grammar) -> None:
    a, b, x = spell(letters, "abx")
    on_device = make_row(letters, [a], automaton=object())
    good, cut = make_row(letters, [a, b, a]), make_row(letters, [a, NO_DRAFT, a])
    illegal, none = make_row(letters, [a, b, 3]), make_row(letters, [])
    complete, long = make_row(letters, [a, x, a]), make_row(letters, [a, b, a, b, a])
    rows = [good, None, cut, illegal, none, complete, long, make_row(None, [a]), on_device]
    masks, found, grammars = make_masks(rows, 4, compiler.vocab_size)
    assert not found.late and not found.failed and not found.jumps
    start, words = letters.new_matcher(), masks.shape[2]
    for index, taken in [(0, [a, b, a]), (2, [a]), (3, [a, b]), (4, []), (5, [a]), (6, [a, b, a])]:
        np.testing.assert_array_equal(masks[index], expect_lines(start, taken, 4, words))
    for index in (1, 7, 8):
        assert (masks[index] == 0xFFFFFFFF).all()
    assert grammars.accept(good, [a, b, x, a]) == (3, FinishReason.STOP, None), "the matcher stood where it was"
    assert grammars.accept(cut, [a, 3])[0] == 2 and isinstance(grammars.accept(none, [3])[2], Exception)


def test_width_one_and_chunks_are_as_before(compiler: GrammarCompiler, letters: Grammar) -> None:
    (a,) = spell(letters, "a")
    masks, _, _ = make_masks([make_row(letters, [a, a]), make_row(letters, [a])], 1, compiler.vocab_size, chunks=1)
    np.testing.assert_array_equal(masks[0], expect_lines(letters.new_matcher(), [], 1, masks.shape[2]))
    assert (masks[1] == 0xFFFFFFFF).all(), "a chunk that does not sample"


def test_a_row_that_jumps_has_no_lines(compiler: GrammarCompiler, letters: Grammar) -> None:
    forced = compiler.compile(StructuredOutputsParams(regex="hello world, the cat sat"))
    (a,) = spell(letters, "a")
    tokens = forced.new_matcher().forced_tokens()
    jumping, other = make_row(forced, tokens[:2]), make_row(letters, [a, a])
    masks, found, _ = make_masks([jumping, other], 3, compiler.vocab_size)
    assert found.jumps == [(jumping, tokens)] and not found.late
    assert not masks[0].any() and masks[1].any(axis=1).all()
    counted = make_row(forced, tokens[:2], logprobs=1)  # which does not jump
    masks, found, _ = make_masks([counted], 3, compiler.vocab_size)
    assert not found.jumps and masks[0].any(axis=1).all()


class Slow:
    """A grammar with one matcher that stops in front of a line until the test says so, or fails there."""

    def __init__(self, grammar: Grammar, line: int, error: Exception | None = None) -> None:
        self._matcher, self._line, self._error = grammar.new_matcher(), line, error
        self.go, self.version, self.mask_job = threading.Event(), 0, None
        self.is_finished = False

    def new_matcher(self) -> Slow:
        return self

    def accept(self, token_id: int) -> None:
        self._matcher.accept(token_id)
        self.version = self._matcher.version

    def forced_tokens(self) -> list[int]:
        return []

    def fill_mask(self, row: np.ndarray) -> None:
        self._stop(0)
        self._matcher.fill_mask(row)

    def fill_along(self, drafts: Sequence[int], lines: np.ndarray, version: int, go_on: Callable[[int], bool]) -> None:
        def count(count: int) -> bool:
            goes = go_on(count)
            self._stop(count)
            return goes and go_on(count)

        self._matcher.fill_along(drafts, lines, version, count)

    def _stop(self, line: int) -> None:
        if line == self._line:
            if self._error is not None:
                raise self._error
            assert self.go.wait(WAIT_S)


@pytest.mark.parametrize("line", [0, 2, 3])
def test_late_lines(compiler: GrammarCompiler, letters: Grammar, line: int) -> None:
    a, b = spell(letters, "ab")
    slow = Slow(letters, line)
    late, other = make_row(slow, [a, b, a]), make_row(letters, [a, b, a])
    masks, found, grammars = make_masks([late, other], 4, compiler.vocab_size, timeout=0.2)
    sent = masks.copy()
    expected = expect_lines(letters.new_matcher(), [a, b, a], 4, masks.shape[2])
    np.testing.assert_array_equal(masks[1], expected)
    np.testing.assert_array_equal(masks[0, :line], expected[:line])
    assert not masks[0, line:].any()
    assert found.late == ([late] if line == 0 else [])
    slow.go.set()
    if line == 0:  # the next step has what this one began
        again = grammars.make_masks(*make_step([late, other], 4))
        np.testing.assert_array_equal(again.mask.reshape(2, 4, -1), [expected, expected])
    assert grammars.accept(late, [a, b]) == (2, None, None), "which waits for the walk"
    np.testing.assert_array_equal(masks, sent, "nothing is written to what was sent")
    late.drafts = other.drafts = [b]
    after = grammars.make_masks(*make_step([late], 2)).mask
    assert (after == expect_lines(letters.new_matcher(), [a, b, b], 4, masks.shape[2])[2:]).all()


def test_without_a_timeout_every_line_is_waited_for(compiler: GrammarCompiler, letters: Grammar) -> None:
    (a,) = spell(letters, "a")
    slow = Slow(letters, 2)
    threading.Timer(0.2, slow.go.set).start()
    masks, found, _ = make_masks([make_row(slow, [a, a, a])], 4, compiler.vocab_size, timeout=None)
    assert masks[0].any(axis=1).all() and not found.late


@pytest.mark.parametrize("line", [0, 2])
def test_errors(compiler: GrammarCompiler, letters: Grammar, line: int) -> None:
    (a,) = spell(letters, "a")
    failing = make_row(Slow(letters, line, MatcherError("a limit was met")), [a, a, a])
    masks, found, _ = make_masks([failing, make_row(letters, [a, a, a])], 4, compiler.vocab_size)
    assert [row for row, _ in found.failed] == ([failing] if line == 0 else [])
    assert masks[0].any(axis=1).tolist() == [True] * line + [False] * (4 - line)
    assert masks[1].any(axis=1).all() and not found.late


def draw_drafts(matcher: Matcher, rng: np.random.Generator, lines: np.ndarray) -> list[int]:
    """Returns tokens that may follow each other and do not end the line; writes the masks in front of each."""
    there, drafts = matcher.copy(), []
    for line in lines:
        there.fill_mask(line)
        drafts.append(int(rng.choice([each for each in read_bits(line) if b"\n" not in there.vocabulary.tokens[each]])))
        there.accept(drafts[-1])
    return drafts


def test_steps_that_do_not_wait(compiler: GrammarCompiler) -> None:
    """Walks of one step meet the commit and the masks of the next: each line is complete or 0."""
    rng, width, words = np.random.default_rng(0), 5, -(-compiler.vocab_size // 32)
    grammar = compiler.compile(StructuredOutputsParams(regex=r"([a-z]{1,9}(-[0-9]{1,3}|, ))*\n"))
    rows = [make_row(grammar, logprobs=1) for _ in range(6)]
    plain = [grammar.new_matcher() for _ in rows]
    grammars, counts = GrammarRows(compiler.vocab_size, None), []
    grammars.add(rows)
    for step in range(150):
        grammars._mask_timeout = float(rng.uniform(0, 2e-4)) if step % 10 else None
        expected = np.zeros((len(rows), width, words), np.uint32)
        for index, row in enumerate(rows):
            row.drafts = draw_drafts(plain[index], rng, expected[index])
        found = grammars.make_masks(*make_step([*rows], width))
        assert not found.failed and not found.jumps
        masks = found.mask.reshape(expected.shape)
        counts.append(masks.any(axis=2).sum(axis=1))
        for index, row in enumerate(rows):
            count = int(counts[-1][index])
            np.testing.assert_array_equal(masks[index, :count], expected[index, :count])
            assert not masks[index, count:].any() and (row in found.late) == (count == 0)
            run = row.drafts[: int(rng.integers(1, count + 1)) if count else 0]
            assert grammars.accept(row, run) == (len(run), None, None)
            for token_id in run:
                plain[index].accept(token_id)
    for before, count in zip(counts[9::10], counts[10::10], strict=False):  # of steps that wait
        assert (count[before > 0] == width).all(), "only a row that was late borrows lines, which fit other drafts"


def test_masks_of_many_lines_are_recorded_and_replayed(compiler: GrammarCompiler, letters: Grammar) -> None:
    (a,) = spell(letters, "a")
    masks, found, _ = make_masks([make_row(letters, [a, a]), make_row(None)], 3, compiler.vocab_size)
    written = MaskEncoder().encode(found.mask)
    assert len(written["slots"]) == 6
    np.testing.assert_array_equal(MaskDecoder(masks.shape[2]).decode(written), found.mask)

"""Answers in blocks: each lies in one piece in the ring, and the device is told all it needs to know of a token."""

from __future__ import annotations

import jax
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.features.speculation import AnswerQueue, CorpusShape, answer_block_specs, measure_block, unpack_block
from jaxserve.features.speculation.corpus import SEPARATOR, WAYS
from tests.examples import scale_examples
from tests.features.speculation.cases import pack_all

SALTS = np.array([[0, 0], [5, 2**32 - 1]], np.uint32)


class Ring:
    """A ring as blocks leave it, and the answers that it should have."""

    def __init__(self, shape: CorpusShape) -> None:
        self.shape = shape
        self.tokens = np.full(shape.num_tokens, SEPARATOR)
        self.answers: list[tuple[int, list[int]]] = []  # position of the first token, and the tokens
        self.position, self.oldest = 0, 0
        self._num_seen = 0

    def write(self, line: np.ndarray) -> None:
        assert line.shape == (measure_block(answer_block_specs(self.shape)),) and line.dtype == np.int32
        block = jax.tree.map(np.asarray, unpack_block(line, answer_block_specs(self.shape)))
        tokens, depth = block.tokens, self.shape.levels[-1]
        assert 0 <= block.first <= self.shape.num_tokens - len(block.ways)
        for index in np.flatnonzero(block.ways >= 0):
            assert self.position <= block.position + index, "positions only grow"
            self.position = int(block.position) + int(index) + 1
            assert (self.position - 1) % self.shape.num_tokens == block.first + index
            self.tokens[block.first + index] = tokens[depth + index]
            number = self._num_seen // 2  # of the answer whose separators come before and behind it
            assert block.ways[index] == number % WAYS
            np.testing.assert_array_equal(block.salts[:, index], SALTS[number % 2])
            begin, answer = self.answers[number]
            place = self.position - 1 - begin
            self._num_seen += place in (-1, len(answer))
            if 0 <= place < len(answer) - 1:
                reach = min(place + 1, depth)
                assert block.reaches[index] == place + 1
                before = tokens[depth + index + 1 - reach : depth + index + 1]
                assert before.tolist() == answer[place + 1 - reach : place + 1]
            else:
                assert block.reaches[index] == 0, "nothing follows"
        self.oldest = int(block.oldest)

    def add(self, queue: AnswerQueue, tokens: list[int]) -> None:
        ring, begin = self.shape.num_tokens, 0
        if self.answers:
            begin = self.answers[-1][0] + len(self.answers[-1][1]) + 1
        queue.add(tokens, SALTS[len(self.answers) % 2])
        if kept := tokens[-(ring - 2) :]:
            begin += -begin % ring if -begin % ring < len(kept) + 2 else 0
            self.answers.append((begin + 1, kept))


@settings(max_examples=scale_examples(40), deadline=None)
@given(
    ring=st.one_of(st.integers(64, 200), st.integers(500, 1600)),
    most=st.integers(1, 12),
    depth=st.sampled_from([2, 8, 24, 64]),
    answers=st.lists(
        st.tuples(st.one_of(st.integers(0, 5), st.integers(0, 700)), st.booleans()), min_size=1, max_size=20
    ),
)
def test_each_answer_lies_in_one_piece(ring: int, most: int, depth: int, answers: list[tuple[int, bool]]) -> None:
    shape = CorpusShape(ring, most, depth)
    queue, written, tokens = AnswerQueue(shape), Ring(shape), iter(range(10**6))
    for count, waits in [*answers, (1, False)]:
        written.add(queue, [next(tokens) for _ in range(count)])
        while queue.fills_block or not (waits or queue.is_empty):
            written.write(queue.take_block())
    assert queue.is_empty
    last = written.answers[-most:]
    assert written.oldest == max(written.position - ring, last[0][0] - 1 if len(last) == most else 0, 0)
    for begin, answer in last:
        slot = begin % ring
        if begin - 1 >= written.position - ring:
            assert written.tokens[slot - 1 : slot + len(answer) + 1].tolist() == [SEPARATOR, *answer, SEPARATOR]


def test_short_answers_share_a_block() -> None:
    queue = AnswerQueue(CorpusShape(65536, 100, 24))
    for _ in range(12):
        queue.add([1] * 40, SALTS[0])
    assert not queue.fills_block and len(pack_all(queue)) == 1
    for _ in range(13):
        queue.add([1] * 40, SALTS[0])
    assert queue.fills_block
    queue.take_block()
    assert not queue.fills_block and not queue.is_empty
    assert len(pack_all(queue)) == 1


def test_a_block_of_nothing_writes_nothing() -> None:
    shape = CorpusShape(1000, 100, 24)
    queue = AnswerQueue(shape, position=990)
    block = unpack_block(queue.take_block(), answer_block_specs(shape))
    assert (np.asarray(block.ways) < 0).all() and not np.asarray(block.reaches).any() and block.shift == 0


def test_positions_move_down_with_what_waits() -> None:
    shape = CorpusShape(100, 3, 8)
    queue = AnswerQueue(shape, max_position=1000, position=980)
    queue.add([1, 2, 3], SALTS[0])
    first = unpack_block(queue.take_block(), answer_block_specs(shape))
    queue.add([4] * 10, SALTS[0])
    queue.add([5] * 10, SALTS[0])  # at 1000, where the ring begins
    second, third = (unpack_block(line, answer_block_specs(shape)) for line in pack_all(queue))
    assert (first.shift, second.shift, third.shift) == (0, 900, 0)
    written = [block.position + np.flatnonzero(block.ways >= 0)[0] for block in (first, second, third)]
    assert written == [980, 985 - 900, 1000 - 900]

"""Finished answers on their way to the corpus: they wait on the host, which packs them into blocks.

A program writes a block. Its call costs more than what it does, so short answers share one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np
from jaxtyping import Int32, UInt32

from jaxserve.features.speculation.blocks import pack_block
from jaxserve.features.speculation.corpus import SEPARATOR, WAYS, AnswerBlock, CorpusShape

MAX_POSITION = 2**30  # from which on positions move down
_TOKENS, _REACHES, _WAYS, _SALTS = range(4)  # lines of what waits: int32 [5, n]


class AnswerQueue:
    """Answers that wait to be written. It decides where each lies: there is one for a corpus, from its first answer on.

    Args:
        shape: of the corpus.
        max_position: where positions move down.
        position: of the first token.
    """

    def __init__(self, shape: CorpusShape, *, max_position: int = MAX_POSITION, position: int = 0) -> None:
        self._shape, self._max_position = shape, max_position
        self._position, self._number = position, 0  # of the next answer
        self._begins: deque[int] = deque(maxlen=shape.num_answers)  # of the last answers
        self._waiting: deque[tuple[int, np.ndarray]] = deque()  # position of the first token, and the lines
        self._num_waiting = 0  # tokens
        self._before = np.full(shape.levels[-1], SEPARATOR, np.int32)  # the last tokens that left
        self._shift = 0  # that no block has told yet

    @property
    def is_empty(self) -> bool:
        return not self._waiting

    @property
    def fills_block(self) -> bool:
        return self._num_waiting >= self._shape.block_size

    def add(self, token_ids: Sequence[int], salt: UInt32[np.ndarray, " 2"]) -> None:
        """Adds an answer; of one longer than the ring, its last N - 2 tokens. An empty one changes nothing.

        The tokens just before an answer belong to its context: with some of them, the answer's first tokens are found,
        too, when the same prompt comes again.

        Args:
            token_ids: its tokens.
            salt: of its row.
        """
        ring = self._shape.num_tokens
        token_ids = token_ids[max(0, len(token_ids) - (ring - 2)) :]
        if not token_ids:
            return
        size = len(token_ids) + 2
        lines = np.zeros((5, size), np.int32)
        lines[_TOKENS] = SEPARATOR, *token_ids, SEPARATOR
        lines[_REACHES, 1:-2] = np.arange(1, size - 2)
        lines[_WAYS] = self._number % WAYS
        lines[_SALTS:] = salt.view(np.int32)[:, None]
        rest = -self._position % ring
        begin = self._position + (rest if rest < size else 0)  # at slot 0 if it would not fit before the ring's end
        self._waiting.append((begin, lines))
        self._begins.append(begin)
        self._position, self._number = begin + size, self._number + 1
        self._num_waiting += size
        if self._position >= self._max_position:
            self._move_down((self._position // ring - 1) * ring)  # what lies in the ring stays above zero

    def take_block(self) -> Int32[np.ndarray, " E"]:
        """Returns the next tokens, as many as fit in a packed block; one of none if nothing waits."""
        size, depth = self._shape.block_size, len(self._before)
        position = self._waiting[0][0] if self._waiting else self._position
        slot = position % self._shape.num_tokens
        first = min(slot, self._shape.num_tokens - size)
        begin = slot - first  # in the block
        taken = self._take_lines(position, size - begin)
        end = begin + taken.shape[1]
        lines = np.zeros((5, size), np.int32)
        lines[_WAYS] = -1
        lines[:, begin:end] = taken
        tokens = np.zeros(depth + size, np.int32)
        tokens[begin : depth + end] = np.concatenate([self._before, taken[_TOKENS]])
        self._before = tokens[end : depth + end].copy()
        oldest, shift = self._find_oldest(position + end - begin), self._shift
        self._shift = 0
        header = np.array([first, position - begin, oldest, shift], np.int32)
        return pack_block(AnswerBlock(*header, tokens, lines[_REACHES], lines[_WAYS], lines[_SALTS:].view(np.uint32)))

    def _take_lines(self, position: int, room: int) -> Int32[np.ndarray, "5 n"]:
        """Takes what waits from `position` on, without a gap and at most `room` tokens."""
        taken = [np.zeros((5, 0), np.int32)]
        while room and self._waiting and self._waiting[0][0] == position:
            _, lines = self._waiting.popleft()
            taken.append(lines[:, :room])
            size = taken[-1].shape[1]
            position, room = position + size, room - size
            if size < lines.shape[1]:
                self._waiting.appendleft((position, lines[:, size:]))
            self._num_waiting -= size
        return np.concatenate(taken, axis=1)

    def _find_oldest(self, num_written: int) -> int:
        first = self._begins[0] if len(self._begins) == self._shape.num_answers else 0
        return max(first, num_written - self._shape.num_tokens, 0)

    def _move_down(self, shift: int) -> None:
        self._position -= shift
        self._begins = deque([max(0, begin - shift) for begin in self._begins], self._shape.num_answers)
        self._waiting = deque([(position - shift, lines) for position, lines in self._waiting])
        self._shift += shift

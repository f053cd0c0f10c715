"""Lookup drafters with one compiled function each."""

from __future__ import annotations

from functools import cached_property

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.features.speculation import AnswerQueue, LookupState, Span, make_lookup_drafter, pack_rows
from jaxserve.speculative_config import SpeculativeConfig

R, L = 4, 24  # rows, the last of which is padding


class Table:
    """A drafter and its state, as a step uses them: every function is compiled once and takes the state for good."""

    def __init__(self, config: SpeculativeConfig, num_rows: int = R, max_len: int = L) -> None:
        self.drafter = make_lookup_drafter(config)
        self.specs = self.drafter.state_specs(num_rows, max_len)
        self._write_rows = jax.jit(self.drafter.write_rows, donate_argnums=0)
        self._append = jax.jit(self.drafter.append, donate_argnums=0)
        self._write_answers = jax.jit(self.drafter.write_answers, donate_argnums=0)
        self._propose = jax.jit(self.drafter.propose)
        self.clear()

    def make_empty(self) -> LookupState:
        return jax.tree.map(lambda spec: jnp.zeros(spec.shape, spec.dtype), self.specs)

    @cached_property
    def max_len(self) -> int:
        return self.specs.history.shape[1]

    def clear(self) -> None:
        """Nothing is remembered, and the rows have stale tokens."""
        self.state = self.make_empty()
        shape = self.drafter.corpus_shape
        self.answers = None if shape is None else AnswerQueue(shape)
        self.salts = np.zeros((self.specs.history.shape[0], 2), np.uint32)
        stale = np.random.default_rng(0).integers(0, 3, self.specs.history.shape)
        self.state = self.state.replace(history=jnp.asarray(stale, jnp.int32))

    def set_row(self, row: int, tokens: list[int], salt: tuple[int, int] = (0, 0), *, start: int = 0) -> None:
        self.salts[row] = salt
        self.write([(row, start, tokens)])

    def write(self, spans: list[Span]) -> None:
        for block in pack_rows(spans, self.salts):
            self.state = self._write_rows(self.state, block)

    def append(self, row_ids: list[int], positions: list[int], ids: list[list[int]], counts: list[int]) -> None:
        columns = [np.array(each, np.int32) for each in (row_ids, positions, ids, counts)]
        self.state = self._append(self.state, *columns)

    def remember(self, token_ids: list[int], salt: tuple[int, int] = (0, 0)) -> None:
        for block in self.pack(token_ids, salt):
            self.state = self.state.replace(corpus=self._write_answers(self.state.corpus, block))

    def pack(self, token_ids: list[int], salt: tuple[int, int]) -> list[np.ndarray]:
        """Returns the blocks of an answer."""
        assert self.answers is not None
        self.answers.add(token_ids, np.array(salt, np.uint32))
        return pack_all(self.answers)

    def propose(self, row_ids: list[int], lengths: list[int]) -> list[list[int]]:
        return np.asarray(self._propose(self.state, np.array(row_ids, np.int32), np.array(lengths, np.int32))).tolist()

    def history(self) -> np.ndarray:
        return np.array(self.state.history)


def pack_all(answers: AnswerQueue) -> list[np.ndarray]:
    """Returns the blocks of all that waits."""
    blocks = []
    while not answers.is_empty:
        blocks.append(answers.take_block())
    return blocks

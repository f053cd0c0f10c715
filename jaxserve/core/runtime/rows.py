"""The host's numpy mirror of the rows' sampling parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from jaxserve.core.scheduler.step_plan import NewRow
from jaxserve.logits_processor import MAX_ARGUMENTS


@dataclass(frozen=True, slots=True)
class Column:
    """A sampling parameter as a column of the rows: 32 bits for each row, in an int32 array."""

    name: str  # that of a field of `SamplingInputs`, if the drawing functions read it
    dtype: type[np.int32 | np.uint32 | np.float32]
    read: Callable[[NewRow], float]


def _read_extra(index: int) -> Callable[[NewRow], float]:
    """Returns the reader of an argument of the engine's logits processor, in the order of its declaration."""

    def read(row: NewRow) -> float:
        values = tuple((row.params.extra_args or {}).values())
        return values[index] if index < len(values) else 0.0

    return read


EXTRA_FIELDS = tuple(f"extra_{index}" for index in range(MAX_ARGUMENTS))
COLUMNS = (
    Column("seed_low", np.uint32, lambda row: row.seed & 0xFFFFFFFF),
    Column("seed_high", np.uint32, lambda row: (row.seed >> 32) & 0xFFFFFFFF),
    Column("sequence_index", np.int32, lambda row: row.sequence_index),
    Column("top_k", np.int32, lambda row: max(row.params.top_k, 0)),
    Column("has_edits", np.int32, lambda row: row.history is not None),
    Column("has_extra", np.int32, lambda row: row.params.extra_args is not None),
    Column("max_num_tokens", np.int32, lambda row: row.max_num_tokens),
    Column("adapter", np.int32, lambda row: row.adapter),
    Column("rope_delta", np.int32, lambda row: row.rope_delta),
    Column("temperature", np.float32, lambda row: row.params.temperature),
    Column("top_p", np.float32, lambda row: row.params.top_p),
    Column("min_p", np.float32, lambda row: row.params.min_p),
    Column("presence", np.float32, lambda row: row.params.presence_penalty),
    Column("frequency", np.float32, lambda row: row.params.frequency_penalty),
    Column("repetition", np.float32, lambda row: row.params.repetition_penalty),
    *(Column(name, np.float32, _read_extra(index)) for index, name in enumerate(EXTRA_FIELDS)),
)
SAMPLING_FIELDS = tuple(column.name for column in COLUMNS)
FLOAT_FIELDS = tuple(column.name for column in COLUMNS if column.dtype is np.float32)
NUM_SAMPLING_FIELDS = len(COLUMNS)


class SampleVariant(IntEnum):
    """The sample programs. Each includes those before it; a step runs the least that serves all its rows."""

    GREEDY = 0
    RANDOM = 1  # temperature and the filters
    FULL = 2  # everything that changes logits
    MASKED = 3  # and a mask of tokens per row, sent for this step


def list_variants(*, deterministic: bool) -> dict[SampleVariant, SampleVariant]:
    """Returns, for each variant that a step can need, the one that it runs.

    Two programs may round differently, and the rows beside decide what a step needs. So where bits count, every row
    that is drawn goes through the same program; the ids of greedy rows are equal in all.
    """
    if not deterministic:
        return {variant: variant for variant in SampleVariant}
    return dict.fromkeys(SampleVariant, SampleVariant.MASKED) | {SampleVariant.GREEDY: SampleVariant.GREEDY}


# Bits of `RowMirror._needs`.
_RANDOM, _FULL, _LOGPROBS = 1, 2, 4
_NEEDS = {SampleVariant.GREEDY: 0, SampleVariant.RANDOM: _RANDOM, SampleVariant.FULL: _FULL}


class RowMirror:
    """Sampling parameters by row: a step gathers those of its rows with one index."""

    def __init__(self, num_rows: int) -> None:
        self.sampling = np.zeros((num_rows, NUM_SAMPLING_FIELDS), np.int32)
        self._needs = np.zeros(num_rows, np.uint8)
        self._wants_prompt_logprobs = np.zeros(num_rows, bool)
        self._wants_embedding = np.zeros(num_rows, bool)

    def apply(self, new_rows: Iterable[NewRow]) -> None:
        """Records the parameters of newly admitted rows."""
        for new_row in new_rows:
            params = new_row.params
            values = [column.dtype(column.read(new_row)).view(np.int32) for column in COLUMNS]
            self.sampling[new_row.row] = values
            wants_logprobs = params.logprobs is not None
            self._needs[new_row.row] = _NEEDS[find_variant(new_row)] | (_LOGPROBS if wants_logprobs else 0)
            self._wants_prompt_logprobs[new_row.row] = params.prompt_logprobs is not None
            self._wants_embedding[new_row.row] = new_row.wants_embedding

    def find_needs(self, rows: np.ndarray) -> tuple[SampleVariant, bool]:
        """Returns the least sample program for `rows` [S], masks aside, and whether any row wants log-probabilities."""
        needs = int(np.bitwise_or.reduce(self._needs[rows]))
        drawn = SampleVariant.RANDOM if needs & _RANDOM else SampleVariant.GREEDY
        return SampleVariant.FULL if needs & _FULL else drawn, bool(needs & _LOGPROBS)

    def wants_prompt_logprobs(self, row: int) -> bool:
        """Whether the row's request asks for the log-probabilities of its prompt."""
        return bool(self._wants_prompt_logprobs[row])

    def wants_embedding(self, row: int) -> bool:
        """Whether the row's last hidden state is what its request asks for."""
        return bool(self._wants_embedding[row])


def find_variant(new_row: NewRow) -> SampleVariant:
    """Returns the least sample program that serves a row, masks aside."""
    if new_row.history is not None:
        return SampleVariant.FULL
    return SampleVariant.GREEDY if new_row.wants_embedding or new_row.params.is_greedy else SampleVariant.RANDOM

"""The host's numpy mirror of the rows' sampling parameters."""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum

import numpy as np

from jaxserve.logits_processor import MAX_ARGUMENTS
from jaxserve.scheduler.plan import NewRow

# Columns of `RowMirror.sampling`, in this order. Floats are stored as their bits, the seed as two words.
_INTEGER_FIELDS = (
    "seed_low",
    "seed_high",
    "sequence_index",
    "top_k",
    "has_edits",
    "has_extra",
    "max_num_tokens",
)
FLOAT_FIELDS = ("temperature", "top_p", "min_p", "presence", "frequency", "repetition")
EXTRA_FIELDS = tuple(f"extra_{index}" for index in range(MAX_ARGUMENTS))  # arguments of the engine's logits processor
SAMPLING_FIELDS = (*_INTEGER_FIELDS, *FLOAT_FIELDS, *EXTRA_FIELDS)
NUM_SAMPLING_FIELDS = len(SAMPLING_FIELDS)


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
            extra = list((params.extra_args or {}).values())  # in the order of the processor's declaration
            floats = np.array(
                [
                    params.temperature,
                    params.top_p,
                    params.min_p,
                    params.presence_penalty,
                    params.frequency_penalty,
                    params.repetition_penalty,
                    *extra,
                    *[0.0] * (MAX_ARGUMENTS - len(extra)),
                ],
                np.float32,
            )
            seed = np.array([new_row.seed & 0xFFFFFFFF, new_row.seed >> 32], np.uint32).view(np.int32)
            switches = new_row.history is not None, params.extra_args is not None
            integers = *seed, new_row.sequence_index, max(params.top_k, 0), *switches, new_row.max_num_tokens
            self.sampling[new_row.row] = (*integers, *floats.view(np.int32))
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
    return SampleVariant.GREEDY if new_row.params.is_greedy else SampleVariant.RANDOM

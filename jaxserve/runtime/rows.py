"""The host's numpy mirror of what rows of the persistent batch were set to."""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum

import numpy as np

from jaxserve.logits_processor import MAX_ARGUMENTS
from jaxserve.scheduler.plan import RowSet

# Columns of `RowMirror.sampling`, in this order; floats as their bits, the seed as two words.
_INTEGER_FIELDS = ("seed_low", "seed_high", "sequence_index", "top_k", "has_edits", "has_extra")
FLOAT_FIELDS = ("temperature", "top_p", "min_p", "presence", "frequency", "repetition")
EXTRA_FIELDS = tuple(f"extra_{index}" for index in range(MAX_ARGUMENTS))  # arguments of the engine's logits processor
SAMPLING_FIELDS = (*_INTEGER_FIELDS, *FLOAT_FIELDS, *EXTRA_FIELDS)
NUM_SAMPLING_FIELDS = len(SAMPLING_FIELDS)


class SampleVariant(IntEnum):
    """The sample programs, each doing what those before it do; a step takes the least that serves all its rows."""

    GREEDY = 0
    RANDOM = 1  # temperature and the filters
    FULL = 2  # everything that changes logits
    MASKED = 3  # and masks of tokens, which the host sends for this step


# Bits of `RowMirror._needs`.
_RANDOM, _FULL, _SCORES = 1, 2, 4
_NEEDS = {SampleVariant.GREEDY: 0, SampleVariant.RANDOM: _RANDOM, SampleVariant.FULL: _FULL}


class RowMirror:
    """Sampling parameters by row, so that a step gathers its rows' with one index."""

    def __init__(self, num_rows: int) -> None:
        self.sampling = np.zeros((num_rows, NUM_SAMPLING_FIELDS), np.int32)
        self._needs = np.zeros(num_rows, np.uint8)
        self._scores_prompt = np.zeros(num_rows, bool)
        self._embeds = np.zeros(num_rows, bool)

    def apply(self, row_sets: Iterable[RowSet]) -> None:
        """Records the rows that begin a new life."""
        for row_set in row_sets:
            params = row_set.params
            extra = list((params.extra_args or {}).values())  # in the order that the processor declares
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
            seed = np.array([row_set.seed & 0xFFFFFFFF, row_set.seed >> 32], np.uint32).view(np.int32)
            switches = row_set.history is not None, params.extra_args is not None
            integers = *seed, row_set.sequence_index, max(params.top_k, 0), *switches
            self.sampling[row_set.row] = (*integers, *floats.view(np.int32))
            wants_scores = params.logprobs is not None
            self._needs[row_set.row] = _NEEDS[find_variant(row_set)] | (_SCORES if wants_scores else 0)
            self._scores_prompt[row_set.row] = params.prompt_logprobs is not None
            self._embeds[row_set.row] = row_set.embeds

    def find_needs(self, rows: np.ndarray) -> tuple[SampleVariant, bool]:
        """Returns the sample program that serves these rows [S], and whether any of them wants log-probabilities."""
        needs = int(np.bitwise_or.reduce(self._needs[rows]))
        drawn = SampleVariant.RANDOM if needs & _RANDOM else SampleVariant.GREEDY
        return SampleVariant.FULL if needs & _FULL else drawn, bool(needs & _SCORES)

    def scores_prompt(self, row: int) -> bool:
        """Whether the row's prompt tokens are to be scored."""
        return bool(self._scores_prompt[row])

    def embeds(self, row: int) -> bool:
        """Whether the row's last hidden state is what its request asks for."""
        return bool(self._embeds[row])


def find_variant(row_set: RowSet) -> SampleVariant:
    """Returns the least program that serves a row, masks aside."""
    if row_set.history is not None:
        return SampleVariant.FULL
    return SampleVariant.GREEDY if row_set.params.is_greedy else SampleVariant.RANDOM

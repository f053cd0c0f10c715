"""The host's numpy mirror of what rows of the persistent batch were set to."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from jaxserve.scheduler.plan import RowSet

# Columns of `RowMirror.sampling`, in this order; floats as their bits, the seed as two words.
SAMPLING_FIELDS = ("seed_low", "seed_high", "sequence_index", "temperature", "top_k", "top_p", "min_p")
NUM_SAMPLING_FIELDS = len(SAMPLING_FIELDS)


class RowMirror:
    """Sampling parameters by row, so that a step gathers its rows' with one index."""

    def __init__(self, num_rows: int) -> None:
        self.sampling = np.zeros((num_rows, NUM_SAMPLING_FIELDS), np.int32)
        self._is_greedy = np.ones(num_rows, bool)

    def apply(self, row_sets: Iterable[RowSet]) -> None:
        """Records the rows that begin a new life."""
        for row_set in row_sets:
            params = row_set.params
            floats = np.array([params.temperature, params.top_p, params.min_p], np.float32).view(np.int32)
            seed = np.array([row_set.seed & 0xFFFFFFFF, row_set.seed >> 32], np.uint32).view(np.int32)
            top_k = max(params.top_k, 0)
            self.sampling[row_set.row] = (*seed, row_set.sequence_index, floats[0], top_k, floats[1], floats[2])
            self._is_greedy[row_set.row] = params.is_greedy

    def all_greedy(self, rows: np.ndarray) -> bool:
        """Whether the plain sample program serves these rows [S]."""
        return bool(self._is_greedy[rows].all())

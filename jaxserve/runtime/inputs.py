"""A step's inputs: one int32 array, packed by the host and unpacked at static offsets in the program.

One array, because each transfer and each argument of a dispatch costs the host tens of microseconds. Floats travel as
their bits. The array is allocated afresh for every step: on CPU the device may read the very buffer that numpy wrote.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from jaxserve.pages.manager import CHUNK_EDGE
from jaxserve.runtime.buckets import Bucket
from jaxserve.runtime.rows import NUM_SAMPLING_FIELDS, RowMirror
from jaxserve.scheduler.plan import StepPlan

KEEP = -1  # in `starts`: the row goes on where it is
ON_DEVICE = -1  # in `token_ids`: the token that the row sampled last


@dataclass(frozen=True, slots=True)
class StateShape:
    """Sizes of the persistent state; `rows` counts the padding row, the last one."""

    groups: int  # G
    rows: int  # R, the padding row included
    pages_per_row: int  # M
    max_page_updates: int  # U, page-table entries that one step can set

    @property
    def padding_row(self) -> int:
        return self.rows - 1


class StepInputs(NamedTuple):
    """The unpacked views. Rows beyond the plan's are the padding row, with no tokens."""

    row_ids: Any  # [S]
    starts: Any  # [S] number of computed tokens to set, or KEEP
    samples: Any  # [S] 1 where the row's last token is sampled from
    query_start_loc: Any  # [S + 1]
    distribution: Any  # [3] cumulative ends of one-token, chunk and mixed rows
    token_ids: Any  # [T]
    page_entries: Any  # [U] flat indices into the page tables [G, R, M]
    page_ids: Any  # [U]
    sampling: Any  # [S, NUM_SAMPLING_FIELDS] bits, see rows.py


class InputLayout:
    """Where each field of a bucket's `StepInputs` lies in the packed array."""

    def __init__(self, bucket: Bucket, state: StateShape) -> None:
        rows, tokens, updates = bucket.rows, bucket.tokens, state.max_page_updates
        sizes = StepInputs(
            row_ids=rows,
            starts=rows,
            samples=rows,
            query_start_loc=rows + 1,
            distribution=3,
            token_ids=tokens,
            page_entries=updates,
            page_ids=updates,
            sampling=rows * NUM_SAMPLING_FIELDS,
        )
        self.bucket, self.state = bucket, state
        ends = np.cumsum([0, *sizes]).tolist()
        *self._flat, self._sampling = [slice(start, end) for start, end in itertools.pairwise(ends)]
        self._sampling_shape = rows, NUM_SAMPLING_FIELDS
        self.size = ends[-1]
        self._blank = np.zeros(self.size, np.int32)  # all padding
        blank = self.views(self._blank)
        blank.row_ids[:] = state.padding_row
        blank.starts[:] = KEEP
        blank.page_entries[:] = state.padding_row * state.pages_per_row

    def new(self) -> np.ndarray:
        """Returns a fresh packed array of nothing but padding."""
        return self._blank.copy()

    def views(self, packed: Any) -> StepInputs:
        """Unpacks a numpy array (as views) or a traced one."""
        return StepInputs(
            *[packed[where] for where in self._flat], packed[self._sampling].reshape(self._sampling_shape)
        )


def pack(plan: StepPlan, layout: InputLayout, mirror: RowMirror) -> tuple[np.ndarray, np.ndarray]:
    """Returns the packed inputs of a plan, and the rows that it works on [num_rows].

    The mirror knows the rows' sampling parameters already.
    """
    packed = layout.new()
    views, state = layout.views(packed), layout.state
    num_decodes, num_rows = len(plan.decode_rows), plan.num_rows
    row_ids = views.row_ids
    row_ids[:num_decodes] = plan.decode_rows
    views.samples[:num_decodes] = 1
    views.token_ids[:num_decodes] = ON_DEVICE
    ends = views.query_start_loc[1:]
    ends[:num_decodes] = _count_up(num_decodes)
    if plan.chunks:
        _pack_chunks(plan, views)
    ends[num_rows:] = ends[num_rows - 1]
    # The scheduler begins chunks on an edge, but for tokens that are computed again.
    on_edge = all(chunk.start % CHUNK_EDGE == 0 for chunk in plan.chunks)
    views.distribution[:] = (num_decodes, num_rows if on_edge else num_decodes, num_rows)
    if plan.page_updates:
        updates = np.array(plan.page_updates, np.int32)
        entries = (updates[:, 0] * state.rows + updates[:, 1]) * state.pages_per_row + updates[:, 2]
        views.page_entries[: len(updates)] = entries
        views.page_ids[: len(updates)] = updates[:, 3]
    row_ids = row_ids[:num_rows]
    views.sampling[:num_rows] = mirror.sampling[row_ids]
    return packed, row_ids


def _pack_chunks(plan: StepPlan, views: StepInputs) -> None:
    at = len(plan.decode_rows)
    for index, chunk in enumerate(plan.chunks, at):
        views.row_ids[index] = chunk.row
        views.starts[index] = chunk.start
        views.samples[index] = chunk.samples
        views.token_ids[at : at + len(chunk.token_ids)] = chunk.token_ids
        at += len(chunk.token_ids)
        views.query_start_loc[index + 1] = at


@functools.lru_cache(maxsize=4096)
def _count_up(count: int) -> Sequence[int]:
    return np.arange(1, count + 1, dtype=np.int32)

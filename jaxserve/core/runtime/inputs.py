"""A step's inputs: one int32 array, packed by the host and unpacked at static offsets in the program.

One array, because each transfer and each argument of a dispatch costs the host tens of microseconds. Floats travel as
their bits. An array is never written after it was sent: on CPU the device may read numpy's own buffer. Steps that
decode the same rows send the same array.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from jaxserve.core.pages.manager import CHUNK_EDGE
from jaxserve.core.runtime.buckets import Bucket
from jaxserve.core.runtime.rows import NUM_SAMPLING_FIELDS, RowMirror, SampleVariant
from jaxserve.core.scheduler.step_plan import ChunkImages, StepPlan
from jaxserve.request import FIRST_IMAGE_ROW

KEEP = -1  # in `starts`: `num_computed` stays
ON_DEVICE = -1  # in `token_ids`: the row's last sampled token, or its next draft; below: a row of images (request.py)


@dataclass(frozen=True, slots=True)
class StateShape:
    """Sizes of the persistent state. The last row is the padding row."""

    groups: int  # G
    rows: int  # R, the padding row included
    pages_per_row: int  # M
    max_page_updates: int  # U, page-table entries that one step can set
    max_drafts: int = 0  # K, of a row; 0: no step verifies any
    max_state_copies: int = 0  # C, between rows and snapshots of recurrent states; 0: there are no snapshots
    max_pending: int = 0  # tokens of a verify step that recurrent states follow behind it; 0: there are none
    has_image_positions: bool = False  # whether tokens of images have three rotary positions

    @property
    def padding_row(self) -> int:
        return self.rows - 1


class StepInputs(NamedTuple):
    """The fields of the packed array, all int32. Rows beyond the plan's are the padding row, without tokens."""

    row_ids: Any  # [S]
    starts: Any  # [S] number of computed tokens to set, or KEEP
    is_sampled: Any  # [S] 1 where a token is sampled after the last of the row
    query_start_loc: Any  # [S + 1]
    distribution: Any  # [3] cumulative ends of one-token, chunk and mixed rows
    token_ids: Any  # [T]
    continues: Any  # [S] 1 where a chunk is not the first step of its row
    page_entries: Any  # [U] flat indices into the page tables [G, R, M]
    page_ids: Any  # [U]
    copy_sources: Any  # [C] slots of recurrent states
    copy_targets: Any  # [C]
    copy_ends: Any  # [2] of the copies before the forward pass, and of all; [0] if C is 0
    copy_points: Any  # [C] tokens that the row of a copy behind the pass must have then; [0] if the host knows
    rotary_shifts: Any  # [3 * T] added to the rotary positions; [0] without images, and where no prompt is computed
    sampling: Any  # [S, NUM_SAMPLING_FIELDS] bits, see rows.py


class InputLayout:
    """Where each field of a bucket's `StepInputs` lies in the packed array."""

    def __init__(self, bucket: Bucket, state: StateShape) -> None:
        rows, tokens, updates = bucket.rows, bucket.tokens, state.max_page_updates
        sizes = StepInputs(
            row_ids=rows,
            starts=rows,
            is_sampled=rows,
            query_start_loc=rows + 1,
            distribution=3,
            token_ids=tokens,
            continues=rows,
            page_entries=updates,
            page_ids=updates,
            copy_sources=state.max_state_copies,
            copy_targets=state.max_state_copies,
            copy_ends=2 if state.max_state_copies else 0,
            copy_points=state.max_state_copies if state.max_pending else 0,
            rotary_shifts=3 * tokens if state.has_image_positions and bucket.is_mixed else 0,
            sampling=rows * NUM_SAMPLING_FIELDS,
        )
        self.bucket, self.state = bucket, state
        ends = np.cumsum([0, *sizes]).tolist()
        self._where = StepInputs(*[slice(start, end) for start, end in itertools.pairwise(ends)])
        self._sampling_shape = rows, NUM_SAMPLING_FIELDS
        self.size = ends[-1]
        self._blank = np.zeros(self.size, np.int32)  # all padding
        blank = self.views(self._blank)
        blank.row_ids[:] = state.padding_row
        blank.starts[:] = KEEP
        blank.page_entries[:] = state.padding_row * state.pages_per_row

    def new(self) -> np.ndarray:
        """Returns a new packed array [size] int32 of padding."""
        return self._blank.copy()

    def views(self, packed: Any) -> StepInputs:
        """Returns the fields of a packed array, numpy (as views) or traced."""
        *flat, sampling = [packed[where] for where in self._where]
        return StepInputs(*flat, sampling.reshape(self._sampling_shape))

    def add_pages(self, packed: np.ndarray, updates: Sequence[tuple[int, int, int, int]]) -> np.ndarray:
        """Returns a copy of a packed array that also has page-table updates: (group, row, index, page id)."""
        added, rows, length = packed.copy(), self.state.rows, self.state.pages_per_row
        entries = [(group * rows + row) * length + index for group, row, index, _ in updates]
        added[self._where.page_entries][: len(entries)] = entries
        added[self._where.page_ids][: len(entries)] = [page for *_, page in updates]
        added.flags.writeable = False
        return added

    def add_states(self, packed: np.ndarray, plan: StepPlan) -> np.ndarray:
        """Returns a copy of a packed array that also has the plan's copies of recurrent states."""
        added, first = packed.copy(), self.state.padding_row  # of the slots of snapshots
        views = self.views(added)
        copies = [(first + slot, row) for row, slot in plan.state_loads]
        copies += [(row, first + slot) for row, slot, _ in plan.state_saves]
        views.copy_sources[: len(copies)], views.copy_targets[: len(copies)] = zip(*copies, strict=True)
        views.copy_ends[:] = len(plan.state_loads), len(copies)
        if views.copy_points.size:
            views.copy_points[len(plan.state_loads) : len(copies)] = [point for *_, point in plan.state_saves]
        added.flags.writeable = False
        return added


@dataclass(frozen=True, slots=True)
class PackedStep:
    """A step's packed inputs, and the programs that its rows need after `forward`."""

    inputs: np.ndarray  # in the bucket's `InputLayout`; read-only
    variant: SampleVariant
    wants_logprobs: bool


class StepPacker:
    """Packs plans. The inputs of a decode step are kept and sent again while its rows stay the same."""

    def __init__(self, mirror: RowMirror) -> None:
        self._mirror = mirror
        self._kept: tuple[tuple[InputLayout, tuple[int, ...]], PackedStep] | None = None  # by layout and rows

    def pack(self, plan: StepPlan, layout: InputLayout) -> PackedStep:
        """Returns the packed step of a plan, after recording its new rows in the mirror."""
        if plan.new_rows:
            self._mirror.apply(plan.new_rows)
            self._kept = None
        step = _pack_rows(plan, layout, self._mirror) if plan.chunks else self._pack_decodes(plan, layout)
        inputs = layout.add_pages(step.inputs, plan.page_updates) if plan.page_updates else step.inputs
        if plan.state_loads or plan.state_saves:
            inputs = layout.add_states(inputs, plan)
        return step if inputs is step.inputs else PackedStep(inputs, step.variant, step.wants_logprobs)

    def _pack_decodes(self, plan: StepPlan, layout: InputLayout) -> PackedStep:
        key = layout, plan.decode_rows
        if self._kept is None or self._kept[0] != key:
            self._kept = key, _pack_rows(plan, layout, self._mirror)
        return self._kept[1]


def _pack_rows(plan: StepPlan, layout: InputLayout, mirror: RowMirror) -> PackedStep:
    """Packs everything but page-table updates."""
    packed = layout.new()
    views = layout.views(packed)
    num_decodes, num_rows = len(plan.decode_rows), plan.num_rows
    views.row_ids[:num_decodes] = plan.decode_rows
    views.is_sampled[:num_decodes] = 1
    width = layout.bucket.width
    views.token_ids[: num_decodes * width] = ON_DEVICE
    ends = views.query_start_loc[1:]
    ends[:num_decodes] = np.arange(width, num_decodes * width + 1, width, dtype=np.int32)
    _pack_chunks(plan, views)
    ends[num_rows:] = ends[num_rows - 1]
    # Chunks begin on an edge, except where tokens are computed again.
    on_edge = width == 1 and all(chunk.start % CHUNK_EDGE == 0 for chunk in plan.chunks)
    num_single = num_rows if layout.bucket.is_decode else num_decodes if width == 1 else 0
    views.distribution[:] = (num_single, num_rows if on_edge else num_single, num_rows)
    row_ids = views.row_ids[:num_rows]
    views.sampling[:num_rows] = mirror.sampling[row_ids]
    packed.flags.writeable = False
    return PackedStep(packed, *mirror.find_needs(row_ids))


def _pack_chunks(plan: StepPlan, views: StepInputs) -> None:
    at, new_rows = len(plan.decode_rows), {new_row.row for new_row in plan.new_rows}
    for index, chunk in enumerate(plan.chunks, at):
        views.row_ids[index] = chunk.row
        views.starts[index] = chunk.start
        views.is_sampled[index] = chunk.is_last
        views.continues[index] = chunk.row not in new_rows
        views.token_ids[at : at + len(chunk.token_ids)] = chunk.token_ids
        if chunk.images is not None:
            _pack_images(chunk.images, views, at)
        at += len(chunk.token_ids)
        views.query_start_loc[index + 1] = at


def _pack_images(images: ChunkImages, views: StepInputs, at: int) -> None:
    """Packs the images of a chunk whose first token is `at`."""
    views.token_ids[at + np.array(images.places, np.intp)] = FIRST_IMAGE_ROW - np.array(images.rows, np.int32)
    if images.shifts:
        shifts = np.array(images.shifts, np.int32).reshape(3, -1)
        views.rotary_shifts.reshape(3, -1)[:, at : at + shifts.shape[1]] = shifts

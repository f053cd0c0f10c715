"""Batches for properties of attention, and sizes for those of lists.

They have few static shapes, so that compiling does not dominate: all the rest is drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from hypothesis import strategies as st

from pallas_kernels.testing.case import Case


@st.composite
def draw_batches(draw: st.DrawFn, shapes: Sequence[Case]) -> Case:
    """A shape with rows that fit it: one-token rows, then chunks, each somewhere in a text."""
    shape = draw(st.sampled_from(shapes))
    capacity = shape.table_width * shape.spec.page_size
    num_rows = draw(st.integers(0, shape.max_rows))
    num_single = num_rows if shape.max_query_len == 1 else draw(st.integers(0, num_rows))
    left = shape.max_tokens - num_rows
    rows = []
    for row in range(num_rows):
        extra = 0 if row < num_single else draw(st.integers(0, left))
        left -= extra
        rows.append((draw(st.integers(0, capacity - 1 - extra)), 1 + extra))
    return replace(shape, rows=tuple(rows))


@st.composite
def draw_images(draw: st.DrawFn, shapes: Sequence[Case]) -> Case:
    """The same with a run of tokens in each chunk that see each other; some of them were computed before."""
    case = draw(draw_batches(shapes))
    runs = []
    for row, (computed, count) in enumerate(case.rows):
        if count > 1:
            end = draw(st.integers(computed + 2, computed + count))
            runs.append((row, draw(st.integers(0, end - 2)), end))
    return replace(case, mutual=tuple(runs))


@st.composite
def draw_sizes(draw: st.DrawFn, total: int, count: int) -> list[int]:
    """`count` sizes, zeros among them, that take all of `total` or less."""
    used = draw(st.just(total) | st.integers(0, total))
    cuts = draw(st.lists(st.integers(0, used), min_size=count - 1, max_size=count - 1))
    sizes: list[int] = np.diff([0, *sorted(cuts), used]).tolist()
    return sizes

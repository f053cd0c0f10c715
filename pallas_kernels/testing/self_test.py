"""Compares a kernel with its formula on the device that will serve with it: one small step of each kind, fast enough
for a start.

The compiler and driver of a device may differ from those that the kernels were tested with, and may break them. The
steps have the caller's own shape and buckets, so its own tuning, with few rows in use.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import numpy as np

from pallas_kernels.layout import gather_logical
from pallas_kernels.spec import AttnShape
from pallas_kernels.testing.case import LAYER, Case, Inputs, make_inputs
from pallas_kernels.testing.compare import relative_error
from pallas_kernels.testing.reference import attend_by_formula
from pallas_kernels.testing.runner import run_case

# Relative error of a head's vector: rounding to 16 bits gives up to 0.004, losing one key of n about 1 / sqrt(n).
ERROR_LIMIT = 0.02
LONGEST_WINDOW = 4096  # longest window that a row leaves: a longer one would take the host seconds
MOST_TOKENS = 2048  # largest T, for the same reason
_ARRAYS = ("q", "k", "v", "kv_pages", "page_table", "seq_lens", "query_start_loc", "distribution", "heads")


def run_self_test(
    impl: str,
    shape: AttnShape,
    *,
    num_rows: int,
    num_tokens: int,
    table_width: int,
    softcap: float | None = None,
    sinks: bool = False,
    device: jax.Device | None = None,
) -> str | None:
    """The fault of an implementation on a device, in words for users; None if it is right.

    Args:
        shape: one device's share, on pages of the implementation's layout.
        num_rows: S of the decode bucket and the mixed one.
        num_tokens: T of the mixed bucket; more than MOST_TOKENS count as that.
        table_width: M, the most pages of a row.
        sinks: heads have sinks.
        device: where to run (None: where JAX runs by default).
    """
    for case in list_cases(shape, num_rows=num_rows, num_tokens=num_tokens, table_width=table_width, softcap=softcap):
        inputs = make_inputs(replace(case, max_pages=_count_pages(case), sinks=sinks))
        placed = replace(inputs, **{name: jax.device_put(getattr(inputs, name), device) for name in _ARRAYS})
        # On a TPU first with bounds checked, so that a copy out of bounds is an error here, and then as it will serve.
        for checks_bounds in (True, False) if impl == "tpu" else (False,):
            name = f"{case.name}, bounds checked" if checks_bounds else case.name
            try:
                out, pool = map(np.asarray, run_case(case, placed, impl=impl, checks_bounds=checks_bounds))
            except Exception as error:  # whatever a compiler or a driver raises
                text = str(error).strip() or "without a word"
                return f"{name}: {type(error).__name__}: {text.splitlines()[0][:300]}"
            fault = _find_fault(case, inputs, out, pool)
            if fault is not None:
                return f"{name}: {fault}"
    return None


def list_cases(
    shape: AttnShape, *, num_rows: int, num_tokens: int, table_width: int, softcap: float | None = None
) -> list[Case]:
    """A decode batch and a mixed one, with as many rows as fit, of lengths on both sides of a page's end. With a
    window, one row of each has left it."""
    size, limit = shape.spec.page_size, table_width * shape.spec.page_size
    num_tokens = min(num_tokens, MOST_TOKENS)
    longest = 5 * size + 7
    if shape.window is not None and shape.window <= LONGEST_WINDOW:
        longest = max(longest, shape.window + size + 3)
    lengths = [min(length, limit) for length in (longest, size, size + 1, 1, 2 * size + 17)]
    decode = tuple((length - 1, 1) for length in lengths[:num_rows])
    chunks, others = _fill_mixed(size, limit, longest, num_rows, num_tokens)
    base = Case(
        "decode batch",
        decode,
        num_heads=shape.num_heads,
        spec=shape.spec,
        query_dtype=shape.dtype,
        window=shape.window,
        softcap=softcap,
        fixed_splits=shape.fixed_splits,
        causal=shape.causal,
        max_rows=num_rows,
        max_tokens=num_rows,
        table_width=table_width,
        max_query_len=1,
    )
    num_singles = min(2, num_rows - len(chunks + others), num_tokens - _count_new(chunks + others))
    singles = decode[1 : 1 + max(0, num_singles)]
    mixed = replace(
        base,
        name="mixed batch",
        rows=singles + chunks + others,
        max_tokens=num_tokens,
        max_query_len=None,
        num_chunks=len(chunks),
    )
    return [base, mixed] if mixed.rows else [base]


def _fill_mixed(
    size: int, limit: int, longest: int, num_rows: int, num_tokens: int
) -> tuple[tuple[tuple[int, int], ...], tuple[tuple[int, int], ...]]:
    """Rows of several tokens, as many as fit: rows that begin at a multiple of 32, and others."""
    chunks, others, room = [], [], num_tokens
    for computed, new, kind in (
        (64, 70, chunks),
        (max(0, min(longest, limit - 9)), 9, others),
        (0, 2 * size + 3, chunks),
    ):
        new = min(new, room, limit - computed)  # noqa: PLW2901
        if new > 1 and len(chunks) + len(others) < num_rows:
            kind.append((computed, new))
            room -= new
    return tuple(chunks), tuple(others)


def _count_new(rows: tuple[tuple[int, int], ...]) -> int:
    return sum(new for _, new in rows)


def _count_pages(case: Case) -> int:
    return sum(-(-(computed + new) // case.spec.page_size) for computed, new in case.rows)


def _find_fault(case: Case, inputs: Inputs, out: np.ndarray, pool: np.ndarray) -> str | None:
    """The first difference from the formula in the attention or the pool; None if there is none."""
    wanted, wanted_pool = attend_by_formula(case, inputs)
    if not np.isfinite(out.astype(np.float32)).all():
        return "it gave NaN or infinite values"
    error = relative_error(out, wanted, inputs.num_tokens)
    if not error <= ERROR_LIMIT:
        return f"it gave wrong values: relative error {error:.2g}, at most {ERROR_LIMIT} is right"
    table, offset, size = inputs.page_table, LAYER * inputs.num_pages, case.spec.page_size
    written = {offset}  # the null page: padding may write there
    for row, (computed, new) in enumerate(case.rows):
        pages = table[row, computed // size : -(-(computed + new) // size)]
        written |= {offset + int(page) for page in pages}
        length = computed + new - computed // size * size
        stored: list[tuple[Any, Any]] = [
            gather_logical(array, pages, length, case.spec, page_offset=offset) for array in (pool, wanted_pool)
        ]
        for mine, theirs in zip(*stored, strict=True):
            if not relative_error(mine, theirs, length) <= ERROR_LIMIT:
                return "it wrote wrong keys or values"
    changed = (pool.view(np.uint8) != wanted_pool.view(np.uint8)).any(axis=(1, 2, 3))
    if set(np.flatnonzero(changed)) - written:
        return "it changed pages that are not its own"
    return None

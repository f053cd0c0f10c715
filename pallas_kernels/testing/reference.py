"""Attention by its formula, on the host: what every implementation is compared with.

It is numpy in float64. Nothing is compiled, so a start does not wait for it, and it shares no compiler with what it
judges.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from pallas_kernels.layout import gather_logical
from pallas_kernels.testing.case import LAYER, Case, Inputs, store_rows


def attend_by_formula(case: Case, inputs: Inputs) -> tuple[np.ndarray, np.ndarray]:
    """The attention [T, N, V] f32 and the pool after one step in layer LAYER, as numpy arrays.

    Padding tokens get 0 and are written nowhere.
    """
    pool = inputs.kv_pages if case.is_stored else _write_tokens(case, inputs)
    out = np.zeros((*inputs.q.shape[:2], case.spec.out_dim), np.float32)
    for row, lens in enumerate(case.rows):
        tokens = slice(*inputs.query_start_loc[row : row + 2])
        if tokens.start < tokens.stop:
            out[tokens] = _attend_row(case, inputs, pool, row, case.count_keys(lens), tokens)
    return out, pool


def _write_tokens(case: Case, inputs: Inputs) -> np.ndarray:
    """The pool with the step's keys and values."""
    spec, heads, pool = case.spec, inputs.heads, inputs.kv_pages.copy()
    parts = [_saturate(inputs.k, spec.dtype, heads.k_scale)]
    if inputs.v is not None:
        parts.append(_saturate(inputs.v, spec.dtype, heads.v_scale))
    by_head = np.stack(parts, axis=2).reshape(len(inputs.k), -1, 1, spec.head_dim)  # [T, 2K, 1, H]
    stored = store_rows(by_head, spec)[:, :, 0]
    for row, (computed, new) in enumerate(case.rows):
        positions = computed + np.arange(new)
        pages = LAYER * inputs.num_pages + inputs.page_table[row, positions // spec.page_size]
        first = inputs.query_start_loc[row]
        pool[pages, :, positions % spec.page_size] = stored[first : first + new]
    return pool


def _saturate(values: np.ndarray, dtype: str, scale: np.ndarray | None) -> np.ndarray:
    """[T, K, H] / scale [K] as pages hold it: 8-bit floats at most their largest."""
    values = values.astype(np.float32)
    if scale is not None:
        values = values / scale[:, None]
    if jnp.dtype(dtype).itemsize == 1:
        largest = float(jnp.finfo(dtype).max)
        values = np.clip(values, -largest, largest)
    return values.astype(jnp.dtype(dtype))


def _attend_row(case: Case, inputs: Inputs, pool: np.ndarray, row: int, length: int, tokens: slice) -> np.ndarray:
    """The attention [n, N, V] of a row's n new tokens over its `length` keys."""
    spec, heads = case.spec, inputs.heads
    seen = _list_seen(case, inputs, length, tokens)
    first = int(np.argmax(seen.any(axis=0)))  # pages that have left the window may hold anything
    offset = LAYER * inputs.num_pages
    stored = gather_logical(pool, inputs.page_table[row], length, spec, page_offset=offset)
    k, v = (part[first:].astype(np.float64) for part in stored)  # [E, K, H], [E, K, V]
    scales = (heads.k_scale, heads.values_scale(spec))
    k, v = (part if scale is None else part * scale[:, None] for part, scale in zip((k, v), scales, strict=True))

    group = case.shape.group_size
    out = np.empty((seen.shape[0], case.num_heads, spec.out_dim))
    for head in range(case.num_heads):
        scores = inputs.q[tokens, head].astype(np.float64) @ k[:, head // group].T * case.params.scale  # [n, E]
        if case.softcap is not None:
            scores = case.softcap * np.tanh(scores / case.softcap)
        weights = np.where(seen[:, first:], np.exp(scores), 0)
        sink = 0 if heads.sinks is None else np.exp(heads.sinks[head])
        out[:, head] = weights @ v[:, head // group] / (weights.sum(axis=1, keepdims=True) + sink)
    return out


def _list_seen(case: Case, inputs: Inputs, length: int, tokens: slice) -> np.ndarray:
    """Which keys each of a row's n new tokens sees: [n, length] bool."""
    new, keys = tokens.stop - tokens.start, np.arange(length)
    if not case.causal and case.window is None:
        return np.ones((new, length), bool)
    positions = length - new + np.arange(new)[:, None]
    if not case.causal:
        return np.abs(keys - positions) <= case.window
    seen = keys <= (positions if inputs.last_keys is None else inputs.last_keys[tokens, None])
    if case.window is not None:
        seen &= keys > positions - case.window
    return seen

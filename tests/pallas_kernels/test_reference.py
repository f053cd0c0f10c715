"""The oracle against attention written out in numpy, one query at a time, with no pages at all."""

from __future__ import annotations

import numpy as np
import pytest

from pallas_kernels.layout import gather_logical
from pallas_kernels.testing.case import LAYER, Case, Inputs, largest_error, make_inputs
from pallas_kernels.testing.cases import CASES, MUTUAL_CASES
from pallas_kernels.testing.reference import attend_by_formula


def attend_naively(case: Case, inputs: Inputs, keys: list[np.ndarray], values: list[np.ndarray]) -> np.ndarray:
    """[T', N, V] over whole texts: `keys` holds [length, K, H] of each row, `values` [length, K, V]."""
    group_size = case.num_heads // case.spec.num_kv_heads
    out = np.zeros((inputs.num_tokens, case.num_heads, case.spec.out_dim))
    token = 0
    for row, ((computed, new), k, v) in enumerate(zip(case.rows, keys, values, strict=True)):
        for index in range(new):
            position = computed + index
            first, last = (0, position) if case.causal else (0, len(k) - 1)
            for mutual_row, begin, end in case.mutual:
                last = end - 1 if mutual_row == row and begin <= position < end else last
            if case.window is not None and case.causal:
                first = max(0, position - case.window + 1)
            elif case.window is not None:
                first, last = max(0, position - case.window), min(len(k) - 1, position + case.window)
            for head in range(case.num_heads):
                seen = np.arange(first, last + 1)
                scores = k[seen, head // group_size] @ inputs.q[token, head].astype(np.float64) * case.params.scale
                if case.softcap is not None:
                    scores = case.softcap * np.tanh(scores / case.softcap)
                weights = np.exp(scores)
                total = weights.sum() + (np.exp(inputs.heads.sinks[head]) if case.sinks else 0)
                out[token, head] = weights / total @ v[seen, head // group_size]
            token += 1
    return out


def _list_scales(case: Case, inputs: Inputs) -> tuple[np.ndarray | None, np.ndarray | None]:
    """Of keys and of values: a latent has one for both."""
    keys, values = inputs.heads.k_scale, inputs.heads.v_scale
    return keys, keys if case.spec.is_latent else values


@pytest.mark.parametrize("case", [*CASES, *MUTUAL_CASES], ids=lambda case: case.name)
def test_reference_is_attention(case: Case) -> None:
    inputs = make_inputs(case)
    out, kv_pages = attend_by_formula(case, inputs)
    keys, values = [], []
    for row, lens in enumerate(case.rows):
        length, offset = case.count_keys(lens), LAYER * inputs.num_pages
        k, v = gather_logical(kv_pages, inputs.page_table[row], length, case.spec, page_offset=offset)
        scales = [1 if s is None else s[:, None] for s in _list_scales(case, inputs)]
        keys.append(k.astype(np.float64) * scales[0])
        values.append(v.astype(np.float64) * scales[1])
    expected = attend_naively(case, inputs, keys, values)
    assert largest_error(case, out[: inputs.num_tokens], expected, inputs.num_tokens) < 1 / 2
    assert not np.any(out[inputs.num_tokens :]), "padding is 0 in the reference"

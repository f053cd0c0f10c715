"""Hopper's kernel for writing keys and values, in the interpreter, against the scatter of `layout`."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import jax
import numpy as np
import pytest

from pallas_kernels import prepare_batch
from pallas_kernels.hopper import update
from pallas_kernels.layout import update_kv_pages
from pallas_kernels.spec import AttnLayer, BatchMeta, KVSpec
from pallas_kernels.testing.case import LAYER, Case, make_inputs


def prepare(case: Case, *meta: jax.Array) -> BatchMeta:
    return prepare_batch(*meta, num_tokens=case.max_tokens, shape=case.shape, max_query_len=None, impl="xla")


@pytest.mark.parametrize("spec", [KVSpec(2, 128, 32, "bfloat16"), KVSpec(1, 96, 16, "float8_e4m3fn", "padded")])
def test_same_pool_as_scatter(spec: KVSpec, capsys: pytest.CaptureFixture[str]) -> None:
    case = Case("", ((40, 1), (0, 1), (30, 5)), 2, spec, max_rows=4, max_tokens=10)
    inputs = make_inputs(case)
    batch = jax.jit(partial(prepare, case))(*inputs.meta)
    arrays = (inputs.k, inputs.v, inputs.kv_pages)
    layer = AttnLayer(case.params, inputs.heads, LAYER * inputs.num_pages)
    wanted = np.asarray(jax.jit(update_kv_pages)(*arrays, batch, layer))
    found = np.asarray(jax.jit(update.write_tokens)(*arrays, replace(batch, interpret=True), layer))
    null_page = LAYER * inputs.num_pages
    assert not np.array_equal(wanted.view(np.uint8), inputs.kv_pages.view(np.uint8))
    others = np.arange(len(wanted)) != null_page  # where the scatter writes padding tokens
    np.testing.assert_array_equal(found[others].view(np.uint8), wanted[others].view(np.uint8))
    assert "RACE DETECTED" not in capsys.readouterr().out

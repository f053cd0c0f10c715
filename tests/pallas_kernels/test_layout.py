"""Where keys and values lie, and that writing them touches nothing else and copies nothing."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import AttnParams, KVSpec, attend_with_update, gather_logical, page_bytes, pool_shape, prepare_batch
from pallas_kernels.testing.cases import CASES, Case, make_inputs
from tests.pallas_kernels.runner import LAYER, run_case

BY_NAME = {case.name: case for case in CASES}


@pytest.mark.parametrize(("dtype", "size"), [("float32", 4), ("bfloat16", 2), ("float16", 2)])
def test_sizes(dtype: str, size: int) -> None:
    spec = KVSpec(8, 128, 64, dtype)
    assert pool_shape(spec, 100) == (100, 16, 64, 128)
    assert page_bytes(spec) == jnp.zeros(pool_shape(spec, 3), dtype).nbytes // 3 == 16 * 64 * 128 * size


@pytest.mark.parametrize(
    "case", [BY_NAME["mixed"], BY_NAME["8:4 bfloat16"], BY_NAME["decode"]], ids=lambda case: case.name
)
def test_update_writes_its_slots_and_no_other(case: Case) -> None:
    inputs = make_inputs(case)
    _, kv_pages = run_case(case, inputs)
    expected = inputs.kv_pages.copy()
    token = 0
    for row, (computed, new) in enumerate(case.rows):
        for position in range(computed, computed + new):
            page = LAYER * inputs.num_pages + inputs.page_table[row, position // case.spec.page_size]
            expected[page, 0::2, position % case.spec.page_size] = inputs.k[token]
            expected[page, 1::2, position % case.spec.page_size] = inputs.v[token]
            token += 1
    bits, expected_bits = (np.ascontiguousarray(pool).view(np.uint8) for pool in (kv_pages, expected))
    null_page = LAYER * inputs.num_pages  # takes the padding: whatever it holds is right
    np.testing.assert_array_equal(np.delete(bits, null_page, 0), np.delete(expected_bits, null_page, 0))


def test_gather_logical_reads_back_what_was_written() -> None:
    case = Case("prompts", ((0, 17), (0, 40)))
    inputs = make_inputs(case)
    _, kv_pages = run_case(case, inputs)
    offset = LAYER * inputs.num_pages
    for row, (begin, end) in enumerate(zip(inputs.query_start_loc, inputs.query_start_loc[1:3], strict=False)):
        k, v = gather_logical(kv_pages, inputs.page_table[row], end - begin, case.spec, page_offset=offset)
        np.testing.assert_array_equal(k, inputs.k[begin:end])
        np.testing.assert_array_equal(v, inputs.v[begin:end])
    with pytest.raises(ValueError, match="length 193 is more than the 192"):
        gather_logical(kv_pages, inputs.page_table[0], 193, case.spec)
    with pytest.raises(ValueError, match="do not fit KVSpec"):
        gather_logical(kv_pages, inputs.page_table[0], 1, KVSpec(1, 64, 16, "float32"))


@pytest.mark.parametrize("bounded", [True, False], ids=["bounded", "static"])
@pytest.mark.parametrize("max_query_len", [1, None], ids=["decode", "mixed"])
def test_layers_share_a_donated_pool_in_place(bounded: bool, max_query_len: int | None) -> None:
    layers, num_pages, rows, width, tokens = 4, 257, 8, 32, 32
    spec = KVSpec(2, 64, 32, "float32")

    @partial(jax.jit, donate_argnums=1)
    def step(q: jax.Array, pool: jax.Array, *meta: jax.Array) -> tuple[jax.Array, jax.Array]:
        batch = prepare_batch(*meta, num_tokens=tokens, page_size=32, max_query_len=max_query_len, bounded=bounded)
        for layer in range(layers):  # as in a model, a layer's K and V come from the answer of the one before
            k, v = q[:, :2], q[:, 2:]
            q, pool = attend_with_update(
                q, k, v, pool, batch, params=AttnParams(scale=0.125), page_offset=layer * num_pages
            )
        return q, pool

    shapes = [(tokens, 4, 64), pool_shape(spec, layers * num_pages), (rows, width), (rows,), (rows + 1,), (3,)]
    dtypes = [jnp.float32] * 2 + [jnp.int32] * 4
    compiled = step.lower(*map(jax.ShapeDtypeStruct, shapes, dtypes)).compile()
    memory = compiled.memory_analysis()
    pool_bytes = layers * num_pages * page_bytes(spec)
    assert memory.alias_size_in_bytes >= pool_bytes, "the pool was not written in place"
    assert memory.temp_size_in_bytes < pool_bytes / layers, "a layer's share of the pool was copied"

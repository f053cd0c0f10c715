"""Where keys and values lie, and that writing them touches nothing else and copies nothing."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import (
    AttnLayer,
    AttnParams,
    AttnShape,
    KVSpec,
    attend_with_update,
    gather_logical,
    page_bytes,
    pool_shape,
    prepare_batch,
)
from pallas_kernels.layout import saturate
from pallas_kernels.testing.case import LAYER, Case, make_inputs
from pallas_kernels.testing.cases import CASES
from pallas_kernels.testing.runner import run_case
from tests.pallas_kernels.platforms import trace_for_platform

BY_NAME = {case.name: case for case in CASES}


@pytest.mark.parametrize(("dtype", "size"), [("float32", 4), ("bfloat16", 2), ("float16", 2)])
def test_sizes(dtype: str, size: int) -> None:
    spec = KVSpec(8, 128, 64, dtype)
    assert pool_shape(spec, 100) == (100, 16, 64, 128)
    assert page_bytes(spec) == jnp.zeros(pool_shape(spec, 3), dtype).nbytes // 3 == 16 * 64 * 128 * size


@pytest.mark.parametrize(
    ("head_dim", "layout", "value_dim", "rows", "width"),
    [
        (64, "plain", None, 4, 64),
        (64, "paired", None, 2, 128),
        (80, "padded", None, 4, 128),
        (128, "padded", None, 4, 128),
        (96, "plain", None, 4, 96),
        (576, "plain", 512, 2, 576),
        (576, "padded", 512, 2, 640),
    ],
)
def test_pages_by_layout(head_dim: int, layout: str, value_dim: int | None, rows: int, width: int) -> None:
    assert pool_shape(KVSpec(2, head_dim, 16, "bfloat16", layout, value_dim), 9) == (9, rows, 16, width)


def test_a_latent_of_deepseek_takes_1152_bytes() -> None:
    assert page_bytes(KVSpec(1, 576, 1, "bfloat16", value_dim=512)) == 1152


def test_eight_bit_pages_saturate() -> None:
    values = jnp.array([[[1e6, -1e6, 448.0, 500.0, 0.25]]])
    assert saturate(values, jnp.float8_e4m3fn).astype(jnp.float32).tolist() == [[[448, -448, 448, 448, 0.25]]]
    halved = saturate(values, jnp.float8_e4m3fn, jnp.array([2.0]))
    assert halved.astype(jnp.float32).tolist() == [[[448, -448, 224, 256, 0.125]]], "500 / 2 rounds to 256"
    assert bool(jnp.isinf(saturate(values, jnp.float16)[0, 0, 0])), "wider floats are cast as ever"


@pytest.mark.parametrize(
    "name", ["mixed", "8:4 bfloat16", "decode", "mixed fp8 8:2 of 128", "mixed latents 8 of 576", "decode latents fp8"]
)
def test_update_writes_its_slots_and_no_other(name: str) -> None:
    case = BY_NAME[name]
    inputs = make_inputs(case)
    _, kv_pages = run_case(case, inputs)
    expected, dtype, token = inputs.kv_pages.copy(), inputs.kv_pages.dtype, 0
    k = np.asarray(saturate(inputs.k, dtype, inputs.heads.k_scale))
    v = k if inputs.v is None else np.asarray(saturate(inputs.v, dtype, inputs.heads.v_scale))
    for row, (computed, new) in enumerate(case.rows):
        for position in range(computed, computed + new):
            page = LAYER * inputs.num_pages + inputs.page_table[row, position // case.spec.page_size]
            expected[page, 0::2, position % case.spec.page_size] = k[token]
            expected[page, 1::2, position % case.spec.page_size] = v[token]
            token += 1
    bits, expected_bits = (np.ascontiguousarray(pool).view(np.uint8) for pool in (kv_pages, expected))
    null_page = LAYER * inputs.num_pages  # takes the padding: whatever it holds is right
    np.testing.assert_array_equal(np.delete(bits, null_page, 0), np.delete(expected_bits, null_page, 0))


@pytest.mark.parametrize("value_dim", [None, 48])
def test_gather_logical_reads_back_what_was_written(value_dim: int | None) -> None:
    case = Case("prompts", ((0, 17), (0, 40)), spec=KVSpec(2, 64, 16, "float32", value_dim=value_dim))
    inputs = make_inputs(case)
    _, kv_pages = run_case(case, inputs)
    offset = LAYER * inputs.num_pages
    for row, (begin, end) in enumerate(zip(inputs.query_start_loc, inputs.query_start_loc[1:3], strict=False)):
        k, v = gather_logical(kv_pages, inputs.page_table[row], end - begin, case.spec, page_offset=offset)
        np.testing.assert_array_equal(k, inputs.k[begin:end])
        np.testing.assert_array_equal(v, (inputs.k if inputs.v is None else inputs.v)[begin:end, :, :value_dim])
    with pytest.raises(ValueError, match="length 193 is more than the 192"):
        gather_logical(kv_pages, inputs.page_table[0], 193, case.spec)
    with pytest.raises(ValueError, match="do not fit KVSpec"):
        gather_logical(kv_pages, inputs.page_table[0], 1, KVSpec(3, 64, 16, "float32"))


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
@pytest.mark.parametrize("max_query_len", [1, None], ids=["decode", "mixed"])
def test_layers_share_a_donated_pool_in_place(platform: str, max_query_len: int | None) -> None:
    layers, num_pages, rows, width, tokens = 2, 1025, 8, 32, 32
    spec = KVSpec(2, 64, 32, "float32")

    @partial(jax.jit, donate_argnums=1)
    def step(q: jax.Array, pool: jax.Array, *meta: jax.Array) -> tuple[jax.Array, jax.Array]:
        shape = AttnShape(4, spec, "float32")
        batch = prepare_batch(*meta, num_tokens=tokens, shape=shape, max_query_len=max_query_len, impl="xla")
        for layer in range(layers):  # as in a model, a layer's K and V come from the answer of the one before
            k, v = q[:, :2], q[:, 2:]
            q, pool = attend_with_update(
                q, k, v, pool, batch, AttnLayer(AttnParams(scale=0.125), page_offset=layer * num_pages)
            )
        return q, pool

    shapes = [(tokens, 4, 64), pool_shape(spec, layers * num_pages), (rows, width), (rows,), (rows + 1,), (3,)]
    dtypes = [jnp.float32] * 2 + [jnp.int32] * 4
    with trace_for_platform(platform):
        compiled = step.lower(*map(jax.ShapeDtypeStruct, shapes, dtypes)).compile()
    memory = compiled.memory_analysis()
    pool_bytes = layers * num_pages * page_bytes(spec)
    assert memory.alias_size_in_bytes >= pool_bytes, "the pool was not written in place"
    assert memory.temp_size_in_bytes < pool_bytes / layers, "a layer's share of the pool was copied"

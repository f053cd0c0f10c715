"""Runs a case through an implementation, compiled once per static shape."""

from __future__ import annotations

from functools import partial

import jax

from pallas_kernels import attend_with_update, prepare_batch
from pallas_kernels.spec import AttnParams
from pallas_kernels.testing.cases import Case, Inputs

LAYER = 1  # of the pool's two: attention must find its pages behind another layer's


@partial(jax.jit, static_argnames=("params", "page_size", "max_query_len", "impl", "bounded"))
def _run(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    kv_pages: jax.Array,
    meta: tuple[jax.Array, ...],
    page_offset: jax.Array,
    *,
    params: AttnParams,
    page_size: int,
    max_query_len: int | None,
    impl: str,
    bounded: bool | None,
) -> tuple[jax.Array, jax.Array]:
    batch = prepare_batch(
        *meta, num_tokens=q.shape[0], page_size=page_size, max_query_len=max_query_len, bounded=bounded
    )
    return attend_with_update(q, k, v, kv_pages, batch, params=params, page_offset=page_offset, impl=impl)


def run_case(
    case: Case, inputs: Inputs, *, impl: str = "xla", bounded: bool | None = None
) -> tuple[jax.Array, jax.Array]:
    """Returns the attention [T, N, H] and the pool after one step in layer LAYER."""
    return _run(
        inputs.q,
        inputs.k,
        inputs.v,
        inputs.kv_pages,
        inputs.meta,
        LAYER * inputs.num_pages,
        params=case.params,
        page_size=case.spec.page_size,
        max_query_len=case.max_query_len,
        impl=impl,
        bounded=bounded,
    )

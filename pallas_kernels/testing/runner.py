"""Runs a case through an implementation, compiled once per static shape."""

from __future__ import annotations

from functools import cache
from typing import Any

import jax

from pallas_kernels import attend_stored, attend_with_update, prepare_batch
from pallas_kernels.spec import AttnLayer, AttnShape
from pallas_kernels.testing.case import LAYER, Case, Inputs, choose_config

_STATIC = ("shape", "max_query_len", "impl", "config", "is_stored")
# A TPU then ends a program whose kernel copies from or to memory that is not its own, which else goes on.
BOUNDS_CHECKS = {"xla_mosaic_on_device_checks": "bounds"}


def _run(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array | None,
    kv_pages: jax.Array,
    meta: tuple[jax.Array, ...],
    layer: AttnLayer,
    last_keys: jax.Array | None,
    *,
    shape: AttnShape,
    max_query_len: int | None,
    impl: str,
    config: Any,
    is_stored: bool,
) -> tuple[jax.Array, jax.Array]:
    options = {"max_query_len": max_query_len, "impl": impl, "config": config, "last_keys": last_keys}
    batch = prepare_batch(*meta, num_tokens=q.shape[0], shape=shape, **options)
    if is_stored:
        return attend_stored(q, kv_pages, batch, layer)
    return attend_with_update(q, k, v, kv_pages, batch, layer)


@cache
def jit_step(*, checks_bounds: bool) -> Any:
    """The step as it is compiled; `checks_bounds` for TPUs only, whose compiler alone has the option."""
    return jax.jit(_run, static_argnames=_STATIC, compiler_options=BOUNDS_CHECKS if checks_bounds else None)


def run_case(
    case: Case, inputs: Inputs, *, impl: str = "xla", config: Any = None, checks_bounds: bool = False
) -> tuple[jax.Array, jax.Array]:
    """Returns the attention [T, N, H] and the pool after one step in layer LAYER, on the device of the arrays."""
    return jit_step(checks_bounds=checks_bounds)(
        inputs.q,
        inputs.k,
        inputs.v,
        inputs.kv_pages,
        inputs.meta,
        AttnLayer(case.params, inputs.heads, LAYER * inputs.num_pages),
        inputs.last_keys,
        shape=case.shape,
        max_query_len=case.max_query_len,
        impl=impl,
        config=choose_config(case, impl) if config is None else config,
        is_stored=case.is_stored,
    )

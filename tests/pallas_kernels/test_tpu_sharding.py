"""The TPU kernels under shard_map over KV heads, with its checks of varying axes on."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import pallas_kernels

PROGRAM = """
import dataclasses, jax, numpy as np
from jax.sharding import AxisType, PartitionSpec as P
from pallas_kernels import AttnLayer, attend_with_update, prepare_batch
from pallas_kernels.testing.case import largest_error, make_inputs
from pallas_kernels.testing.reference import attend_by_formula
from tests.pallas_kernels.test_tpu import find_case, small_config
from tests.pallas_kernels.tpu_faults import quick_interpreter

assert jax.device_count() == 2
mesh = jax.make_mesh((2,), ("heads",), axis_types=(AxisType.Auto,))
by_head = P(None, "heads")
for name in ("decode sinks", "mixed fp8 8:2 of 128"):
    case = find_case(name)
    spec = dataclasses.replace(case.spec, num_kv_heads=1)
    share = dataclasses.replace(case.shape, num_heads=case.num_heads // 2, spec=spec)
    inputs = make_inputs(case)

    def step(q, k, v, pool, heads, *meta):
        batch = prepare_batch(
            *meta, num_tokens=q.shape[0], shape=share, max_query_len=case.max_query_len, impl="tpu_interpret",
            config=small_config(case),
        )
        def attend(q, k, v, pool, heads, batch):
            return attend_with_update(q, k, v, pool, batch, AttnLayer(case.params, heads, inputs.num_pages))
        return jax.shard_map(
            attend, mesh=mesh, in_specs=(by_head, by_head, by_head, by_head, P("heads"), P()),
            out_specs=(by_head, by_head)
        )(q, k, v, pool, heads, batch)

    with quick_interpreter():
        out, pool = jax.jit(step)(inputs.q, inputs.k, inputs.v, inputs.kv_pages, inputs.heads, *inputs.meta)
    expected, _ = attend_by_formula(case, inputs)
    assert largest_error(case, out, expected, inputs.num_tokens) < 1, case.name
"""


@pytest.mark.slow
@pytest.mark.thorough
def test_two_devices_give_what_one_gives() -> None:
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=2"
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(pallas_kernels.__file__).parents[1],
        env=os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
    )
    assert done.returncode == 0, done.stderr[-3000:]

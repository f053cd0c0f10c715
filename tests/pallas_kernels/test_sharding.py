"""Under shard_map over KV heads, with its checks of varying axes on, each device attends with its own heads."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pallas_kernels
from tests.programs import QUICK_ENV

PROGRAM = """
import dataclasses, jax, numpy as np
from jax.sharding import AxisType, PartitionSpec as P
from pallas_kernels import AttnLayer, attend_with_update, layout, prepare_batch, xla
from pallas_kernels.cpu import library
from pallas_kernels.testing.case import largest_error, make_inputs
from pallas_kernels.testing.cases import CASES
from pallas_kernels.testing.reference import attend_by_formula
from tests.programs import PROGRAMS

assert jax.device_count() == 2
mesh = jax.make_mesh((2,), ("heads",), axis_types=(AxisType.Auto,))
by_head = P(None, "heads")
for case in (case for case in CASES if case.name in ("mixed", "decode window softcap")):
    share = dataclasses.replace(case.shape, num_heads=2, spec=dataclasses.replace(case.spec, num_kv_heads=1))
    impls = [("xla", "cpu"), ("xla", "gpu")]
    impls += [("cpu", "cpu")] if library.load(PROGRAMS) is None else []
    for impl, platform in impls:
        xla.traced_platform = layout.traced_platform = lambda: platform
        inputs = make_inputs(case)

        def step(q, k, v, pool, *meta):
            batch = prepare_batch(
                *meta, num_tokens=q.shape[0], shape=share, max_query_len=case.max_query_len, impl=impl
            )
            def attend(q, k, v, pool, batch):
                return attend_with_update(q, k, v, pool, batch, AttnLayer(case.params, page_offset=inputs.num_pages))
            return jax.shard_map(
                attend, mesh=mesh, in_specs=(by_head, by_head, by_head, by_head, P()), out_specs=(by_head, by_head)
            )(q, k, v, pool, batch)

        arguments = (inputs.q, inputs.k, inputs.v, inputs.kv_pages, *inputs.meta)
        out, pool = jax.jit(step)(*arguments)
        expected, expected_pool = attend_by_formula(case, inputs)
        assert largest_error(case, out, expected, inputs.num_tokens) < 1, (case.name, impl, platform)
        null_page = inputs.num_pages
        pools = [np.delete(np.asarray(array), null_page, 0) for array in (pool, expected_pool)]
        np.testing.assert_array_equal(*pools)
"""


def test_two_devices_give_what_one_gives() -> None:
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=2"
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(pallas_kernels.__file__).parents[1],
        env=os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"} | QUICK_ENV,
    )
    assert done.returncode == 0, done.stderr[-3000:]

"""The combine of each kind of GPU in its interpreter: units by their weights, sinks and scales."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.ampere.combine import AmpereCombine
from pallas_kernels.hopper.combine import HopperCombine
from pallas_kernels.mosaic_gpu.combine import Combine, combine_units
from pallas_kernels.mosaic_gpu.splits import SplitList


@pytest.mark.parametrize("kind", [HopperCombine, AmpereCombine])
def test_units_are_weighed_and_sinks_take_their_share(kind: type[Combine]) -> None:
    rng = np.random.default_rng(0)
    outputs = rng.standard_normal((6, 64, 64)).astype(np.float16)
    logs = rng.standard_normal((6, 64)).astype(np.float32) * 3
    logs[1, 3] = -1e30  # a unit whose keys the query does not see
    outputs[5], logs[5] = np.nan, np.nan  # no row has this unit
    firsts, counts = np.array([0, 5, 0], np.int32), np.array([5, 0, 1], np.int32)
    work = SplitList(np.zeros((6, 8), np.int32), firsts, counts, tile_tokens=64, max_queries=1)
    sinks, scale = rng.standard_normal(64).astype(np.float32), rng.uniform(0.5, 2, 64).astype(np.float32)
    body = kind(num_kv_heads=3, num_rows=16, num_used=5, dtype=jnp.dtype("float16"), interpret=True)

    def join(sinks: np.ndarray | None, scale: np.ndarray | None) -> np.ndarray:
        """[S, 3, 5, 64]: the fourth head of a block's rows is none."""
        return np.asarray(combine_units(body, outputs, logs, work, sinks, scale))[:, :, :5]

    used = np.arange(64).reshape(4, 16)[:3, :5]
    out, shares = join(sinks, scale), np.exp2(logs[:5])
    wanted = (shares[..., None] * outputs[:5]).sum(0) / (shares.sum(0) + np.exp2(sinks))[:, None] * scale[:, None]
    np.testing.assert_allclose(out[0].astype(np.float32), wanted[used], atol=4e-3)
    assert not out[1].any()
    np.testing.assert_array_equal(join(None, None)[2], outputs[0][used])

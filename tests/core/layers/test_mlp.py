"""Gated blocks whose matrices a CPU has packed, where its product applies SiLU, beside the same with whole ones."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.core.layers.context import StepContext
from jaxserve.core.layers.linear import PACKED
from jaxserve.core.layers.mlp import ClampedGate, MLPConfig, gated_mlp
from pallas_kernels.cpu.packing import pack
from tests.pallas_kernels.cpu_library import BUILT

pytestmark = BUILT


def draw(seed: int, *shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), "float32")


def pack_leaves(leaves: dict[str, Any]) -> dict[str, Any]:
    return {name: leaf | {"weight": {PACKED: pack(leaf["weight"])}} for name, leaf in leaves.items()}


ADAPTERS = {"a": draw(5, 64, 4), "b": draw(6, 2, 4, 128), "own": jnp.arange(7)[:, None] % 2 == 0}


@pytest.mark.parametrize(
    ("config", "more"),
    [
        (MLPConfig(128, "silu"), {}),
        (MLPConfig(128, "swish"), {}),
        (MLPConfig(128, "gelu"), {}),
        (MLPConfig(128, "silu", clamped=ClampedGate(1.7, 2.0)), {}),
        (MLPConfig(128, "silu", bias=True), {"bias": draw(4, 2, 128)}),
        (MLPConfig(128, "silu"), {"adapters": ADAPTERS}),
    ],
)
def test_packed_matrices_change_nothing(config: MLPConfig, more: dict[str, Any]) -> None:
    x = draw(0, 7, 64)
    leaves = {"gate_up": {"weight": draw(1, 2, 64, 128), **more}, "down": {"weight": draw(2, 128, 64)}}
    run = jax.jit(lambda leaves: gated_mlp(config, leaves, x, StepContext(mesh=None)))
    packed = pack_leaves(leaves)
    np.testing.assert_allclose(run(packed), run(leaves), rtol=1e-4, atol=1e-3)
    text = str(jax.make_jaxpr(run)(packed))
    is_fused = not more and config.clamped is None and config.activation in ("silu", "swish")
    assert text.count("JaxservePackedProduct") == 2 and ("logistic" in text or "erf" in text) != is_fused

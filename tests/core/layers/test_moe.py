"""A mixture of experts against a loop over tokens, and what padding does in it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.core.layers.context import LayerContext
from jaxserve.core.layers.mlp import MLPConfig
from jaxserve.core.layers.moe import MoEConfig, mix_experts
from jaxserve.core.layers.router import RouterConfig
from jaxserve.core.layers.stack import InStack, stack_params
from pallas_kernels import AttnShape, KVSpec, prepare_batch

D, F, E, K, TOKENS = 8, 12, 6, 3, 7
CONFIG = MoEConfig(
    RouterConfig(E, K, normalize=True), MLPConfig(F, "silu"), shared=MLPConfig(10, "silu"), gated_shared=True
)


def make_leaves(seed: int = 0) -> dict[str, Any]:
    rng = np.random.default_rng(seed)

    def leaf(*shape: int) -> dict[str, jax.Array]:
        return {"weight": jnp.asarray(rng.standard_normal(shape) / np.sqrt(shape[-2]), jnp.float32)}

    return {
        "router": leaf(D, E),
        "experts": {"gate_up": leaf(2, E, D, F), "down": leaf(E, F, D)},
        "shared": {"gate_up": leaf(2, D, 10), "down": leaf(10, D)},
        "shared_gate": leaf(D, 1),
    }


def make_context(num_tokens: int, padded: int = TOKENS) -> LayerContext:
    batch = prepare_batch(
        jnp.ones((1, 1), jnp.int32),
        jnp.array([num_tokens], jnp.int32),
        jnp.array([0, num_tokens], jnp.int32),
        jnp.array([0, 0, 1], jnp.int32),
        num_tokens=padded,
        shape=AttnShape(1, KVSpec(1, 8, 16, "float32"), "float32"),
        max_query_len=None,
    )
    return LayerContext(mesh=None, rotary=None, batch=batch, pool=jnp.zeros(()), offset=0, window=None)


def mix_by_hand(leaves: dict[str, Any], x: np.ndarray) -> np.ndarray:
    def run(gate_up: np.ndarray, down: np.ndarray, token: np.ndarray) -> np.ndarray:
        gate, up = token @ gate_up[0], token @ gate_up[1]
        return (gate / (1 + np.exp(-gate)) * up) @ down

    weights = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), leaves)
    gate_up, down = (weights["experts"][name]["weight"] for name in ("gate_up", "down"))
    out = []
    for token in x.astype(np.float64):
        scores = np.exp(token @ weights["router"]["weight"])
        chosen = np.argsort(-scores)[:K]
        total = sum(scores[e] / scores[chosen].sum() * run(gate_up[:, e], down[e], token) for e in chosen)
        share = 1 / (1 + np.exp(-token @ weights["shared_gate"]["weight"]))
        out.append(
            total + share * run(weights["shared"]["gate_up"]["weight"], weights["shared"]["down"]["weight"], token)
        )
    return np.array(out)


def test_equals_a_loop_over_tokens() -> None:
    leaves, x = make_leaves(), np.random.default_rng(1).standard_normal((TOKENS, D)).astype(np.float32)
    got = mix_experts(CONFIG, leaves, jnp.asarray(x), make_context(TOKENS))
    np.testing.assert_allclose(got, mix_by_hand(leaves, x), rtol=0, atol=1e-5)


def test_padding_goes_to_no_expert() -> None:
    """Padded rows of NaN change nothing, and experts that no real token chose may be NaN."""
    leaves, x = make_leaves(), np.random.default_rng(2).standard_normal((TOKENS, D)).astype(np.float32)
    x[2:] = np.nan
    expected = mix_by_hand(leaves, x[:2])
    chosen = np.argsort(-(x[:2] @ np.asarray(leaves["router"]["weight"])))[:, :K]
    idle = sorted(set(range(E)) - set(chosen.ravel().tolist()))
    assert idle
    leaves["experts"]["down"]["weight"] = leaves["experts"]["down"]["weight"].at[jnp.array(idle)].set(jnp.nan)
    got = mix_experts(CONFIG, leaves, jnp.asarray(x), make_context(2))
    np.testing.assert_allclose(got[:2], expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_a_stack_of_layers_is_entered_where_the_layer_lies(layer: int) -> None:
    tree = {"layers": [make_leaves(seed) for seed in range(3)]}
    alone = make_leaves(layer)
    taken = stack_params(tree, "stacked")["layers"][layer]
    assert isinstance(taken["experts"]["down"]["weight"], InStack)
    assert taken["experts"]["down"]["weight"].shape == (E, F, D)
    x = jnp.asarray(np.random.default_rng(3).standard_normal((TOKENS, D)), jnp.float32)
    context = make_context(TOKENS)
    np.testing.assert_array_equal(mix_experts(CONFIG, taken, x, context), mix_experts(CONFIG, alone, x, context))

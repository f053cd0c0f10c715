"""Norms, products, the feed-forward block and the two vocabulary matrices against numpy in float64."""

from __future__ import annotations

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.core.layers.activations import ACTIVATIONS
from jaxserve.core.layers.context import StepContext
from jaxserve.core.layers.embedding import EmbeddingConfig, embed_tokens, project_to_vocab
from jaxserve.core.layers.linear import linear
from jaxserve.core.layers.mlp import MLPConfig, gated_mlp, plain_mlp
from jaxserve.core.layers.norm import NormConfig, normalize

ALONE = StepContext(mesh=None)
RNG = np.random.default_rng(0)


def draw(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


def draw_leaf(*shape: int, bias: bool) -> dict[str, np.ndarray]:
    return {"weight": draw(*shape)} | ({"bias": draw(*shape[:-2], shape[-1])} if bias else {})


def test_layer_norm_subtracts_the_mean():
    x, weight, bias = draw(5, 3, 16), draw(3, 16), draw(3, 16)
    centered = x.astype(np.float64) - x.mean(-1, keepdims=True)
    expected = centered / np.sqrt((centered**2).mean(-1, keepdims=True) + 1e-5) * weight
    config = NormConfig(eps=1e-5, centered=True, wide=True)
    np.testing.assert_allclose(normalize(config, {"weight": weight}, x), expected, rtol=1e-4, atol=1e-5)
    got = normalize(config, {"weight": weight, "bias": bias}, x)
    np.testing.assert_allclose(got, expected + bias, rtol=1e-4, atol=1e-5)


def test_norm_is_root_mean_square():
    x, weight = draw(5, 16), draw(16)
    normed = x / np.sqrt((x.astype(np.float64) ** 2).mean(-1, keepdims=True) + 1e-5)
    np.testing.assert_allclose(normalize(NormConfig(eps=1e-5), {"weight": weight}, x), normed * weight, rtol=1e-5)
    np.testing.assert_allclose(
        normalize(NormConfig(eps=1e-5, unit_offset=True, wide=True), {"weight": weight}, x),
        normed * (1 + weight),
        rtol=1e-5,
        atol=1e-6,
    )


def test_norm_rounds_where_the_family_rounds():
    x, weight = jnp.asarray(draw(64, 32), jnp.bfloat16), jnp.asarray(draw(32), jnp.bfloat16)
    wide, wide_weight = np.asarray(x, np.float32), np.asarray(weight, np.float32)
    normed = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + np.float32(1e-6))
    rounded_first = (jnp.asarray(normed).astype(jnp.bfloat16).astype(jnp.float32) * wide_weight).astype(jnp.bfloat16)
    rounded_last = jnp.asarray(normed * (1 + wide_weight)).astype(jnp.bfloat16)
    llama = normalize(NormConfig(eps=1e-6), {"weight": weight}, x)
    gemma = normalize(NormConfig(eps=1e-6, unit_offset=True, wide=True), {"weight": weight}, x)
    assert llama.dtype == gemma.dtype == jnp.bfloat16
    assert (np.asarray(llama) == np.asarray(rounded_first)).mean() > 0.99  # rsqrt may differ in the last bit
    assert (np.asarray(gemma) == np.asarray(rounded_last)).mean() > 0.99


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_projection_is_one_product_without_copies_of_the_weight(dtype):
    shapes = [jax.ShapeDtypeStruct(shape, dtype) for shape in ((4, 96), (96, 48))]
    compiled = jax.jit(lambda x, weight: linear(ALONE, {"weight": weight}, x)).lower(*shapes).compile()
    operations = re.findall(r"= \S+ ([a-z-]+)\(", compiled.as_text())
    assert operations.count("dot") == 1
    assert not {"transpose", "copy", "convert"} & set(operations)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_gated_block_is_two_products_without_copies_of_their_weights(dtype):
    shapes = {"gate_up": (2, 64, 96), "down": (96, 64)}
    leaves = {name: {"weight": jax.ShapeDtypeStruct(shape, dtype)} for name, shape in shapes.items()}
    block = partial(gated_mlp, MLPConfig(96, "silu"), ctx=ALONE)
    compiled = jax.jit(block).lower(leaves, jax.ShapeDtypeStruct((4, 64), dtype))
    operations = re.findall(r"= (\S+) ([a-z-]+)\(", compiled.compile().as_text())
    assert sum(name == "dot" for _, name in operations) == 2
    assert all(name in ("parameter", "bitcast") for shape, name in operations if "64,96]" in shape)


def test_projection_values_and_bias():
    x, weight, bias = draw(4, 96), draw(96, 8), draw(8)
    expected = x.astype(np.float64) @ weight + bias
    np.testing.assert_allclose(linear(ALONE, {"weight": weight, "bias": bias}, x), expected, rtol=1e-5, atol=1e-5)
    with pytest.raises(TypeError):
        linear(ALONE, {"weight": weight[1:]}, x)


@pytest.mark.parametrize("activation", ["gelu_pytorch_tanh", "silu", "xielu"])
@pytest.mark.parametrize("bias", [False, True])
def test_feed_forward_blocks(activation: str, bias: bool):
    config = MLPConfig(intermediate_size=12, activation=activation, bias=bias)
    first, down = draw_leaf(2, 8, 12, bias=bias), draw_leaf(12, 8, bias=bias)
    learned = {"act": draw(len(config.learned))} if config.learned else {}
    x = draw(3, 8)

    def activate(gate: np.ndarray) -> jax.Array:
        return ACTIVATIONS[activation](gate, *learned.get("act", ()))

    gate, up = (x @ first["weight"][part] + (first["bias"][part] if bias else 0) for part in range(2))
    expected = (activate(gate) * up) @ down["weight"] + down.get("bias", 0)
    got = gated_mlp(config, {"gate_up": first, "down": down, **learned}, jnp.asarray(x), ALONE)
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-4)
    single = {"up": {name: leaf[0] for name, leaf in first.items()}, "down": down, **learned}
    expected = activate(gate) @ down["weight"] + down.get("bias", 0)
    np.testing.assert_allclose(plain_mlp(config, single, jnp.asarray(x), ALONE), expected, rtol=1e-4, atol=1e-4)


def test_embedding_scale_is_rounded_to_the_weights_dtype():
    table = jnp.asarray(draw(7, 12), jnp.bfloat16)
    config = EmbeddingConfig(vocab_size=7, tied=True, scale=59.87)
    got = embed_tokens(config, {"weight": table}, jnp.array([3, 0]))
    np.testing.assert_array_equal(got, table[jnp.array([3, 0])] * jnp.bfloat16(59.75))


def test_ids_outside_the_vocabulary_give_finite_rows():
    got = embed_tokens(EmbeddingConfig(7, tied=True), {"weight": jnp.asarray(draw(7, 12))}, jnp.array([-1, 7, 2**30]))
    assert np.isfinite(got).all()


def test_logits_are_float32_and_softly_capped():
    hidden, table = jnp.asarray(draw(3, 12), jnp.bfloat16), jnp.asarray(draw(7, 12), jnp.bfloat16)
    plain = project_to_vocab(ALONE, EmbeddingConfig(7, tied=True), {"weight": table}, hidden)
    capped = project_to_vocab(ALONE, EmbeddingConfig(7, tied=True, softcap=2.0), {"weight": table}, hidden)
    scaled = project_to_vocab(ALONE, EmbeddingConfig(7, tied=True, logit_scale=0.25), {"weight": table}, hidden)
    expected = np.asarray(hidden, np.float64) @ np.asarray(table, np.float64).T
    assert plain.dtype == capped.dtype == jnp.float32
    np.testing.assert_allclose(plain, expected, atol=1e-5)
    np.testing.assert_allclose(capped, 2.0 * np.tanh(expected / 2.0), atol=1e-5)
    np.testing.assert_allclose(scaled, expected / 4, atol=1e-5)

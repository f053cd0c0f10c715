"""The small Llama in flax linen: its forward pass and its loss."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

Params = Any


@dataclass(frozen=True)
class DemoConfig:
    """Sizes of the model, by the names of Hugging Face's LlamaConfig."""

    vocab_size: int
    hidden_size: int = 256
    intermediate_size: int = 704
    num_hidden_layers: int = 4
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 64
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-5


class Dense(nn.Module):
    """A product without bias: bf16 operands (twice as fast as f32 on a CPU), f32 weights and f32 result."""

    features: int

    @nn.compact
    def __call__(self, x: Float[Array, "*B D"]) -> Float[Array, "*B F"]:
        kernel = self.param("kernel", nn.initializers.normal(0.02), (x.shape[-1], self.features))
        return multiply(x, kernel)


class Norm(nn.Module):
    """Root mean square normalization with a learned scale."""

    eps: float

    @nn.compact
    def __call__(self, x: Float[Array, "*B D"]) -> Float[Array, "*B D"]:
        scale = self.param("scale", nn.initializers.ones, (x.shape[-1],))
        return x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + self.eps) * scale


class Attention(nn.Module):
    """Grouped-query attention with rotary positions in the half-rotation order of Hugging Face."""

    config: DemoConfig

    @nn.compact
    def __call__(self, x: Float[Array, "B T D"], mask: Float[Array, "B 1 1 T T"]) -> Float[Array, "B T D"]:
        cfg = self.config
        batch, length, _ = x.shape
        heads, kv_heads, size = cfg.num_attention_heads, cfg.num_key_value_heads, cfg.head_dim
        query = Dense(heads * size, name="q_proj")(x).reshape(batch, length, heads, size)
        key = Dense(kv_heads * size, name="k_proj")(x).reshape(batch, length, kv_heads, size)
        value = Dense(kv_heads * size, name="v_proj")(x).reshape(batch, length, kv_heads, size)
        grouped = (batch * kv_heads, heads // kv_heads * length, size)  # the heads of a group share one long product
        query = rotate(query, cfg.rope_theta).reshape(batch, length, kv_heads, heads // kv_heads, size)
        query = query.transpose(0, 2, 3, 1, 4).reshape(grouped).astype(jnp.bfloat16)
        key = rotate(key, cfg.rope_theta).transpose(0, 2, 1, 3).reshape(-1, length, size).astype(jnp.bfloat16)
        value = value.transpose(0, 2, 1, 3).reshape(-1, length, size).astype(jnp.bfloat16)
        scores = product(query, key.mT) * size**-0.5
        scores = scores.reshape(batch, kv_heads, heads // kv_heads, length, length) + mask
        shares = jax.nn.softmax(scores, axis=-1).reshape(*grouped[:2], length).astype(jnp.bfloat16)
        mixed = product(shares, value)
        mixed = mixed.reshape(batch, kv_heads, heads // kv_heads, length, size).transpose(0, 3, 1, 2, 4)
        return Dense(cfg.hidden_size, name="o_proj")(mixed.reshape(batch, length, heads * size))


class Mlp(nn.Module):
    """The gated feed-forward part of a layer."""

    config: DemoConfig

    @nn.compact
    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        gate = Dense(self.config.intermediate_size, name="gate_proj")(x)
        up = Dense(self.config.intermediate_size, name="up_proj")(x)
        return Dense(self.config.hidden_size, name="down_proj")(jax.nn.silu(gate) * up)


class DemoModel(nn.Module):
    """A Llama with tied embeddings; parameters carry Hugging Face's module names."""

    config: DemoConfig

    @nn.compact
    def __call__(self, tokens: Int[Array, "B T"], segments: Int[Array, "B T"]) -> Float[Array, "B T V"]:
        """Logits; a position sees earlier positions of its own segment only."""
        cfg = self.config
        table = self.param("embed_tokens", nn.initializers.normal(0.02), (cfg.vocab_size, cfg.hidden_size))
        x = table[tokens]
        causal = jnp.tril(jnp.ones((tokens.shape[1], tokens.shape[1]), bool))
        seen = causal & (segments[:, :, None] == segments[:, None, :])
        mask = jnp.where(seen, 0.0, -1e9)[:, None, None]
        for index in range(cfg.num_hidden_layers):
            name = f"layers_{index}"
            normed = Norm(cfg.rms_norm_eps, name=f"{name}_input_layernorm")(x)
            x = x + Attention(cfg, name=f"{name}_self_attn")(normed, mask)
            normed = Norm(cfg.rms_norm_eps, name=f"{name}_post_attention_layernorm")(x)
            x = x + Mlp(cfg, name=f"{name}_mlp")(normed)
        x = Norm(cfg.rms_norm_eps, name="norm")(x)
        return multiply(x, table.T)


def multiply(x: Float[Array, "*B D"], kernel: Float[Array, "D F"]) -> Float[Array, "*B F"]:
    """`x @ kernel` in bf16 with an f32 result; two-dimensional, because XLA's CPU backend has no fast path for more."""
    flat = x.reshape(-1, x.shape[-1]).astype(jnp.bfloat16)
    return product(flat, kernel.astype(jnp.bfloat16)).reshape(*x.shape[:-1], kernel.shape[1])


@jax.custom_vjp
def product(x: Float[Array, "*B T D"], y: Float[Array, "*B D F"]) -> Float[Array, "*B T F"]:
    """`x @ y` of bf16 operands, with an f32 result."""
    return jnp.matmul(x, y, preferred_element_type=jnp.float32)


def _keep_operands(x: Array, y: Array) -> tuple[Array, tuple[Array, Array]]:
    return product(x, y), (x, y)


def _find_gradients(operands: tuple[Array, Array], grad: Array) -> tuple[Array, Array]:
    (x, y), grad = operands, grad.astype(jnp.bfloat16)
    return _multiply_halves(grad, y.mT).astype(x.dtype), _multiply_halves(x.mT, grad).astype(y.dtype)


product.defvjp(_keep_operands, _find_gradients)


def _multiply_halves(x: Float[Array, "*B T D"], y: Float[Array, "*B D F"]) -> Float[Array, "*B T F"]:
    """`product` in a loop of two, over the first axis of `x`.

    A loop's operands are in memory as they are written here. Elsewhere XLA's CPU backend reads a transposed operand in
    its old order, and then has no fast path: products in bf16 take five times as long.
    """
    halves = x.reshape(2, x.shape[0] // 2, *x.shape[1:])
    if y.ndim == 2:
        _, parts = jax.lax.scan(lambda _, half: (None, product(half, y)), None, halves)
    else:
        _, parts = jax.lax.scan(lambda _, each: (None, product(*each)), None, (halves, y.reshape(2, -1, *y.shape[1:])))
    return parts.reshape(*x.shape[:-1], y.shape[-1])


def rotate(x: Float[Array, "B T N H"], theta: float) -> Float[Array, "B T N H"]:
    """Turns the pairs (i, i + H/2) of each head by position * theta^(-2i/H)."""
    half = x.shape[-1] // 2
    angles = jnp.arange(x.shape[1])[:, None] * theta ** (-jnp.arange(half) / half)
    cos, sin = jnp.cos(angles)[:, None], jnp.sin(angles)[:, None]  # [T, 1, H/2]
    first, second = x[..., :half], x[..., half:]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def compute_loss(
    model: DemoModel,
    params: Params,
    *,
    tokens: Int[Array, "B T"],
    targets: Int[Array, "B T"],
    weights: Float[Array, "B T"],
    segments: Int[Array, "B T"],
) -> Float[Array, ""]:
    """Weighted mean of the cross entropy, in nats per token."""
    logits = model.apply({"params": params}, tokens, segments)
    chosen = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    losses = jax.nn.logsumexp(logits, axis=-1) - chosen
    return jnp.sum(losses * weights) / jnp.maximum(jnp.sum(weights), 1.0)

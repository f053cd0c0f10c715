"""An EAGLE-3 head in flax linen: its passes over whole texts, and its loss.

Source: EAGLE-3 (Li et al. 2025, arXiv 2503.01840). At position p the head reads the target's states of p and the
embedding of token p+1, and predicts token p+2. Later passes read the head's own state of the position before. Here all
chains of a text run at once: pass j at position p belongs to the chain that began at p - j.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from demo_lm.model import DemoModel, Dense, Norm, Params, multiply, rotate

_LATER_PASSES = 0.8  # weight of a pass in the loss, over that of the pass before


@dataclass(frozen=True)
class HeadConfig:
    """Sizes of the head, by the names of its config.json, and the target's states that it reads."""

    vocab_size: int  # of the target, whose embedding the head reads
    draft_vocab_size: int = 768
    hidden_size: int = 256
    intermediate_size: int = 448
    # The head follows every step of the target, drafts or none: `fc`, keys and values are what that costs. These sizes
    # take 5 % of the demo model's products. With three layers and twice the heads, of 64, which took 14 %, runs of
    # drafts are no longer.
    num_attention_heads: int = 4
    num_key_value_heads: int = 1
    head_dim: int = 32
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-5
    # The residual stream before these layers of the target: the one behind the last of 4.
    aux_layers: tuple[int, ...] = (4,)


@dataclass(frozen=True)
class Keys:
    """Keys and values of one pass, both `[B, T, K, H]`."""

    keys: jax.Array
    values: jax.Array


class Head(nn.Module):
    """One decoder layer that attends over [embedding, state], a projection of the target's states, and an LM head."""

    config: HeadConfig

    def setup(self) -> None:
        cfg = self.config
        query_size, kv_size = cfg.num_attention_heads * cfg.head_dim, cfg.num_key_value_heads * cfg.head_dim
        self.fc = Dense(cfg.hidden_size)
        self.input_layernorm, self.hidden_norm = Norm(cfg.rms_norm_eps), Norm(cfg.rms_norm_eps)
        self.post_attention_layernorm, self.norm = Norm(cfg.rms_norm_eps), Norm(cfg.rms_norm_eps)
        self.q_proj, self.k_proj, self.v_proj = Dense(query_size), Dense(kv_size), Dense(kv_size)
        self.o_proj, self.down_proj = Dense(cfg.hidden_size), Dense(cfg.hidden_size)
        self.gate_proj, self.up_proj = Dense(cfg.intermediate_size), Dense(cfg.intermediate_size)
        shape = (cfg.draft_vocab_size, cfg.hidden_size)
        self.lm_head = self.param("lm_head", nn.initializers.normal(0.02), shape)

    def __call__(
        self,
        aux: Float[Array, "B T AD"],
        embedded: Float[Array, "B T D"],
        segments: Int[Array, "B T"],
        num_passes: int,
    ) -> Float[Array, "P B T Vd"]:
        """Logits of token p+2 at every position p and pass, over the draft vocabulary.

        Args:
            aux: the target's states of p, one behind the other.
            embedded: the target's embedding of token p+1.
            segments: a position sees earlier positions of its own segment only.
            num_passes: how many; pass j is wrong at the first j positions of a segment, where no chain has begun.
        """
        hidden, past, logits = self.fc(aux), [], []
        for index in range(num_passes):
            if index > 0:
                hidden = shift(hidden, 1)
            x = jnp.concatenate([self.input_layernorm(embedded), self.hidden_norm(hidden)], axis=-1)
            past.append(self._make_keys(x))
            hidden = hidden + self._attend(x, past, segments)
            normed = self.post_attention_layernorm(hidden)
            hidden = hidden + self.down_proj(jax.nn.silu(self.gate_proj(normed)) * self.up_proj(normed))
            logits.append(multiply(self.norm(hidden), self.lm_head.T))
        return jnp.stack(logits)

    def _make_keys(self, x: Float[Array, "B T C"]) -> Keys:
        cfg = self.config
        shape = (*x.shape[:2], cfg.num_key_value_heads, cfg.head_dim)
        return Keys(rotate(self.k_proj(x).reshape(shape), cfg.rope_theta), self.v_proj(x).reshape(shape))

    def _attend(self, x: Float[Array, "B T C"], past: list[Keys], segments: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        """A query of the last pass sees the first pass's keys up to where its chain began, then its chain's own."""
        cfg, begun = self.config, len(past) - 1
        batch, length, _ = x.shape
        heads = (batch, length, cfg.num_attention_heads, cfg.head_dim)
        query = rotate(self.q_proj(x).reshape(heads), cfg.rope_theta) * cfg.head_dim**-0.5
        query = query.reshape(batch, length, cfg.num_key_value_heads, -1, cfg.head_dim)
        seen = jnp.tril(jnp.ones((length, length), bool), -begun) & (segments[:, :, None] == segments[:, None, :])
        scores = jnp.einsum("btkgh,bukh->bkgtu", _narrow(query), _narrow(past[0].keys)).astype(jnp.float32)
        scores = jnp.where(seen[:, None, None], scores, -1e9)
        chain = [(shift(each.keys, begun - i), shift(each.values, begun - i)) for i, each in enumerate(past) if i]
        own = [jnp.einsum("btkgh,btkh->bkgt", query, keys)[..., None] for keys, _ in chain]
        shares = jax.nn.softmax(jnp.concatenate([scores, *own], axis=-1), axis=-1)
        mixed = jnp.einsum("bkgtu,bukh->btkgh", _narrow(shares[..., :length]), _narrow(past[0].values))
        mixed = mixed.astype(jnp.float32)
        for index, (_, values) in enumerate(chain):
            mixed = mixed + jnp.einsum("bkgt,btkh->btkgh", shares[..., length + index], values)
        return self.o_proj(mixed.reshape(batch, length, -1))


def _narrow(x: jax.Array) -> jax.Array:
    return x.astype(jnp.bfloat16)  # twice as fast as f32 on a CPU


def shift(x: Float[Array, "B T *rest"], distance: int) -> Float[Array, "B T *rest"]:
    """Moves every position `distance` ahead (back if it is negative); zeros follow."""
    if distance == 0:
        return x
    widths = [(0, 0), (max(distance, 0), max(-distance, 0)), *[(0, 0)] * (x.ndim - 2)]
    length = x.shape[1]
    return jnp.pad(x[:, max(-distance, 0) : length - max(distance, 0)], widths)


def read_target(
    model: DemoModel,
    params: Params,
    tokens: Int[Array, "B T"],
    segments: Int[Array, "B T"],
    aux_layers: tuple[int, ...],
) -> tuple[Float[Array, "B T V"], Float[Array, "B T AD"]]:
    """Logits of the target, and its residual stream before each of `aux_layers`, one behind the other.

    As many as there are layers means the stream behind the last.
    """
    num_layers = model.config.num_hidden_layers
    names = ["norm" if index == num_layers else f"layers_{index}_input_layernorm" for index in aux_layers]
    found: dict[str, jax.Array] = {}

    def look(call: Any, args: Any, kwargs: Any, context: nn.module.InterceptorContext) -> Any:
        if context.module.name in names and context.method_name == "__call__":
            found[context.module.name] = args[0]
        return call(*args, **kwargs)

    with nn.intercept_methods(look):
        logits = model.apply({"params": params}, tokens, segments)
    return logits, jnp.concatenate([found[name] for name in names], axis=-1)


def compute_head_loss(
    head: Head,
    params: Params,
    *,
    logits: Float[Array, "B T V"],
    aux: Float[Array, "B T AD"],
    embedded: Float[Array, "B T D"],
    weights: Float[Array, "B T"],
    segments: Int[Array, "B T"],
    draft_ids: Int[Array, " Vd"],
    num_passes: int,
) -> Float[Array, ""]:
    """Cross entropy against the target's own distribution over the draft vocabulary, in nats, mean over the passes.

    Args:
        head: the module of `params`.
        params: the head's.
        logits: the target's.
        aux: the target's states.
        embedded: the embedding of the token after each position.
        weights: 1 where the token after the position was written by the target, else 0. A chain counts from where all
            tokens that it knows or guesses were written.
        segments: documents.
        draft_ids: the tokens of the draft vocabulary.
        num_passes: length of the chains; each pass weighs less than the one before.
    """
    drafts = head.apply({"params": params}, aux, embedded, segments, num_passes)
    labels = jax.nn.softmax(shift(logits, -1)[..., draft_ids], axis=-1)
    counted = weights * shift(weights, -1)
    total, scale = jnp.float32(0.0), 0.0
    for index in range(num_passes):
        counted = counted * shift(weights, index)
        losses = -jnp.sum(labels * jax.nn.log_softmax(drafts[index], axis=-1), axis=-1)
        total += _LATER_PASSES**index * jnp.sum(losses * counted) / jnp.maximum(jnp.sum(counted), 1.0)
        scale += _LATER_PASSES**index
    return total / scale

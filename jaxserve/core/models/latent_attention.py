"""Latent attention in checkpoints: what config.json says about it, and its parameters.

Canonical names per layer: `qkv_a.weight` [D, Q + R + P] (the latent of queries, if there is one, then the stored row),
`q_norm.weight` [Q], `q_b.weight` [Q or D, N * (nope_dim + P)], `kv_norm.weight` [R], `k_b.weight` [N, nope_dim, R],
`v_b.weight` [N, R, value_dim], `o.weight` [N * value_dim, D], and a `bias` beside `qkv_a` and `o` where the model has
them. P numbers of a query and of the row rotate; `rope_interleave` says that pairs of neighbours do, and they are
reordered to rotate halves.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from functools import partial

import numpy as np

from jaxserve.core.layers.attention import AttentionConfig, LatentConfig
from jaxserve.core.layers.rope import RopeConfig
from jaxserve.core.models.base import CheckpointLayer, HostArray, Parameter, ParamSpec, Table
from jaxserve.core.models.hf_config import HFConfig, check_number
from jaxserve.core.models.layouts import JoinedRows, RowBlock, StackedParts, order_halves, stack_matrices, transpose
from jaxserve.core.models.parameters import linear_params, make_source, wide_norm_params
from jaxserve.core.models.rope_config import parse_rope, rope_parameters
from jaxserve.errors import ConfigError

LATENT_KEYS: dict[str, object] = {
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "attention_bias": False,
    "rope_interleave": True,
}
_OTHER_ROPE_KEYS = {
    "llama_4_scaling_beta",  # of queries, not of their rotation
    "max_position_embeddings",  # Mistral Small 4 states it twice
    "partial_rotary_factor",  # the P numbers rotate, whatever share of a head that is
}
IGNORED_KEYS = ("head_dim", "qk_head_dim")  # transformers writes them: they follow from the others


def read_latent_attention(config: HFConfig) -> AttentionConfig:
    """Returns the attention."""
    latent = LatentConfig(
        rank=config.integer("kv_lora_rank"),
        nope_dim=config.integer("qk_nope_head_dim"),
        rope_dim=config.integer("qk_rope_head_dim"),
        value_dim=config.integer("v_head_dim"),
        query_rank=config.optional_integer("q_lora_rank"),
        interleaved=config.flag("rope_interleave"),
    )
    if latent.rope_dim % 2:
        raise ConfigError(
            f"rotation needs an even number of dimensions, not {latent.rope_dim}", field="qk_rope_head_dim"
        )
    num_heads, stated = config.integer("num_attention_heads"), config.optional_integer("num_key_value_heads")
    if stated not in (None, num_heads):
        message = f"latent attention has keys for each of its {num_heads} heads, not {stated}"
        raise ConfigError(message, field="num_key_value_heads", value=stated)
    bias = config.flag("attention_bias")
    return AttentionConfig(
        num_heads=num_heads,
        num_kv_heads=1,
        head_dim=latent.rank + latent.rope_dim,
        scale=(latent.nope_dim + latent.rope_dim) ** -0.5 * _read_temperature(config) ** 2,
        qkv_bias=bias,
        out_bias=bias,
        latent=latent,
    )


def read_latent_rope(config: HFConfig, latent: LatentConfig) -> RopeConfig:
    """Returns the rotation of the P numbers."""
    parameters = {key: value for key, value in rope_parameters(config).items() if key not in _OTHER_ROPE_KEYS}
    trained_length = config.integer("max_position_embeddings")
    return parse_rope(parameters, head_dim=latent.rope_dim, max_position_embeddings=trained_length)


def _read_temperature(config: HFConfig) -> float:
    """Returns YaRN's factor of queries and of keys; `mscale_all_dim` says that it is part of the scale."""
    parameters = rope_parameters(config)
    scaled = (parameters.get("rope_type") or parameters.get("type") or "default") != "default"
    if not scaled or not parameters.get("mscale_all_dim"):
        return 1.0
    factor, mscale = (
        check_number(f"rope_parameters.{key}", parameters.get(key)) for key in ("factor", "mscale_all_dim")
    )
    return 1.0 if factor <= 1.0 else 0.1 * mscale * math.log(factor) + 1.0


def latent_attention_params(layer: CheckpointLayer) -> Table:
    """Returns the parameters from q_a_proj (or q_proj), q_b_proj, kv_a_proj_with_mqa, kv_b_proj and o_proj."""
    config, attention = layer.config, layer.kind.attention
    latent, hidden = attention.latent, config.hidden_size
    assert latent is not None
    rank, query_rank, heads = latent.rank, latent.query_rank, attention.num_heads
    head = latent.nope_dim + latent.rope_dim
    modules = {} if query_rank is None else {layer.tensor("self_attn.q_a_proj"): query_rank}
    modules |= {layer.tensor("self_attn.kv_a_proj_with_mqa"): attention.head_dim}
    shape = (hidden, sum(modules.values()))
    build = partial(_join_latents, _order_last(latent, rank))
    table = linear_params(config, "qkv_a", modules, shape, (None, None), build, bias=attention.qkv_bias)
    order = _order_last(latent, latent.nope_dim)
    order = np.concatenate([order + index * head for index in range(heads)])
    name = layer.tensor("self_attn.q_proj" if query_rank is None else "self_attn.q_b_proj")
    shape, build = (query_rank or hidden, heads * head), partial(transpose, order=order)
    table |= linear_params(config, "q_b", {name: shape[1]}, shape, (None, "heads"), build, bias=False)
    norms = {"kv_norm": ("self_attn.kv_a_layernorm", rank)}
    if query_rank is not None:
        norms["q_norm"] = ("self_attn.q_a_layernorm", query_rank)
    for leaf, (module, size) in norms.items():
        table |= wide_norm_params(config, leaf, layer.tensor(module), size)
    shape = (heads * latent.value_dim, hidden)
    modules = {layer.tensor("self_attn.o_proj"): hidden}
    table |= linear_params(config, "o", modules, shape, ("heads", None), transpose, bias=attention.out_bias)
    return table | _head_params(layer, latent, layer.tensor("self_attn.kv_b_proj.weight"))


def _head_params(layer: CheckpointLayer, latent: LatentConfig, name: str) -> Table:
    """Returns `k_b` and `v_b` from one tensor [N * (nope_dim + value_dim), R]."""
    heads, rank = layer.kind.attention.num_heads, latent.rank
    shapes = (heads * (latent.nope_dim + latent.value_dim), rank)

    def take_keys(tensor: np.ndarray) -> np.ndarray:
        return tensor.reshape(heads, -1, rank)[:, : latent.nope_dim]

    def take_values(tensor: np.ndarray) -> StackedParts:
        return stack_matrices(tensor.reshape(heads, -1, rank)[:, latent.nope_dim :])

    def make(shape: tuple[int, ...], build: Callable[..., HostArray]) -> Parameter:
        spec = ParamSpec(shape, layer.config.dtype, ("heads", None, None), "normal")
        return Parameter(spec, dataclasses.replace(make_source((name,), (shapes,), build), part=True))

    return {
        "k_b.weight": make((heads, latent.nope_dim, rank), take_keys),
        "v_b.weight": make((heads, rank, latent.value_dim), take_values),
    }


def _join_latents(order: np.ndarray, *tensors: np.ndarray) -> JoinedRows:
    """Returns [D, Q + R + P] of q_a and kv_a, whose rows are taken in `order`; biases have no D."""
    *queries, row = tensors
    return JoinedRows([*map(RowBlock, queries), RowBlock(row, order)])


def _order_last(latent: LatentConfig, first: int) -> np.ndarray:
    """Returns the order of `first` numbers that stay and P that rotate."""
    if not latent.interleaved:
        return np.arange(first + latent.rope_dim)
    return np.concatenate([np.arange(first), first + order_halves(latent.rope_dim, latent.rope_dim)])

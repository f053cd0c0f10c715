"""gpt-oss: attention sinks, windows on every other layer, experts with biases and a clamped gate; files in MXFP4."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from jaxserve.core.layers.mlp import ClampedGate
from jaxserve.core.layers.moe import MoEConfig
from jaxserve.core.models.base import CheckpointLayer, DecoderConfig, Family, HostArray, Table, WeightSource
from jaxserve.core.models.blocks import pre_norm_layer
from jaxserve.core.models.common import (
    DECODER_KEYS,
    build_config,
    read_attention,
    read_layer_types,
    read_norm,
    read_num_layers,
    read_rope,
    window_layers,
)
from jaxserve.core.models.expert_parameters import expert_parameter, router_params
from jaxserve.core.models.hf_config import HFConfig
from jaxserve.core.models.layouts import Rows, StackedParts, stack_matrices, transpose
from jaxserve.core.models.moe_config import COUNT_KEYS, TRAINING_KEYS, read_count, read_experts
from jaxserve.core.models.parameters import attention_params, make_source, pre_norm_params, sink_params

KEYS = (
    DECODER_KEYS
    | COUNT_KEYS
    | {
        "num_key_value_heads": 8,
        "head_dim": 64,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "original_max_position_embeddings": None,
        "rope_theta": 150000.0,
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 32.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
        "dtype": "bfloat16",
        "hidden_act": "silu",
        "attention_bias": True,
        "sliding_window": 128,
        "layer_types": None,
        "num_experts_per_tok": 4,
        "swiglu_alpha": 1.702,
        "swiglu_limit": 7.0,
        "quantization_config": None,
    }
)


def parse(config: HFConfig) -> DecoderConfig:
    """Reads a gpt-oss config.json."""
    bias = config.flag("attention_bias")
    attention = read_attention(config, qkv_bias=bias, out_bias=bias)
    attention = dataclasses.replace(attention, sinks=True)
    config.require(hidden_act="silu")
    gate = ClampedGate(config.number("swiglu_alpha"), config.number("swiglu_limit"))
    count = read_count(config, 128)
    moe = read_experts(config, count, size_key="intermediate_size", scoring="softmax_of_chosen", bias=True)
    moe = dataclasses.replace(moe, expert=dataclasses.replace(moe.expert, bias=True, clamped=gate))
    types = ["full_attention" if index % 2 else "sliding_attention" for index in range(read_num_layers(config))]
    rope = read_rope(config, attention.head_dim)
    types, window = read_layer_types(config, types), config.optional_integer("sliding_window")
    layers = window_layers(attention, types, window, moe, rope)
    return build_config(config, "gpt_oss", layers=layers, norm=read_norm(config, wide=True))


def list_layer_params(layer: CheckpointLayer) -> Table:
    """Separate projections with sinks beside them, experts in one tensor each for gate and up, and for down."""
    return pre_norm_params(layer) | attention_params(layer) | sink_params(layer) | _moe_params(layer)


def _moe_params(layer: CheckpointLayer) -> Table:
    """Returns router and experts, whose gate and up are interleaved: rows 0, 2, 4 are of gate.

    Matrices are [in, out] in 16 bits (`gate_up_proj`), or [out, in] in MXFP4 (`gate_up_proj_blocks`, `_scales`).
    """
    config, moe = layer.config, layer.kind.mlp
    assert isinstance(moe, MoEConfig)
    hidden, size, count = config.hidden_size, moe.expert.intermediate_size, moe.router.num_experts
    expert, column = moe.expert_axes
    gate_up, down = (layer.tensor(f"mlp.experts.{part}_proj") for part in ("gate_up", "down"))
    parts = {
        "experts.gate_up.weight": expert_parameter(
            layer,
            (2, count, hidden, size),
            (None, expert, None, column),
            _matrix_source(gate_up, (count, 2 * size, hidden), _split_interleaved),
            expert_axis=1,
        ),
        "experts.gate_up.bias": expert_parameter(
            layer,
            (2, count, size),
            (None, expert, column),
            make_source((f"{gate_up}_bias",), ((count, 2 * size),), _split_bias),
            expert_axis=1,
            init="zeros",
        ),
        "experts.down.weight": expert_parameter(
            layer,
            (count, size, hidden),
            (expert, column, None),
            _matrix_source(down, (count, hidden, size), stack_matrices),
            expert_axis=0,
        ),
        "experts.down.bias": expert_parameter(
            layer,
            (count, hidden),
            (expert, None),
            make_source((f"{down}_bias",), ((count, hidden),), lambda tensor: tensor),
            expert_axis=0,
            init="zeros",
        ),
    }
    return router_params(layer, moe, layer.tensor("mlp.router")) | parts


def _matrix_source(
    name: str, shape: tuple[int, int, int], build: Callable[[Sequence[Rows]], HostArray]
) -> WeightSource:
    """Returns the source of E matrices [out, in] = `shape`; `build` takes the rows of each expert.

    Files of 16 bits have them as [in, out]. The other form is the one that quantized files have in parts.
    """
    count, rows, columns = shape
    plain = make_source((name,), ((count, columns, rows),), lambda tensor: build(np.swapaxes(tensor, 1, 2)))
    return dataclasses.replace(plain, otherwise=make_source((f"{name}.weight",), (shape,), build))


def _split_interleaved(experts: Sequence[Rows]) -> HostArray:
    """Returns [2, E, in, out] of rows that alternate between gate and up."""
    return StackedParts([stack_matrices(experts, np.arange(part, len(experts[0]), 2)) for part in range(2)])


def _split_bias(tensor: np.ndarray) -> HostArray:
    """Returns [2, E, out] of [E, 2 * out], where gate and up alternate."""
    rows = np.swapaxes(tensor, 0, 1)
    return StackedParts([transpose(rows, np.arange(part, len(rows), 2)) for part in range(2)])


FAMILY = Family(
    "gpt_oss",
    "GptOssForCausalLM",
    KEYS,
    parse,
    pre_norm_layer,
    list_layer_params,
    ignored_keys=(*TRAINING_KEYS, "experts_per_token", "initial_context_length"),
    quantizations=("mxfp4",),
)

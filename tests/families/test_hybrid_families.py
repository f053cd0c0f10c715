"""LFM2 and other families with recurrent states: what their files are read for, and where devices cut them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from jaxserve.core.models.decoder import fit_devices
from jaxserve.core.models.delta_parameters import _join_by_head, _order_channels
from jaxserve.errors import ConfigError
from jaxserve.families.registry import list_params, param_specs, parse_config
from jaxserve.features.quantization.schemes import choose_schemes
from jaxserve.presets import load_preset
from tests.families.test_config_errors import refused_field
from tests.golden_cases import load_case

CASES = ("lfm2", "lfm2_moe", "granite_hybrid", "granite_hybrid_dense", "nemotron_h", "olmo_hybrid")
LFM2, LFM2_MOE, GRANITE, DENSE, NEMOTRON, OLMO = (load_case(name).config for name in CASES)


@pytest.mark.parametrize(
    ("config", "change", "field"),
    [
        (LFM2, {"conv_L_cache": 1}, "conv_L_cache"),
        (LFM2, {"layer_types": ["conv", "linear_attention", "conv"]}, "layer_types"),
        (LFM2, {"layer_types": None, "full_attn_idxs": "1"}, "full_attn_idxs"),
        (LFM2, {"hidden_act": "gelu"}, "hidden_act"),
        (LFM2, {"block_multiple_of": 0}, "block_multiple_of"),
        (LFM2, {"block_ff_dim": -1}, "block_ff_dim"),
        (LFM2, {"conv_dilation": 2}, "conv_dilation"),
        (LFM2_MOE, {"num_experts_per_tok": 9}, "num_experts_per_tok"),
        (LFM2_MOE, {"num_dense_layers": -1}, "num_dense_layers"),
        (GRANITE, {"mamba_n_heads": 5}, "mamba_n_heads"),
        (GRANITE, {"mamba_n_groups": 4}, "mamba_n_heads"),
        (GRANITE, {"mamba_d_conv": 1}, "mamba_d_conv"),
        (GRANITE, {"layer_types": ["mamba", "sliding_attention", "mamba"]}, "layer_types"),
        (GRANITE, {"position_embedding_type": "alibi"}, "position_embedding_type"),
        (GRANITE, {"normalization_function": "layernorm"}, "normalization_function"),
        (GRANITE, {"time_step_limit": [0.001, float("inf")]}, "time_step_limit"),
        (GRANITE, {"time_step_limit": 3}, "time_step_limit"),
        (GRANITE, {"num_experts_per_tok": 9}, "num_experts_per_tok"),
        (NEMOTRON, {"layers_block_type": ["mamba", "conv"]}, "layers_block_type"),
        (NEMOTRON, {"layers_block_type": None, "hybrid_override_pattern": "M*X"}, "hybrid_override_pattern"),
        (NEMOTRON, {"layers_block_type": None}, "hybrid_override_pattern"),
        (NEMOTRON, {"num_hidden_layers": 4}, "num_hidden_layers"),
        (NEMOTRON, {"n_groups": 3}, "mamba_num_heads"),
        (NEMOTRON, {"moe_latent_size": 16}, "moe_latent_size"),
        (NEMOTRON, {"n_shared_experts": 2}, "n_shared_experts"),
        (NEMOTRON, {"attention_bias": True}, "attention_bias"),
        (NEMOTRON, {"time_step_limit": [0.0, 0.1]}, "time_step_limit"),
        (NEMOTRON, {"mamba_hidden_act": "elu"}, "mamba_hidden_act"),
        (OLMO, {"linear_num_value_heads": 6}, "linear_num_value_heads"),
        (OLMO, {"rope_parameters": None}, "rope_parameters"),
        (OLMO, {"hidden_act": "gelu"}, "hidden_act"),
        (OLMO, {"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim"),
    ],
)
def test_what_the_layers_cannot_be_is_refused_by_key(config: dict[str, Any], change: dict[str, Any], field: str):
    assert refused_field(config | change) == field


def test_lfm2_keeps_two_inputs_of_each_channel():
    config = parse_config(load_preset("lfm2-1.2b") or {})
    ((state, num_layers),) = config.states
    (inputs,) = state.arrays
    assert num_layers == 10 and (inputs.shape, inputs.dtype) == ((2, 2048), "bfloat16")
    assert config.kv_groups[0].layers == (2, 5, 8, 10, 12, 14) and config.embedding.tied
    assert config.layers[0].mlp.intermediate_size == 8192  # type: ignore[union-attr] of 12,288


@pytest.mark.parametrize(
    ("preset", "parts", "sizes"),
    [
        ("lfm2-1.2b", "2048 channels", "[1, 2, 4, 8, 16, 32]"),
        ("nemotron-nano-9b-v2", "8 groups", "[1, 2, 4, 8]"),
        ("granite-4.0-h-tiny", "48 value heads", "[1, 2, 4]"),
    ],
)
def test_devices_share_heads_or_channels(preset: str, parts: str, sizes: str):
    config = parse_config(load_preset(preset) or {})
    with pytest.raises(ConfigError, match=f"{parts} of a recurrent state") as raised:
        fit_devices(config, 5)
    assert f"sizes that work: {sizes}" in str(raised.value)


def test_channels_of_convolutions_are_split():
    specs = param_specs(fit_devices(parse_config(LFM2), 4))["layers"][0]
    assert specs["conv"].axes == (None, "channels") and specs["bcx"]["weight"].axes == (None, None, "channels")


@pytest.mark.parametrize(
    ("config", "split", "whole"),
    [
        (LFM2, ("bcx", "o", "gate_up", "down"), ("bcx.bias", "o.bias", "conv", "conv_bias", "mlp_norm.weight")),
        (
            DENSE,
            ("zxbcdt", "o", "gate_up", "down"),
            ("zxbcdt.bias", "o.bias", "conv", "decay", "decay_bias", "skip", "out_norm", "mlp_norm.weight"),
        ),
        (NEMOTRON, ("zxbcdt", "o"), ("conv", "conv_bias", "decay", "decay_bias", "skip", "out_norm")),
    ],
)
def test_quantization_leaves_small_parameters_whole(config: dict[str, Any], split: Any, whole: Any):
    model = choose_schemes(parse_config(config), "int8_per_channel_weight_only", None)
    names = {name.removeprefix("layers.0.") for name in list_params(model) if name.startswith("layers.0.")}
    parts = {f"{name}.weight.{part}" for name in split for part in ("values", "scales")}
    assert names == {"attn_norm.weight"} | parts | set(whole)


def test_both_spellings_of_layers_are_one_model():
    letters = NEMOTRON | {"layers_block_type": None, "hybrid_override_pattern": "M-*EM", "num_hidden_layers": 5}
    older = NEMOTRON | {"layers_block_type": ["mamba", "mlp", "attention", "moe", "mamba"]}
    assert parse_config(letters) == parse_config(older) == parse_config(NEMOTRON)
    older = GRANITE | {"layer_types": ["mamba", "attention", "mamba"], "position_embedding_type": "nope"}
    assert parse_config(older) == parse_config(GRANITE)


def test_olmo_hybrid_has_the_sizes_that_its_file_leaves_out():
    config = {key: value for key, value in OLMO.items() if not key.startswith(("linear_", "layer_types"))}
    model = parse_config(config | {"hidden_size": 32, "num_hidden_layers": 5})
    kinds = [type(kind.mixer).__name__ for kind in model.layers]
    assert kinds == ["GatedDeltaConfig"] * 3 + ["AttentionConfig", "GatedDeltaConfig"]
    assert model.layers[0].mixer.sizes == (4, 1, 6, 12) and model.layers[0].mixer.beta_scale == 2
    assert model.layers[3].rope is None
    assert parse_config(OLMO | {"rope_parameters": None, "rope_theta": 5e5}).layers[1].rope.theta == 5e5


def test_separate_projections_make_the_layout_of_joined_ones():
    config = parse_config(OLMO | {"linear_value_head_dim": 10})
    delta, source = config.layers[0].mixer, list_params(config)["layers.0.qkvz.weight"].source
    q, k, v, z = (np.random.default_rng(0).standard_normal((size, 24)) for size in (24, 24, 30, 30))
    assert source.shapes == ((24, 24), (24, 24), (30, 24), (30, 24))
    joined = _join_by_head(delta, np.concatenate([q, k, v]), z)
    np.testing.assert_array_equal(source.build(q, k, v, z), joined)
    convolutions = [np.random.default_rng(1).standard_normal((size, 1, 4)) for size in (24, 24, 30)]
    found = list_params(config)["layers.0.conv"].source.build(*convolutions)
    np.testing.assert_array_equal(found, _order_channels(delta, np.concatenate(convolutions)))


def test_the_states_of_published_models_take_the_bytes_of_their_sizes():
    """Of Nemotron-Nano-9B-v2: 128 heads of 80 x 128 in float32, and three inputs of 12,288 channels."""
    config = parse_config(load_preset("nemotron-nano-9b-v2") or {})
    ((state, num_layers),) = config.states
    inputs, heads = state.arrays
    assert num_layers == 27 and (inputs.shape, inputs.dtype) == ((8, 3 * 12288 // 8), "bfloat16")
    assert (heads.shape, heads.dtype) == ((128, 80, 128), "float32")
    assert [len(group.layers) for group in config.kv_groups] == [4] and config.layers[14].rope is None


def test_the_only_group_is_on_every_device_with_its_share_of_the_heads():
    config = fit_devices(parse_config(GRANITE), 2)
    mamba = config.layers[0].mixer
    assert mamba.sizes == (2, 3, 8, 12) and mamba.group_repeats == 2
    sizes, names = mamba.sizes, list_params(config)
    rows = np.arange(126.0)[:, None]  # z and x of 48 numbers, b and c of 12, dt of 6 heads
    (built,) = names["layers.0.zxbcdt.weight"].source.build(rows)[:, :]
    half = sizes.heads * sizes.head_dim
    shared = np.arange(96, 120)
    first = np.concatenate([np.arange(half), np.arange(48, 48 + half), shared, [120, 121, 122]])
    second = np.concatenate([np.arange(half, 48), np.arange(48 + half, 96), shared, [123, 124, 125]])
    np.testing.assert_array_equal(built, np.concatenate([first, second]))

"""LFM2 and other families with recurrent states: what their files are read for, and where devices cut them."""

from __future__ import annotations

from typing import Any

import pytest

from jaxserve.core.models.decoder import fit_devices
from jaxserve.errors import ConfigError
from jaxserve.families.registry import list_params, param_specs, parse_config
from jaxserve.features.quantization.schemes import choose_schemes
from jaxserve.presets import load_preset
from tests.families.test_config_errors import refused_field
from tests.golden_cases import load_case

LFM2, LFM2_MOE = (load_case(name).config for name in ("lfm2", "lfm2_moe"))


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


@pytest.mark.parametrize(("preset", "parts", "sizes"), [("lfm2-1.2b", "2048 channels", "[1, 2, 4, 8, 16, 32]")])
def test_devices_share_heads_or_channels(preset: str, parts: str, sizes: str):
    config = parse_config(load_preset(preset) or {})
    with pytest.raises(ConfigError, match=f"{parts} of a recurrent state") as raised:
        fit_devices(config, 3)
    assert f"sizes that work: {sizes}" in str(raised.value)


def test_channels_of_convolutions_are_split():
    specs = param_specs(fit_devices(parse_config(LFM2), 4))["layers"][0]
    assert specs["conv"].axes == (None, "channels") and specs["bcx"]["weight"].axes == (None, None, "channels")


@pytest.mark.parametrize(
    ("config", "split", "whole"),
    [(LFM2, ("bcx", "o", "gate_up", "down"), ("bcx.bias", "o.bias", "conv", "conv_bias"))],
)
def test_quantization_leaves_small_parameters_whole(config: dict[str, Any], split: Any, whole: Any):
    model = choose_schemes(parse_config(config), "int8_per_channel_weight_only", None)
    names = {name.removeprefix("layers.0.") for name in list_params(model) if name.startswith("layers.0.")}
    parts = {f"{name}.weight.{part}" for name in split for part in ("values", "scales")}
    assert names == {"attn_norm.weight", "mlp_norm.weight"} | parts | set(whole)

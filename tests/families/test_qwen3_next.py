"""Qwen3-Next and Qwen 3.5: what their files are read for, what is refused, and where devices cut them."""

from __future__ import annotations

import logging
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from jaxserve.core.layers.attention import AttentionConfig
from jaxserve.core.models.decoder import fit_devices
from jaxserve.errors import ConfigError
from jaxserve.families.registry import ignored_weights, list_params, param_specs, parse_config, weight_sources
from jaxserve.features.quantization.schemes import choose_schemes
from jaxserve.presets import load_preset
from tests.families.rotations import drop_sections
from tests.families.test_config_errors import refused_field
from tests.golden_cases import load_case

NEXT, DENSE, MOE = (load_case(name).config for name in ("qwen3_next", "qwen3_5", "qwen3_5_moe"))


def wrap(text: dict[str, Any], **outer: Any) -> dict[str, Any]:
    """The config.json of a multimodal model, as published."""
    name = text["model_type"].removesuffix("_text")
    architecture = {"qwen3_5": "Qwen3_5", "qwen3_5_moe": "Qwen3_5Moe"}[name]
    rope = text["rope_parameters"] | {"mrope_section": [1, 1, 0], "mrope_interleaved": True}
    text = text | {"rope_parameters": rope, "mtp_num_hidden_layers": 1, "attn_output_gate": True}
    found = {"model_type": name, "architectures": [f"{architecture}ForConditionalGeneration"], "text_config": text}
    return found | {"vision_config": {"depth": 2}, "image_token_id": 9} | outer


@pytest.mark.parametrize("text", [DENSE, MOE])
def test_multimodal_checkpoints_are_served_as_text(text: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        config = parse_config(wrap(text))
    assert "the language model; only other inputs need model.visual.*" in caplog.text
    plain = parse_config(text)
    assert replace(drop_sections(config), family=plain.family) == plain
    names = {name for source in weight_sources(config).values() for name in source.names}
    inside = {name.replace("model.", "model.language_model.", 1) for name in find_names(plain) if "lm_head" not in name}
    assert names == inside | {"lm_head.weight"}
    for name in ("model.visual.blocks.0.attn.qkv.weight", "mtp.layers.0.input_layernorm.weight", "mtp.fc.weight"):
        assert any(re.fullmatch(pattern, name) for pattern in ignored_weights(config))


def find_names(config: Any) -> set[str]:
    return {name for source in weight_sources(config).values() for name in source.names}


def test_both_forms_of_projections_make_one_layout() -> None:
    """The rows of a key head stand together, whichever files they come from."""
    config = parse_config(NEXT)
    other = replace(config, family="qwen3_5_moe_text")
    delta = config.layers[0].mixer
    keys, group, size, width = *delta.sizes[:3], delta.value_dim
    rng = np.random.default_rng(0)
    parts = rng.standard_normal((2, keys, size, 24)), rng.standard_normal((2, keys, group * width, 24))
    (q, k), (v, z) = parts
    joined = np.concatenate([q, k, v, z], axis=1).reshape(-1, 24)
    one = list_params(config)["layers.0.qkvz.weight"].source.build(joined)
    apart = np.concatenate([each.reshape(-1, 24) for each in (q, k, v)]), z.reshape(-1, 24)
    np.testing.assert_array_equal(one, list_params(other)["layers.0.qkvz.weight"].source.build(*apart))
    b, a = rng.standard_normal((2, keys, group, 24))
    one = list_params(config)["layers.0.ba.weight"].source.build(np.concatenate([b, a], axis=1).reshape(-1, 24))
    both = (each.reshape(-1, 24) for each in (b, a))
    np.testing.assert_array_equal(one, list_params(other)["layers.0.ba.weight"].source.build(*both))


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"linear_num_value_heads": 3}, "linear_num_value_heads"),
        ({"linear_num_key_heads": 0}, "linear_num_key_heads"),
        ({"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim"),
        ({"attn_output_gate": False}, "attn_output_gate"),
        ({"mamba_ssm_dtype": "bfloat16"}, "mamba_ssm_dtype"),
        ({"layer_types": ["linear_attention", "sliding_attention", "full_attention"]}, "layer_types"),
        ({"full_attention_interval": 0}, "full_attention_interval"),
        ({"hidden_act": "elu"}, "hidden_act"),
        ({"linear_gate_rank": 4}, "linear_gate_rank"),
    ],
)
def test_what_the_layers_cannot_be_is_refused_by_key(change: dict[str, Any], field: str) -> None:
    assert refused_field(NEXT | change) == field


def test_devices_share_key_heads() -> None:
    config = parse_config(NEXT | {"linear_num_key_heads": 4, "linear_num_value_heads": 8, "num_attention_heads": 8})
    with pytest.raises(ConfigError, match="4 key heads of a recurrent state") as raised:
        fit_devices(config, 8)
    assert raised.value.field == "tensor_parallel_size" and "sizes that work: [1, 2, 4]" in str(raised.value)
    specs = param_specs(fit_devices(config, 4))["layers"][0]
    assert specs["conv"].axes == (None, "kv_heads") and specs["decay"].axes == ("heads",)


def test_the_states_of_the_published_model_take_the_bytes_of_its_sizes() -> None:
    """32 heads of 128 x 128 in float32 and three inputs of 8,192 channels, in three of four layers."""
    config = parse_config(load_preset("qwen3.6-35b-a3b") or {})
    ((state, num_layers),) = config.states
    inputs, heads = state.arrays
    assert num_layers == 30 and (inputs.shape, inputs.dtype) == ((16, 3 * 512), "bfloat16")
    assert (heads.shape, heads.dtype) == ((32, 128, 128), "float32")
    attention = config.layers[3].mixer
    assert isinstance(attention, AttentionConfig) and attention.gated and len(config.kv_groups[0].layers) == 10
    assert config.layers[3].rope is not None and config.layers[3].rope.rotary_dim == 64


def test_quantization_leaves_small_parameters_whole() -> None:
    config = choose_schemes(parse_config(DENSE), "int8_per_channel_weight_only", None)
    names = {name.removeprefix("layers.0.") for name in list_params(config) if name.startswith("layers.0.")}
    whole = {"ba.weight", "conv", "decay", "decay_bias", "out_norm", "attn_norm.weight", "mlp_norm.weight"}
    split = {f"{name}.weight.{part}" for name in ("qkvz", "o", "gate_up", "down") for part in ("values", "scales")}
    assert names == whole | split


@pytest.mark.parametrize(
    ("model_type", "words"),
    [
        ("mamba", "Mamba layers, whose recurrent state is not served yet"),
        ("rwkv", "RWKV layers"),
        ("zamba2", "Mamba layers"),
        ("kimi_linear", "Kimi Delta Attention"),
        ("bailing_moe_v3", "Kimi Delta Attention"),
        ("falcon_h1", "Mamba layers"),
        ("qwen4_exp", "an indexer and hyper connections"),
        ("glm5_next", "an indexer"),
    ],
)
def test_other_recurrent_models_are_refused_by_their_kind(model_type: str, words: str) -> None:
    for extra in ({}, {"vision_config": {"depth": 1}}, {"num_experts": 8}):
        with pytest.raises(ConfigError, match=words) as raised:
            parse_config({"model_type": model_type} | extra)
        assert raised.value.field == "model_type"

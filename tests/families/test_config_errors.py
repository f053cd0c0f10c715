"""Configs that must be refused, and by which name."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.core.layers.norm import normalize
from jaxserve.core.models.hf_config import HFConfig, override_config
from jaxserve.errors import ConfigError
from jaxserve.families.registry import FAMILIES, ignored_weights, parse_config, weight_sources
from tests.examples import scale_examples

FOLDER = Path(__file__).resolve().parents[2] / "configs" / "models"
LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
LONGROPE = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}


def refused_field(config: object) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_config(config)
    return caught.value.field


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"model_type": "mamba"}, "model_type"),
        ({"model_type": 3}, "model_type"),
        ({"architectures": ["LlamaForTokenClassification"]}, "architectures"),
        ({"model_type": None, "architectures": ["GPT2LMHeadModel"]}, "architectures"),
        ({"num_experts": 8}, "num_experts"),
        ({"sliding_window": 128}, "sliding_window"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"is_encoder_decoder": True}, "is_encoder_decoder"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"hidden_act": "elu"}, "hidden_act"),
        ({"hidden_act": ["silu"]}, "hidden_act"),
        ({"vocab_size": None}, "vocab_size"),
        ({"vocab_size": "128"}, "vocab_size"),
        ({"vocab_size": True}, "vocab_size"),
        ({"hidden_size": 0}, "hidden_size"),
        ({"hidden_size": 62}, "head_dim"),
        ({"hidden_size": 3}, "head_dim"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"head_dim": 15}, "head_dim"),
        ({"rms_norm_eps": -1e-6}, "rms_norm_eps"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        ({"attention_bias": 1}, "attention_bias"),
        ({"torch_dtype": "int8"}, "torch_dtype"),
        ({"dtype": "float64"}, "dtype"),
        ({"eos_token_id": ["</s>"]}, "eos_token_id"),
        ({"rope_theta": 0}, "rope_theta"),
        ({"rope_scaling": "linear"}, "rope_scaling"),
        ({"rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}}, "rope_type"),
        ({"rope_scaling": {"type": "linear"}}, "rope_parameters.factor"),
        ({"rope_scaling": {"type": "linear", "low_freq_factor": 1.0}}, "rope_parameters.factor"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0, "alpha": 1.0}}, "rope_parameters.alpha"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        (
            {"rope_scaling": {"type": "llama3", "factor": 8.0, "low_freq_factor": 4, "high_freq_factor": 4}},
            "high_freq_factor",
        ),
        ({"rope_scaling": LONGROPE | {"long_factor": [1.0] * 7}}, "rope_parameters.long_factor"),
        ({"rope_scaling": LONGROPE | {"short_factor": [0.0] * 8}}, "rope_parameters.short_factor"),
    ],
)
def test_the_refused_key_is_named(change: dict[str, object], field: str):
    assert refused_field(LLAMA | change) == field


@pytest.mark.parametrize("key", ["vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"])
def test_a_missing_size_is_named(key: str):
    assert refused_field({name: value for name, value in LLAMA.items() if name != key}) == key


@pytest.mark.parametrize("config", [[], None, "llama", 3])
def test_something_else_than_an_object_is_refused(config: object):
    assert refused_field(config) == "config.json"


@pytest.mark.parametrize(
    "change",
    [
        {"use_cache": False, "pretraining_tp": 2, "attention_dropout": 0.1, "bos_token_id": 5, "auto_map": {}},
        {"unknown_but_null": None, "is_encoder_decoder": False, "quantization_config": None},
        {"architectures": None},
        {"model_type": None},
        # what published files of Llama's form carry beside the architecture: SmolLM2, Vicuna
        {"is_llama_config": True, "rope_interleaved": False, "transformers.js_config": {"dtype": "q4"}},
        {"max_sequence_length": 2048},
        {"partial_rotary_factor": 1.0},
        # notes of libraries, words of the tokenizer, and switches of other families that are off
        {"_model_name_or_path": "x/y", "_flash_attn_2_enabled": True, "_anything": {"a": 1}},
        {"model_max_length": 4096, "pad_token": "<pad>", "base_model": "x/y", "additional_special_tokens": ["<a>"]},
        {"use_sliding_window": False, "num_experts": 0, "label": "", "layer_types": [], "extra": {}, "cap": 0.0},
    ],
)
def test_harmless_keys_change_nothing(change: dict[str, object]):
    assert parse_config(LLAMA | change) == parse_config(LLAMA)


@pytest.mark.parametrize(
    ("key", "value"), [("use_sliding_window", True), ("my_label", "v3"), ("num_experts", 8), ("cap", float("nan"))]
)
def test_the_refusal_of_an_unknown_key_says_how_to_drop_it(key: str, value: object):
    with pytest.raises(ConfigError) as caught:
        parse_config(LLAMA | {key: value})
    assert f"drop it by hf_overrides={{{key!r}: None}}" in str(caught.value) and len(str(caught.value)) < 400
    assert parse_config(override_config(LLAMA | {key: value}, {key: None})) == parse_config(LLAMA)


def test_overrides_reach_the_decoder_of_a_larger_model():
    outer = {"model_type": "gemma3", "text_config": {"experts": 2, "rope_theta": 1e4}, "eos_token_id": 1}
    changed = override_config(outer, {"experts": None, "rope_theta": 1e6, "eos_token_id": 106, "bos_token_id": 2})
    text = {"rope_theta": 1e6}
    assert changed == {"model_type": "gemma3", "text_config": text, "eos_token_id": 106, "bos_token_id": 2}
    assert outer["text_config"] == {"experts": 2, "rope_theta": 1e4}, "the file's own values stay"
    with pytest.raises(ConfigError, match=r"^hf_overrides: config.json has no 'expert' to drop; .*experts"):
        override_config(outer, {"expert": None})


def test_overrides_of_inner_configs_are_merged():
    outer = {"text_config": {"a": 1, "rope_theta": 1e4}, "vision_config": {"depth": 2, "x": {"y": 1}}, "z": {"u": 1}}
    changed = override_config(
        outer, {"vision_config": {"depth": 3, "x": {}}, "text_config": {"a": None}, "z": {"v": 2}}
    )
    assert changed == {"text_config": {"rope_theta": 1e4}, "vision_config": {"depth": 3, "x": {}}, "z": {"v": 2}}
    changed = override_config(outer, {"text_config": {"a": 2}, "rope_theta": 1e6, "vision_config": None})
    assert changed == {"text_config": {"a": 2, "rope_theta": 1e6}, "z": {"u": 1}}
    with pytest.raises(ConfigError, match=r"^hf_overrides: vision_config has no 'deep' to drop; its keys are depth, x"):
        override_config(outer, {"vision_config": {"deep": None}})
    assert override_config({"a": 1}, {"vision_config": {"depth": 1}}) == {"a": 1, "vision_config": {"depth": 1}}


def test_keys_of_qwen3_coder_change_nothing():
    qwen3 = json.loads((FOLDER / "qwen3-30b-a3b.json").read_text())
    coder = {"qkv_bias": False, "shared_expert_intermediate_size": 0, "use_qk_norm": True}
    assert parse_config(qwen3 | coder) == parse_config(qwen3)


def test_families_refuse_what_they_do_not_compute():
    gemma3 = json.loads((FOLDER / "gemma-3-1b.json").read_text())
    assert refused_field(gemma3 | {"attn_logit_softcapping": 50.0}) == "attn_logit_softcapping"
    assert refused_field(gemma3 | {"use_bidirectional_attention": True, "sliding_window": 1}) == "sliding_window"
    assert refused_field(gemma3 | {"layer_types": ["chunked_attention"] * 26}) == "layer_types"
    assert refused_field(gemma3 | {"sliding_window": None}) == "sliding_window"
    assert refused_field(gemma3 | {"rope_parameters": {"rope_type": "default"}}) == "rope_parameters"
    phi3 = json.loads((FOLDER / "phi-3-mini-4k.json").read_text())
    assert refused_field(phi3 | {"attention_bias": True}) == "attention_bias"
    assert refused_field(phi3 | {"rope_scaling": {"type": "linear", "factor": 2.0}}) == "rope_type"
    qwen2 = json.loads((FOLDER / "qwen2.5-0.5b.json").read_text())
    assert refused_field(qwen2 | {"layer_types": ["sliding_attention"] * 24}) == "sliding_window"


@pytest.mark.parametrize(
    ("name", "change", "field"),
    [
        ("olmo-1b", {"clip_qkv": 8.0}, "clip_qkv"),
        ("olmo-2-1b", {"clip_qkv": 8.0}, "clip_qkv"),
        ("olmo-3-7b", {"sliding_window": None}, "sliding_window"),
        ("olmo-3-7b", {"layer_types": ["chunked_attention"] * 32}, "layer_types"),
        ("olmo-3-7b", {"rope_parameters": {"rope_type": "default"}}, "rope_parameters"),
        ("smollm3-3b", {"no_rope_layers": [1] * 35}, "no_rope_layers"),
        ("smollm3-3b", {"no_rope_layers": ["1"] * 36}, "no_rope_layers"),
        ("smollm3-3b", {"no_rope_layers": None, "no_rope_layer_interval": 0}, "no_rope_layer_interval"),
        (
            "smollm3-3b",
            {"use_sliding_window": True, "layer_types": ["sliding_attention"] * 36},
            "sliding_window",
        ),
        ("glm-4-9b-0414", {"head_dim": 127}, "head_dim"),
        ("glm-4-9b-0414", {"partial_rotary_factor": 0.0}, "partial_rotary_factor"),
        ("glm-4-9b-0414", {"partial_rotary_factor": 1.5}, "partial_rotary_factor"),
        ("glm-4-9b-0414", {"mlp_bias": True}, "mlp_bias"),
        ("granite-3.3-8b", {"logits_scaling": 0.0}, "logits_scaling"),
        ("granite-3.3-8b", {"embedding_multiplier": "12"}, "embedding_multiplier"),
        ("granite-3.3-8b", {"residual_multiplier": None}, "residual_multiplier"),
        ("granite-3.3-8b", {"attention_multiplier": float("nan")}, "attention_multiplier"),
        ("command-r-plus", {"logit_scale": None}, "logit_scale"),
        ("command-r-plus", {"use_qk_norm": 1}, "use_qk_norm"),
        ("command-r-plus", {"sliding_window": 4096}, "sliding_window"),
        ("command-r7b", {"sliding_window": None}, "sliding_window"),
        ("command-r7b", {"use_qk_norm": True}, "use_qk_norm"),
        ("command-r7b", {"use_parallel_block": False}, "use_parallel_block"),
        ("command-r7b", {"use_gated_activation": False}, "use_gated_activation"),
        ("command-r7b", {"position_embedding_type": "rope_neox"}, "position_embedding_type"),
        ("command-r7b", {"rotary_pct": 0.5}, "rotary_pct"),
        ("starcoder2-3b", {"mlp_type": "gated"}, "mlp_type"),
        ("starcoder2-3b", {"norm_type": "rms_norm"}, "norm_type"),
        ("starcoder2-3b", {"hidden_act": "elu"}, "hidden_act"),
        ("pythia-160m", {"rotary_pct": 0.3}, "head_dim"),  # 19 of 64 dimensions
        ("pythia-160m", {"use_parallel_residual": "yes"}, "use_parallel_residual"),
        ("pythia-160m", {"num_experts": 8}, "num_experts"),
    ],
)
def test_newer_families_refuse_what_they_do_not_compute(name: str, change: dict[str, object], field: str):
    assert refused_field(json.loads((FOLDER / f"{name}.json").read_text()) | change) == field


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("olmo-2-1b", {"num_key_value_heads": None}),
        ("olmo-3-7b", {"layer_types": None}),
        ("smollm3-3b", {"layer_types": None, "no_rope_layers": None, "no_rope_layer_interval": None}),
        ("smollm3-3b", {"no_rope_layers": [1, 1, 1, 0] * 10, "sliding_window": 4096}),
        ("glm-4-9b-0414", {"partial_rotary_factor": None}),
        ("granite-3.3-8b", {"head_dim": 128}),
        ("command-r7b", {"sliding_window_pattern": None}),
        ("command-r7b", {"layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * 8}),
        ("starcoder2-3b", {"tie_word_embeddings": True, "activation_function": "gelu", "layer_norm_epsilon": 1e-5}),
        ("pythia-160m", {"rotary_pct": None, "rotary_emb_base": None, "use_parallel_residual": None}),
        ("pythia-160m", {"partial_rotary_factor": 0.25, "rope_theta": 10000, "attention_bias": True}),
    ],
)
def test_what_newer_families_leave_out_has_the_reference_default(name: str, change: dict[str, object]):
    raw = json.loads((FOLDER / f"{name}.json").read_text())
    changed = {key: value for key, value in (raw | change).items() if value is not None}
    assert parse_config(changed) == parse_config(raw)


@pytest.mark.parametrize("length", [0, -1, 2049])
def test_lengths_the_positions_do_not_support_are_refused(length: int):
    with pytest.raises(ConfigError, match="max_model_len"):
        parse_config(LLAMA).with_max_model_len(length)


def test_scaled_positions_reach_further():
    linear = parse_config(LLAMA | {"rope_scaling": {"type": "linear", "factor": 4.0}})
    assert linear.max_supported_len == 8192 and linear.max_model_len == 2048
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
    assert parse_config(LLAMA | {"rope_scaling": yarn}).max_supported_len == 4096


def test_windowed_layers_do_not_bound_the_length():
    """They know distances below their window only; the default stays what every layer was trained on."""
    gemma3 = json.loads((FOLDER / "gemma-3-1b.json").read_text()) | {"max_position_embeddings": 4096}
    config = parse_config(gemma3 | {"rope_scaling": {"rope_type": "linear", "factor": 8.0}})
    assert (config.max_supported_len, config.default_max_model_len) == (32768, 4096)
    assert config.with_max_model_len(32768).windows[:6] == (512,) * 5 + (None,)
    with pytest.raises(ConfigError, match="1 to 32768"):
        config.with_max_model_len(32769)
    wide = parse_config(gemma3 | {"rope_scaling": {"rope_type": "linear", "factor": 8.0}, "sliding_window": 4097})
    assert wide.max_supported_len == 4096
    mistral = parse_config(json.loads((FOLDER / "mistral-7b-v0.1.json").read_text()))
    assert mistral.max_supported_len == mistral.default_max_model_len == 32768


def test_partial_rotation_is_refused_where_the_reference_has_none():
    whole = ("llama-2-7b", "mistral-7b-v0.1", "qwen2.5-7b", "qwen3-8b", "gemma-2-2b", "gemma-3-1b")
    whole += (
        "olmo-1b",
        "olmo-2-1b",
        "olmo-3-7b",
        "smollm3-3b",
        "granite-3.3-8b",
        "command-r-plus",
        "command-r7b",
        "starcoder2-3b",
    )
    for name in whole:
        raw = json.loads((FOLDER / f"{name}.json").read_text())
        assert parse_config(raw | {"partial_rotary_factor": 1.0}) == parse_config(raw)
        assert refused_field(raw | {"partial_rotary_factor": 0.5}) == "partial_rotary_factor"


def test_keys_of_another_rope_type_are_left_out_with_a_warning(caplog: pytest.LogCaptureFixture):
    linear = {"rope_type": "linear", "factor": 4.0}
    config = parse_config(LLAMA | {"rope_scaling": linear | {"low_freq_factor": 1.0, "beta_fast": 32}})
    assert config == parse_config(LLAMA | {"rope_scaling": linear})
    (record,) = caplog.records
    assert "'linear' has no low_freq_factor, beta_fast" in record.getMessage()
    gemma3 = json.loads((FOLDER / "gemma-3-1b.json").read_text()) | {"rope_scaling": {"factor": 8.0}}
    assert parse_config(gemma3).layers[5].rope.scaling is None


def test_heads_need_not_fill_the_hidden_size():
    mistral = json.loads((FOLDER / "mistral-7b-v0.1.json").read_text())
    mistral = {key: value for key, value in mistral.items() if key != "head_dim"} | {"num_hidden_layers": 1}
    config = parse_config(mistral | {"hidden_size": 100, "num_attention_heads": 6, "num_key_value_heads": 2})
    assert config.layers[0].attention.head_dim == 16
    assert weight_sources(config)["layers.0.o.weight"].shapes == ((100, 96),)
    assert weight_sources(config)["layers.0.qkv.weight"].shapes[0] == (96, 100)


@pytest.mark.parametrize("name", ["llama-2-7b", "gemma-2-2b", "gemma-3-1b"])
def test_an_epsilon_of_zero_is_none_but_for_zeros(name: str):
    norm = parse_config(json.loads((FOLDER / f"{name}.json").read_text()) | {"rms_norm_eps": 0.0}).norm
    x, weight = np.array([[3e-12, -4e-12], [0.0, 0.0]], np.float32), np.zeros(2, np.float32)
    if not norm.unit_offset:
        weight = weight + 1
    np.testing.assert_allclose(
        normalize(norm, {"weight": weight}, x), [np.array([3, -4]) / np.sqrt(12.5), [0, 0]], rtol=1e-6
    )


def test_multimodal_gemma3_is_read_for_its_decoder():
    text = {"model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34}
    outer = {"model_type": "gemma3", "text_config": text, "vision_config": {"x": 1}, "eos_token_id": [1, 106]}
    config = parse_config(outer | {"torch_dtype": "bfloat16"})
    assert (config.num_layers, config.vocab_size, config.layers[0].attention.num_kv_heads) == (34, 262208, 4)
    assert (config.eos_token_ids, config.dtype) == ((1, 106), "bfloat16")
    assert refused_field(outer | {"text_config": text | {"model_type": "llama"}}) == "text_config.model_type"
    assert refused_field(outer | {"text_config": text | {"experts": 2}}) == "experts"


@pytest.mark.parametrize("name", ["mistral3", "llava"])
def test_checkpoints_with_pixtrals_tower_have_mistrals_text(name: str):
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "vocab_size": 128, "head_dim": 32}
    text = {"model_type": "mistral", "sliding_window": None, **sizes}
    outer = {"model_type": name, "text_config": text | {"is_composition": True}, "vision_config": {"x": 1}}
    outer |= {"image_token_index": 10, "vision_feature_layer": -1, "torch_dtype": "bfloat16"}
    config, plain = parse_config(outer), parse_config(text | {"torch_dtype": "bfloat16"})
    assert replace(config, family=plain.family) == plain
    names = {name for source in weight_sources(config).values() for name in source.names}
    assert "language_model.lm_head.weight" in names
    assert all(name.startswith(("language_model.model.", "language_model.lm_head.")) for name in names)
    for tensor in ("vision_tower.patch_conv.weight", "multi_modal_projector.linear_1.weight"):
        assert any(re.fullmatch(pattern, tensor) for pattern in ignored_weights(config))
    for other in ("llama", "ministral3", "mistral4"):
        assert refused_field(outer | {"text_config": text | {"model_type": other}}) == "text_config.model_type"


class RecordingKeys(dict):
    """A family's keys that remembers which were asked for."""

    def __init__(self, keys: Mapping[str, object]) -> None:
        super().__init__(keys)
        self.read: set[str] = set()

    def __getitem__(self, key: str) -> object:
        self.read.add(key)
        return super().__getitem__(key)


@pytest.mark.parametrize(
    "name",
    [
        "llama-2-7b",
        "mistral-7b-v0.1",
        "qwen2.5-7b",
        "qwen3-8b",
        "gemma-2-2b",
        "gemma-3-1b",
        "phi-3-mini-4k",
        "olmo-1b",
        "olmo-2-1b",
        "olmo-3-7b",
        "smollm3-3b",
        "glm-4-9b-0414",
        "granite-3.3-8b",
        "command-r-plus",
        "command-r7b",
        "starcoder2-3b",
        "pythia-160m",
        "mimo-7b",
    ],
)
def test_every_known_key_is_read(name: str):
    """A key in a family's list that nothing reads would be accepted and ignored."""
    raw = json.loads((FOLDER / f"{name}.json").read_text())
    family = FAMILIES[raw["model_type"]]
    keys = RecordingKeys(family.keys)
    family.parse(
        HFConfig(raw | {"use_sliding_window": True} if "use_sliding_window" in keys else raw, keys, family.ignored_keys)
    )
    assert set(keys) - keys.read <= {"dtype", "torch_dtype"}  # these two are read straight from the file


BIG = 10**400
ODD_VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 300),
    st.sampled_from([BIG, -BIG, 2**31, 1e308, 1e-308, float("inf"), float("nan"), "", "silu", "default", "yarn"]),
    st.lists(st.sampled_from([0, 1.0, "full_attention", None, BIG]), max_size=3),
    st.dictionaries(
        st.sampled_from(["rope_type", "type", "factor", "rope_theta", "full_attention", "short_factor"]),
        st.one_of(st.sampled_from(["linear", "dynamic", "yarn", "longrope", None, BIG, 0]), st.floats(), st.just({})),
        max_size=3,
    ),
)


HARD_TO_READ = (
    *("llama-3.1-8b", "gemma-3-1b", "phi-3-mini-128k", "qwen2.5-0.5b"),
    *("olmo-3-7b", "smollm3-3b", "glm-4-9b-0414", "granite-3.3-8b", "command-r-plus", "command-r7b", "pythia-160m"),
)


@settings(max_examples=scale_examples(300), deadline=None)
@given(data=st.data(), name=st.sampled_from(HARD_TO_READ))
def test_any_value_is_understood_or_refused(data: st.DataObject, name: str):
    raw = json.loads((FOLDER / f"{name}.json").read_text())
    keys = sorted(FAMILIES[raw["model_type"]].keys | raw.keys())
    for key in data.draw(st.lists(st.sampled_from(keys), min_size=1, max_size=2)):
        raw[key] = data.draw(ODD_VALUES, label=key)
    try:
        config = parse_config(raw)
    except ConfigError as error:
        assert error.field and len(str(error)) < 1500
        return
    assert config.max_supported_len >= config.max_model_len
    for rope in {kind.rope for kind in config.layers} - {None}:
        assert np.isfinite(rope.inverse_frequencies(config.max_supported_len)).all()
        assert 0 < rope.attention_factor < np.inf

"""Gemma 4: whose pages a layer reads, and what is wrong with a config, named."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from jaxserve.core.models.base import DecoderConfig
from jaxserve.core.models.decoder import fit_devices
from jaxserve.core.runtime.memory import GIB, plan_cache
from jaxserve.errors import ConfigError
from jaxserve.families.registry import ignored_weights, list_params, parse_config
from jaxserve.presets import load_preset
from pallas_kernels import KVSpec
from tests.golden_cases import GOLDENS

SHARED = json.loads((GOLDENS / "gemma4_text_shared" / "config.json").read_text())
EQUAL = json.loads((GOLDENS / "gemma4_text" / "config.json").read_text())
OWN_TYPES = ["sliding_attention", "full_attention"] * 2


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"enable_moe_block": True}, "num_experts"),
        ({"enable_moe_block": True, "num_experts": 4, "top_k_experts": 5}, "top_k_experts"),
        ({"num_experts": 8}, "num_experts"),
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention"),
        ({"vocab_size_per_layer_input": 84}, "vocab_size_per_layer_input"),
        ({"layer_types": ["sliding_attention"] * 5}, "layer_types"),
        ({"num_kv_shared_layers": 3}, "num_kv_shared_layers"),
        ({"num_kv_shared_layers": 5}, "num_kv_shared_layers"),
        ({"sliding_window": None}, "sliding_window"),
        ({"per_layer_config": {"2": {"head_dim": 16}}}, "per_layer_config"),
        ({"per_layer_config": {"2": {"head_dim": 16}, "4": {"head_dim": 8}}}, "per_layer_config"),
        ({"per_layer_config": {"2": {"hidden_size": 8}, "4": {"hidden_size": 8}}}, "per_layer_config"),
        ({"per_layer_config": {"2": 16, "4": 16}}, "per_layer_config"),
        ({"rope_parameters": {"full_attention": {"rope_type": "proportional", "partial_rotary_factor": 2.0}}}, None),
    ],
)
def test_a_config_is_refused_by_its_key(change: dict[str, Any], field: str | None) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(SHARED | change)
    assert caught.value.field == (field or "partial_rotary_factor")


def test_published_configs_spell_the_heads_of_full_layers_in_another_way() -> None:
    published = {key: value for key, value in EQUAL.items() if key != "per_layer_config"}
    published |= {"global_head_dim": 16, "num_global_key_value_heads": 1}
    assert parse_config(published) == parse_config(EQUAL)
    assert parse_config(published | {"attention_k_eq_v": False}).layers[2].attention.num_kv_heads == 2


def test_transformers_fills_up_the_numbers_of_layers() -> None:
    types = ["sliding_attention"] * 9 + ["full_attention"] + ["sliding_attention"] * 9 + ["full_attention"]
    deep = EQUAL | {"num_hidden_layers": 20, "layer_types": types}
    heads = EQUAL["per_layer_config"]["2"]
    plain, filled = (deep | {"per_layer_config": dict.fromkeys(keys, heads)} for keys in (("9", "19"), ("09", "19")))
    assert parse_config(plain) == parse_config(filled)
    with pytest.raises(ConfigError, match="per_layer_config"):
        parse_config(deep | {"per_layer_config": dict.fromkeys(("90", "19"), heads)})


def test_multimodal_checkpoints_are_read_for_their_decoder() -> None:
    config = parse_config({"model_type": "gemma4", "text_config": SHARED, "vision_config": {"x": 1}})
    names = {name for parameter in list_params(config).values() for name in parameter.source.names}
    assert all(name.startswith("model.language_model.") for name in names)
    assert "model.language_model.embed_tokens_per_layer.weight" in names
    for name in (
        "model.vision_tower.x",
        "model.embed_audio.y",
        "model.language_model.layers.4.self_attn.k_norm.weight",
    ):
        assert any(re.fullmatch(pattern, name) for pattern in ignored_weights(config)), name


def plan(config: DecoderConfig) -> Any:
    specs = [KVSpec(group.memory.num_kv_heads, group.memory.head_dim, 64, "bfloat16") for group in config.kv_groups]
    return plan_cache(config, specs=specs, max_chunk=512, num_devices=1, budget=GIB)


def test_layers_that_borrow_pages_take_none() -> None:
    config = parse_config(load_preset("gemma-4-e2b")).with_max_model_len(8192)
    assert config.page_owners[13:] == (13, 14, *([13] * 4 + [14]) * 4)
    assert [(len(group.layers), group.num_owners) for group in config.kv_groups] == [(7, 3), (28, 12)]
    made = plan(config)
    (full, pages), (windowed, others) = zip(made.pools, made.num_pages, strict=True)
    assert (full[0].head_dim, full[1]) == (512, 3 * pages)
    assert (windowed[0].head_dim, windowed[1]) == (256, 12 * others)
    assert made.layout.offsets[34] == made.layout.offsets[14] == 2 * pages
    assert made.layout.offsets[33] == made.layout.offsets[13] == 11 * others


def test_devices_need_heads_of_both_sizes() -> None:
    config = parse_config(load_preset("gemma-4-31b"))
    with pytest.raises(ConfigError, match="5 does not fit 32 query heads, 16 KV heads, 4 KV heads"):
        fit_devices(config, 5)
    wide = fit_devices(config, 8)
    assert [attention.num_kv_heads for attention in wide.attentions] == [16, 8]
    assert [attention.kv_repeats for attention in wide.attentions] == [1, 2]

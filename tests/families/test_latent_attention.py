"""Latent attention: what is wrong with a config or a file by name, and the rows that pages hold."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxserve.config import EngineConfig
from jaxserve.core.layers.moe import MoEConfig
from jaxserve.core.models.decoder import fit_devices
from jaxserve.core.runtime.startup import plan_pools
from jaxserve.errors import ConfigError
from jaxserve.families.registry import parse_config
from jaxserve.features.choose import make_shapes
from jaxserve.presets import load_preset
from pallas_kernels import KVSpec, page_bytes
from tests.families.test_experts import change_files, check_refused
from tests.golden_cases import GOLDENS


def read(name: str) -> dict[str, Any]:
    return json.loads((GOLDENS / name / "config.json").read_text())


@pytest.mark.parametrize(
    ("case", "change", "field"),
    [
        ("deepseek_v3", {"kv_lora_rank": None}, "kv_lora_rank"),
        ("deepseek_v3", {"qk_rope_head_dim": 7}, "qk_rope_head_dim"),
        ("deepseek_v3", {"qk_nope_head_dim": 0}, "qk_nope_head_dim"),
        ("deepseek_v3", {"v_head_dim": "8"}, "v_head_dim"),
        ("deepseek_v3", {"q_lora_rank": -1}, "q_lora_rank"),
        ("deepseek_v3", {"num_key_value_heads": 2}, "num_key_value_heads"),
        ("deepseek_v3", {"rope_interleave": 1}, "rope_interleave"),
        ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func"),
        ("deepseek_v3", {"topk_method": "greedy"}, "topk_method"),
        ("deepseek_v3", {"moe_layer_freq": 2}, "moe_layer_freq"),
        ("deepseek_v2", {"topk_method": "noaux_tc"}, "topk_method"),
        ("deepseek_v2", {"norm_topk_prob": True}, "norm_topk_prob"),
        ("deepseek_v2", {"mlp_bias": True}, "mlp_bias"),
        ("deepseek_v2", {"n_group": 3}, "n_group"),
        ("glm4_moe_lite", {"mlp_layer_types": ["dense"]}, "mlp_layer_types"),
        ("glm4_moe_lite", {"mlp_layer_types": ["dense", "thick"]}, "mlp_layer_types"),
        ("glm4_moe_lite", {"mlp_layer_types": [["dense"], "dense"]}, "mlp_layer_types"),
    ],
)
def test_a_config_is_refused_by_its_key(case: str, change: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(read(case) | change)
    assert caught.value.field == field


@pytest.mark.parametrize(("key", "value"), [("llama_4_scaling_beta", "much"), ("mscale_all_dim", -1.0)])
def test_a_rope_object_is_refused_by_its_key(key: str, value: object) -> None:
    config = read("mistral4")
    with pytest.raises(ConfigError) as caught:
        parse_config(config | {"rope_parameters": config["rope_parameters"] | {key: value}})
    assert caught.value.field == f"rope_parameters.{key}"


def test_sparse_attention_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"deepseek_v32.* is not supported \(it attends sparsely"):
        parse_config(read("deepseek_v3") | {"model_type": "deepseek_v32", "index_topk": 2048})


@pytest.mark.parametrize(
    ("tensor", "array", "said"),
    [
        ("kv_b_proj", None, "lacks 1 of .*kv_b_proj"),
        ("kv_b_proj", np.zeros((64, 11), np.float32), r"kv_b_proj.weight: has shape \(64, 11\)"),
        ("q_a_proj", None, "lacks 1 of .*q_a_proj"),
        ("q_proj", np.zeros((56, 24), np.float32), "has no place for: .*q_proj"),
    ],
)
def test_a_tensor_that_is_missing_odd_or_too_much_is_named(
    tensor: str, array: np.ndarray | None, said: str, tmp_path: Path
) -> None:
    name = f"model.layers.1.self_attn.{tensor}.weight"
    check_refused(change_files(tmp_path / "a", "deepseek_v3", {name: array}), said)


def test_the_layer_for_multi_token_prediction_is_left_out(tmp_path: Path) -> None:
    odd = {"model.layers.2.eh_proj.weight": np.zeros((24, 48), np.float32), "other": np.zeros(3, np.float32)}
    folder = change_files(tmp_path / "a", "deepseek_v3", odd)
    check_refused(folder, "holds 1 tensors the model has no place for: .*other")


def test_kimi_is_deepseek_v3_by_another_name() -> None:
    config = read("deepseek_v3")
    assert parse_config(config | {"model_type": "kimi_k2"}) == parse_config(config)


def test_which_layers_have_experts() -> None:
    config = read("glm4_moe_lite")
    for change, sparse in (({}, [True, False]), ({"mlp_layer_types": None}, [False, True])):
        layers = parse_config(config | change).layers
        assert [isinstance(kind.mlp, MoEConfig) for kind in layers] == sparse


@pytest.mark.parametrize(
    ("preset", "size"), [("deepseek-v3", 1152), ("kimi-k2", 1152), ("glm-4.7-flash", 1152), ("mistral-small-4", 640)]
)
def test_a_token_takes_one_row_of_a_layer(preset: str, size: int) -> None:
    attention = parse_config(load_preset(preset)).layers[0].attention
    spec = KVSpec(attention.num_kv_heads, attention.head_dim, 1, "bfloat16", value_dim=attention.value_dim)
    assert page_bytes(spec) == size


def test_yarn_is_part_of_the_scale() -> None:
    plain = 192**-0.5
    assert parse_config(load_preset("deepseek-v3")).layers[0].attention.scale == pytest.approx(
        plain * (0.1 * math.log(40) + 1) ** 2
    )
    assert parse_config(load_preset("glm-4.7-flash")).layers[0].attention.scale == 256**-0.5


def test_sizes_that_divide_are_named() -> None:
    config = parse_config(load_preset("glm-4.7-flash"))
    with pytest.raises(ConfigError, match=r"8 does not fit 20 query heads.*sizes that work: \[1, 2, 4\]"):
        fit_devices(config, 8)


@pytest.mark.parametrize("devices", [1, 4])
def test_every_device_holds_the_rows(devices: int) -> None:
    """A pool has one KV head for each device; test_tensor_parallel.py shows that pools are cut by heads."""
    options = EngineConfig.from_options(max_num_seqs=4, max_num_batched_tokens=64, tensor_parallel_size=devices)
    model = fit_devices(parse_config(read("deepseek_v3")).with_max_model_len(160), devices)
    shapes = make_shapes(options, model, "cpu", "cpu")
    (pool,) = plan_pools(shapes, budget=2**24).pool_shapes
    assert pool[1:] == (devices, shapes.specs[0].page_size, 12 + 8)

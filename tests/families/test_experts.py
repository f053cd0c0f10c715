"""What is wrong with a mixture of experts, named: in its config, on its devices, in its files."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxserve import LLM
from jaxserve.core.layers.moe import MoEConfig
from jaxserve.core.models.decoder import fit_devices
from jaxserve.core.sharding import DEFAULT_RULES, make_mesh
from jaxserve.core.weights import load_safetensors
from jaxserve.errors import ConfigError, WeightsError
from jaxserve.families.registry import ignored_weights, param_specs, parse_config, weight_sources
from tests.golden_cases import GOLDENS

QWEN = json.loads((GOLDENS / "qwen2_moe" / "config.json").read_text())


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"num_experts_per_tok": 9}, "num_experts_per_tok"),
        ({"num_experts": 0}, "num_experts"),
        ({"num_experts": 10**6}, "num_experts"),
        ({"num_experts": 8, "num_local_experts": 4}, "num_local_experts"),
        ({"moe_intermediate_size": "16"}, "moe_intermediate_size"),
        ({"mlp_only_layers": 1}, "mlp_only_layers"),
        ({"mlp_only_layers": [True]}, "mlp_only_layers"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step"),
        ({"norm_topk_prob": "yes"}, "norm_topk_prob"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"shared_expert_intermediate_size": 0}, "shared_expert_intermediate_size"),
        ({"n_group": 2}, "n_group"),
        ({"hidden_act": "xielu"}, "hidden_act"),
    ],
)
def test_a_config_is_refused_by_its_key(change: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(QWEN | change)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"swiglu_limit": 0}, "swiglu_limit"),
        ({"swiglu_alpha": "1.7"}, "swiglu_alpha"),
        ({"sliding_window": None}, "sliding_window"),
        ({"layer_types": ["full_attention"]}, "layer_types"),
    ],
)
def test_a_config_of_gpt_oss_is_refused_by_its_key(change: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(json.loads((GOLDENS / "gpt_oss" / "config.json").read_text()) | change)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"n_routed_experts": 0}, "n_routed_experts"),
        ({"n_group": 3}, "n_group"),
        ({"n_group": 8, "topk_group": 8}, "n_group"),
        ({"topk_group": 5}, "topk_group"),
        ({"topk_group": 1, "num_experts_per_tok": 3}, "num_experts_per_tok"),
        ({"num_experts_per_tok": 9, "topk_group": 4}, "num_experts_per_tok"),
        ({"routed_scaling_factor": 0}, "routed_scaling_factor"),
        ({"first_k_dense_replace": -1}, "first_k_dense_replace"),
        ({"n_shared_experts": None}, "n_shared_experts"),
        ({"scoring_func": "softmax"}, "scoring_func"),
    ],
)
def test_a_config_of_glm_is_refused_by_its_key(change: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(json.loads((GOLDENS / "glm4_moe" / "config.json").read_text()) | change)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"attn_type_list": [1, 0]}, "attn_type_list"),
        ({"attn_type_list": [1]}, "attn_type_list"),
        ({"rotary_dim": 16, "rope_parameters": None}, "partial_rotary_factor"),
        ({"use_qk_norm": False}, "use_qk_norm"),
        ({"qk_norm_type": "per_head"}, "qk_norm_type"),
        ({"use_routing_bias": False}, "use_routing_bias"),
        ({"scoring_func": "softmax"}, "scoring_func"),
        ({"shared_intermediate_size": 16}, "shared_intermediate_size"),
    ],
)
def test_a_config_of_minimax_is_refused_by_its_key(change: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(json.loads((GOLDENS / "minimax_m2" / "config.json").read_text()) | change)
    assert caught.value.field == field


def test_published_minimax_configs_spell_the_rotation_in_another_way() -> None:
    given = json.loads((GOLDENS / "minimax_m2" / "config.json").read_text())
    published = given | {"rope_parameters": None, "rope_theta": 10000, "rotary_dim": 4}
    assert parse_config(published) == parse_config(given)
    assert parse_config(given | {"rotary_dim": 8}) == parse_config(given)  # as in the reference


def test_minimax_may_have_three_layers_for_multi_token_prediction() -> None:
    config = parse_config(json.loads((GOLDENS / "minimax_m2" / "config.json").read_text()))
    names = [f"model.layers.{index}.eh_proj.weight" for index in range(7)]
    unread = [any(re.fullmatch(pattern, name) for pattern in ignored_weights(config)) for name in names]
    assert unread == [False, False, True, True, True, False, False]


def test_the_layer_for_multi_token_prediction_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    name = "model.layers.2.eh_proj.weight"  # behind the last of two layers
    folder = change_files(tmp_path / "a", "glm4_moe", {name: np.zeros((24, 48), np.float32)})
    config = parse_config(json.loads((folder / "config.json").read_text()))
    arguments = folder, param_specs(config), weight_sources(config), ignored_weights(config)
    with caplog.at_level("INFO", "jaxserve"):
        load_safetensors(*arguments, mesh=make_mesh(1), rules=DEFAULT_RULES)
    assert f"1 tensors of the checkpoint hold weights that the model does not use: {name!r}" in caplog.text
    other = name.replace("2", "3")
    folder = change_files(tmp_path / "b", "glm4_moe", {other: np.zeros((24, 48), np.float32)})
    check_refused(folder, f"has no place for: .*{other}")


def test_a_gpt_oss_config_says_less_than_its_model() -> None:
    """Published files name no dtype; older ones no rotation."""
    given = json.loads((GOLDENS / "gpt_oss" / "config.json").read_text())
    config = parse_config({key: value for key, value in given.items() if key not in ("dtype", "rope_parameters")})
    assert config.dtype == "bfloat16" and config.layers[0].rope.scaling.factor == 32.0
    assert [kind.window for kind in config.layers] == [16, None]


def test_which_layers_have_experts() -> None:
    layers = parse_config(QWEN | {"mlp_only_layers": [], "decoder_sparse_step": 2}).layers
    assert [isinstance(kind.mlp, MoEConfig) for kind in layers] == [False, True, False]


def test_sizes_that_divide_are_named() -> None:
    config = parse_config(QWEN)
    with pytest.raises(ConfigError, match=r"3 does not fit .* 8 experts, .*sizes that work: \[1, 2, 4\]"):
        fit_devices(config, 3, expert_parallel=True)
    with pytest.raises(ConfigError, match=r"16 columns of an expert, 20 feed-forward columns"):
        fit_devices(config, 3)


def test_a_dense_model_has_no_experts_to_place() -> None:
    with pytest.raises(ConfigError, match=r"enable_expert_parallel: .*llama has no experts"):
        LLM(str(GOLDENS / "llama_gqa"), skip_tokenizer_init=True, enable_expert_parallel=True)


def change_files(folder: Path, name: str, tensors: dict[str, np.ndarray | None]) -> Path:
    """A golden checkpoint with other tensors; None takes one out."""
    shutil.copytree(GOLDENS / name, folder, dirs_exist_ok=True)
    file = folder / "model.safetensors"
    stored = load_file(file) | tensors
    save_file({key: value for key, value in stored.items() if value is not None}, file)
    return folder


def check_refused(folder: Path, said: str) -> None:
    """The checkpoint is refused with these words."""
    with pytest.raises(WeightsError, match=said):
        LLM(str(folder), skip_tokenizer_init=True, max_model_len=64)


EXPERT = "model.layers.2.mlp.experts.5.up_proj.weight"


@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        ({EXPERT: None}, f"lacks 1 of .*{EXPERT}"),
        ({EXPERT: np.zeros((17, 24), np.float32)}, rf"{EXPERT}: has shape \(17, 24\)"),
        ({EXPERT.replace("5", "8"): np.zeros((16, 24), np.float32)}, "has no place for: .*layers.2.mlp.experts.8"),
        (
            {"model.layers.2.mlp.experts.down_proj": np.zeros((8, 24, 16), np.float32)},
            "has no place for: .*layers.2.mlp.experts.down_proj",
        ),
    ],
)
def test_an_expert_that_is_missing_odd_or_too_much_is_named(
    tensors: dict[str, np.ndarray | None], said: str, tmp_path: Path
) -> None:
    check_refused(change_files(tmp_path, "qwen2_moe", tensors), said)

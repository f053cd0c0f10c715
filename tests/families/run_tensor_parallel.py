"""Run by test_tensor_parallel.py in a process with four virtual CPU devices, with the names of cases; prints those that
passed."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.core.layers.stack import get_leaf
from jaxserve.core.models.decoder import fit_devices
from jaxserve.core.sharding import make_mesh
from jaxserve.families.registry import parse_config
from tests.families.naive import NaiveRunner, build_params, make_tensors, shard_params
from tests.families.towers import FOLDER, TowerRunner, read_images, read_tower
from tests.features.speculation.drafters import (
    DRAFT_V,
    HEAD,
    D,
    DrafterRunner,
    make_head,
    make_target_params,
    read_target,
    write_files,
)

SIZES = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 16}
LLAMA = SIZES | {"model_type": "llama", "num_attention_heads": 8, "max_position_embeddings": 64}
EXPERTS = LLAMA | {"num_key_value_heads": 2, "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32}
GPT_OSS = LLAMA | {"model_type": "gpt_oss", "num_key_value_heads": 2, "num_local_experts": 8, "sliding_window": 8}
GPT_OSS |= {"dtype": "float32"}
GLM = LLAMA | {"model_type": "glm4_moe", "num_key_value_heads": 2, "n_routed_experts": 8, "num_experts_per_tok": 2}
GLM |= {"moe_intermediate_size": 32, "n_group": 4, "topk_group": 2}
MINIMAX = LLAMA | {"model_type": "minimax_m2", "num_key_value_heads": 2, "num_local_experts": 8, "rotary_dim": 8}
DEEPSEEK = {key: value for key, value in GLM.items() if key not in ("head_dim", "num_key_value_heads")}
DEEPSEEK |= {"model_type": "deepseek_v3", "q_lora_rank": 24, "kv_lora_rank": 32, "qk_rope_head_dim": 16}
DEEPSEEK |= {"qk_nope_head_dim": 8, "v_head_dim": 16, "attention_bias": True, "first_k_dense_replace": 0}
GEMMA4 = SIZES | {"model_type": "gemma4_text", "num_attention_heads": 8, "num_key_value_heads": 2, "sliding_window": 8}
GEMMA4 |= {"max_position_embeddings": 64, "global_head_dim": 24, "num_hidden_layers": 4, "num_kv_shared_layers": 2}
GEMMA4 |= {"layer_types": ["sliding_attention", "full_attention"] * 2, "attention_k_eq_v": True}
GEMMA4 |= {"num_global_key_value_heads": 1, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 128}
GEMMA4_EXPERTS = GEMMA4 | {"enable_moe_block": True, "num_experts": 8, "top_k_experts": 3, "moe_intermediate_size": 32}
HYBRID = EXPERTS | {"model_type": "qwen3_next"}
HYBRID |= {"shared_expert_intermediate_size": 64, "linear_num_key_heads": 4}
HYBRID |= {"linear_num_value_heads": 8, "linear_key_head_dim": 8, "linear_value_head_dim": 16}
HYBRID |= {"layer_types": ["linear_attention", "full_attention"]}
LFM2 = {**LLAMA, "model_type": "lfm2", "num_key_value_heads": 2, "block_multiple_of": 32, "conv_bias": True}
LFM2 |= {"layer_types": ["conv", "full_attention"]}
GRANITE4 = LLAMA | {"model_type": "granitemoehybrid", "num_key_value_heads": 2, "num_local_experts": 8}
GRANITE4 |= {"shared_intermediate_size": 96, "mamba_n_heads": 8, "mamba_d_state": 12}
GRANITE4 |= {"intermediate_size": 32, "layer_types": ["mamba", "attention"]}
NEMOTRON = {key: value for key, value in LLAMA.items() if key != "num_hidden_layers"} | {"model_type": "nemotron_h"}
NEMOTRON |= {"hybrid_override_pattern": "M*E-", "num_key_value_heads": 2, "mamba_num_heads": 8, "mamba_head_dim": 12}
NEMOTRON |= {"n_groups": 4, "ssm_state_size": 12, "moe_intermediate_size": 32}
NEMOTRON |= {"moe_shared_expert_intermediate_size": 64, "use_bias": True}
OLMO_HYBRID = LLAMA | {"model_type": "olmo_hybrid", "num_key_value_heads": 4, "rope_theta": 1e4}
OLMO_HYBRID |= {"layer_types": ["linear_attention", "full_attention"]}
ENCODER = {key: value for key, value in LLAMA.items() if key != "head_dim"} | {"model_type": "bert"}
MODERNBERT = {**ENCODER, "model_type": "modernbert", "num_hidden_layers": 4, "local_attention": 8}
CASES = {
    "encoder": (ENCODER, "stacked"),
    "encoder_with_windows": (MODERNBERT, "unrolled"),
    "llama": (LLAMA | {"num_key_value_heads": 4, "attention_bias": True, "mlp_bias": True}, "unrolled"),
    "one_kv_head_odd_vocabulary": (
        LLAMA | {"num_key_value_heads": 1, "attention_bias": True, "vocab_size": 131},
        "stacked",
    ),
    "olmo2": (LLAMA | {"model_type": "olmo2", "num_key_value_heads": 2}, "stacked"),
    "cohere": (
        LLAMA | {"model_type": "cohere", "num_key_value_heads": 2, "use_qk_norm": True},
        "stacked",
    ),
    "gemma2": (
        SIZES
        | {"model_type": "gemma2", "num_attention_heads": 8, "num_key_value_heads": 2, "sliding_window": 8}
        | {"max_position_embeddings": 64, "query_pre_attn_scalar": 16},
        "stacked",
    ),
    "heads_of_two_sizes_and_borrowed_pages": (GEMMA4, "stacked"),
    "experts_beside_a_dense_block": (GEMMA4_EXPERTS, "stacked"),
    "slices_of_experts": (
        EXPERTS | {"model_type": "qwen2_moe", "shared_expert_intermediate_size": 64, "mlp_only_layers": [1]},
        "stacked",
    ),
    "whole_experts": (EXPERTS | {"model_type": "qwen3_moe", "norm_topk_prob": True}, "stacked"),
    "whole_experts_unrolled": (
        EXPERTS | {"model_type": "qwen2_moe", "shared_expert_intermediate_size": 64},
        "unrolled",
    ),
    "sinks_and_slices_with_biases": (GPT_OSS, "stacked"),
    "sinks_and_whole_experts_with_biases": (GPT_OSS, "stacked"),
    "sinks_and_biases_unrolled": (GPT_OSS, "unrolled"),
    "groups_of_experts": (GLM | {"first_k_dense_replace": 0}, "stacked"),
    "whole_experts_and_norms_of_projections": (MINIMAX | {"num_experts_per_tok": 3}, "stacked"),
    "latents": (DEEPSEEK, "stacked"),
    "states_by_key_head": (HYBRID, "stacked"),
    "states_by_key_head_unrolled": (HYBRID | {"layer_types": ["full_attention", "linear_attention"]}, "unrolled"),
    "channels_of_convolutions": (LFM2, "stacked"),
    "one_group_on_every_device": (GRANITE4, "stacked"),
    "groups_of_heads_and_experts_without_gates": (NEMOTRON, "stacked"),
    "separate_projections_of_key_heads": (OLMO_HYBRID, "stacked"),
    "latents_of_keys_only_unrolled": (DEEPSEEK | {"q_lora_rank": None}, "unrolled"),
}
DRAFTER = "eagle3"
TOWER = "tower"
EXPERT_PARALLEL = (
    "whole_experts",
    "whole_experts_unrolled",
    "sinks_and_whole_experts_with_biases",
    "whole_experts_and_norms_of_projections",
)


def list_split_axes(leaves: object, *, by_expert: bool) -> dict[str, int]:
    """The axis along which four devices share each large leaf of a layer."""
    attention = {"q_b": -1, "k_b": -3, "v_b": -3, "o": -2}
    if "qkvz" in leaves:
        attention = {"qkvz": -1, "ba": -1, "o": -2}
    elif "zxbcdt" in leaves:
        attention = {"zxbcdt": -1, "o": -2}
    elif "bcx" in leaves:
        attention = {"bcx": -1, "o": -2}
    elif "qkv" in leaves:
        attention = {"qkv": -1, "o": -2}
    if "mlp_norm" not in leaves:
        return attention
    if "experts" not in leaves:
        return attention | {"gate_up" if "gate_up" in leaves else "up": -1, "down": -2}
    experts = {"gate_up": -3, "down": -3} if by_expert else {"gate_up": -1, "down": -2}
    return attention | {f"experts.{name}": axis for name, axis in experts.items()}


def check_case(hf_config: dict[str, object], mode: str, *, by_expert: bool = False) -> None:
    """Greedy decoding of three ragged rows, on one device and on four."""
    config = parse_config(hf_config)
    wide = fit_devices(config, 4, expert_parallel=by_expert)
    tensors = make_tensors(config, seed=3)
    mesh = make_mesh(4)
    params = shard_params(wide, build_params(wide, tensors), mesh, mode)
    for name, axis in list_split_axes(params["layers"][0], by_expert=by_expert).items():
        leaf, _ = get_leaf(params, f"layers.0.{name}.weight")
        assert leaf.addressable_shards[0].data.shape[axis] * 4 == leaf.shape[axis], name
    single = NaiveRunner(config, build_params(config, tensors), 3)
    meshed = NaiveRunner(wide, params, 3, mesh=mesh)
    rng = np.random.default_rng(4)
    rows = [rng.integers(0, config.vocab_size, size).tolist() for size in (1, 13, 22)]
    for _ in range(3):
        expected, got = single.run(rows, pad_to=40), meshed.run(rows, pad_to=40)  # one program for all steps
        for one, four in zip(expected, got, strict=True):
            np.testing.assert_allclose(four, one, rtol=0, atol=1e-4 * np.abs(one).max())
        if not config.generates:
            break
        rows = [[int(logits[-1].argmax())] for logits in expected]
        assert rows == [[int(logits[-1].argmax())] for logits in got]
    pool = meshed.cache[0]
    assert pool.addressable_shards[0].data.shape[1] * 4 == pool.shape[1]


def check_head() -> None:
    """An EAGLE-3 head on one device and on four."""
    with tempfile.TemporaryDirectory() as folder:
        path = write_files(Path(folder), HEAD, make_head())
        target, params = read_target(), make_target_params()
        runners = [DrafterRunner("eagle3", path, target, params, mesh=mesh) for mesh in (None, make_mesh(4))]
    hidden = np.random.default_rng(5).standard_normal((20, 3 * D)).astype(np.float32)
    logits = []
    for runner in runners:
        states = runner.follow(hidden, range(20))
        logits.append(runner.logits(jnp.concatenate([states, runner.run_pass(states[-1:], 3)])))
    np.testing.assert_allclose(logits[1], logits[0], rtol=0, atol=1e-4 * np.abs(logits[0]).max())
    assert runners[1].params["lm_head"]["weight"].addressable_shards[0].data.shape[0] * 4 == DRAFT_V


SPLIT_BY_ROWS = {  # a matrix of each tower
    "qwen3_vl": lambda params: params["merger"]["down"],
    "gemma3": lambda params: params["layers"][1]["down"],
    "mistral3": lambda params: params["projector"]["down"],
}


def check_tower() -> None:
    """The tower of images on one device and on two, which share its heads."""
    for name, find in SPLIT_BY_ROWS.items():
        items, _ = read_images(name)
        single, meshed = (TowerRunner(read_tower(name), FOLDER / name, mesh=mesh) for mesh in (None, make_mesh(2)))
        for one, two in zip(single.run(items), meshed.run(items), strict=True):
            np.testing.assert_allclose(two, one, rtol=0, atol=1e-4 * np.abs(one).max())
        for leaf, axis in ((meshed.params["layers"][0]["qkv"], -1), (find(meshed.params), -2)):
            shard = leaf["weight"].addressable_shards[0].data
            assert shard.shape[axis] * 2 == leaf["weight"].shape[axis]


def main() -> None:
    assert jax.device_count() == 4
    for name in sys.argv[1:]:
        if name == DRAFTER:
            check_head()
        elif name == TOWER:
            check_tower()
        else:
            check_case(*CASES[name], by_expert=name in EXPERT_PARALLEL)
        print(name, flush=True)


if __name__ == "__main__":
    main()

"""Writes GGUF files of tiny models with the package `gguf`, by the rules of llama.cpp's converters: for tests.

Names come from the package's own table. Nothing here is shared with what reads the files.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type

from jaxserve.families.registry import list_params, parse_config

_PERMUTED = ("llama", "granite")
_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(\w+)\.weight")


def make_tensors(config: Mapping[str, Any], seed: int = 0) -> dict[str, np.ndarray]:
    """Random numbers for each tensor of a config.json's model, by Hugging Face's names."""
    rng, found = np.random.default_rng(seed), {}
    for parameter in list_params(parse_config(config)).values():
        for name, shape in zip(parameter.source.names, parameter.source.shapes, strict=True):
            found[name] = rng.standard_normal(shape).astype(np.float32)
    return found


def write_gguf(
    path: Path,
    architecture: str,
    config: Mapping[str, Any],
    tensors: Mapping[str, np.ndarray],
    *,
    choose_type: Callable[[str, np.ndarray], Type] = lambda name, tensor: Type.F32,
    extra: Callable[[gguf.GGUFWriter], None] = lambda writer: None,
    split: int = 0,
    drop: tuple[str, ...] = (),
    old_latent: bool = False,
) -> Path:
    """Writes a model.

    Args:
        choose_type: which type a tensor gets.
        split: the most tensors of a part.
        drop: tensors that are left out.
        old_latent: writes latent attention as converters of 2024 did, with the heads of keys and values in one tensor.
    """
    writer = gguf.GGUFWriter(path, architecture, split_max_tensors=split)
    _write_keys(writer, config, old_latent=old_latent)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(
        ["<unk>", "<s>", "</s>", "t", "h", "th", *(f"t{each}" for each in range(6, config["vocab_size"]))]
    )
    writer.add_token_types([2, 3, 3, *[1] * (config["vocab_size"] - 3)])
    writer.add_token_merges(["t h"])
    writer.add_eos_token_id(2)
    extra(writer)
    for name, tensor in _convert(architecture, config, tensors, old_latent=old_latent).items():
        if name in drop:
            continue
        kind = choose_type(name, tensor) if tensor.ndim > 1 else Type.F32
        writer.add_tensor(name, gguf.quantize(tensor, kind), raw_dtype=kind)
    finish(writer)
    return path if not split else sorted(path.parent.glob(f"{path.stem}-*"))[0]


def finish(writer: gguf.GGUFWriter) -> None:
    """Writes what was added to a writer's file."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _write_keys(writer: gguf.GGUFWriter, config: Mapping[str, Any], *, old_latent: bool = False) -> None:
    heads, kv_heads = config["num_attention_heads"], config.get("num_key_value_heads")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    latent = "kv_lora_rank" in config
    writer.add_head_count_kv(1 if latent and not old_latent else kv_heads or heads)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    size = config.get("head_dim") or config["hidden_size"] // heads
    if latent:
        size = config["qk_rope_head_dim"]
        _write_latent_keys(writer, config, old=old_latent)
    else:
        writer.add_key_length(size)
        writer.add_value_length(size)
    rope = config.get("rope_parameters") or {}
    if "sliding_attention" in rope:
        writer.add_rope_freq_base_swa(rope["sliding_attention"]["rope_theta"])
    rope = rope.get("full_attention", rope)
    writer.add_rope_dimension_count(int(size * (rope.get("partial_rotary_factor") or 1)))
    writer.add_rope_freq_base(rope.get("rope_theta", 10000.0))
    kind = rope.get("rope_type")
    if kind in ("linear", "yarn"):
        writer.add_rope_scaling_type({"linear": gguf.RopeScalingType.LINEAR, "yarn": gguf.RopeScalingType.YARN}[kind])
        writer.add_rope_scaling_factor(rope["factor"])
    if rope.get("mscale_all_dim"):
        writer.add_rope_scaling_yarn_log_mul(0.1 * rope["mscale_all_dim"])
    if kind in ("yarn", "longrope"):
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if kind == "longrope":
        writer.add_rope_scaling_attn_factors(rope["attention_factor"])
    options = {
        "sliding_window": writer.add_sliding_window,
        "attn_logit_softcapping": writer.add_attn_logit_softcapping,
        "final_logit_softcapping": writer.add_final_logit_softcapping,
        "embedding_multiplier": writer.add_embedding_scale,
        "residual_multiplier": writer.add_residual_scale,
        "attention_multiplier": writer.add_attention_scale,
        "logits_scaling": writer.add_logit_scale,
        "num_experts_per_tok": writer.add_expert_used_count,
    }
    for key, add in options.items():
        if config.get(key):
            add(config[key])
    experts = config.get("num_local_experts") or config.get("num_experts")
    if experts:
        writer.add_expert_count(experts)
    if (experts or "n_routed_experts" in config) and config["model_type"] != "mixtral":
        writer.add_expert_feed_forward_length(config.get("moe_intermediate_size", config["intermediate_size"]))


def _write_latent_keys(writer: gguf.GGUFWriter, config: Mapping[str, Any], *, old: bool) -> None:
    """The sizes of DeepSeek's attention, whose stored row counts as one head of keys, and its experts."""
    rank, rotating, values = (config[key] for key in ("kv_lora_rank", "qk_rope_head_dim", "v_head_dim"))
    size = config["qk_nope_head_dim"] + rotating
    writer.add_key_length(size if old else rank + rotating)
    writer.add_value_length(values if old else rank)
    if not old:
        writer.add_key_length_mla(size)
        writer.add_value_length_mla(values)
    writer.add_kv_lora_rank(rank)
    if config["q_lora_rank"]:
        writer.add_q_lora_rank(config["q_lora_rank"])
    writer.add_leading_dense_block_count(config["first_k_dense_replace"])
    writer.add_expert_count(config["n_routed_experts"])
    writer.add_expert_shared_count(config["n_shared_experts"])
    writer.add_expert_weights_scale(config["routed_scaling_factor"])
    writer.add_expert_weights_norm(config["norm_topk_prob"])
    is_second = config["model_type"] == "deepseek_v2"
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SOFTMAX if is_second else gguf.ExpertGatingFuncType.SIGMOID)
    if config["n_group"]:
        writer.add_expert_group_count(config["n_group"])
        writer.add_expert_group_used_count(config["topk_group"])


def _convert(
    architecture: str, config: Mapping[str, Any], tensors: Mapping[str, np.ndarray], *, old_latent: bool
) -> dict[str, np.ndarray]:
    """Returns the tensors as converters write them: renamed, permuted, experts stacked."""
    number = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(number, config["num_hidden_layers"])
    found, experts = _list_factors(config), dict[str, dict[int, np.ndarray]]()
    for name, original in tensors.items():
        tensor, part = original, re.search(r"\.([qk])_proj\.", name)
        if part is not None and architecture in _PERMUTED:
            heads = config["num_attention_heads"] if part[1] == "q" else config["num_key_value_heads"]
            shape = (heads, 2, len(tensor) // heads // 2, *tensor.shape[1:])
            tensor = tensor.reshape(shape).swapaxes(1, 2).reshape(tensor.shape)
        if architecture.startswith("gemma") and name.endswith("norm.weight"):
            tensor = tensor + np.float32(1)
        expert = _EXPERT.fullmatch(name)
        if expert is not None:
            experts.setdefault(f"{expert[1]}.{expert[3]}.weight", {})[int(expert[2])] = tensor
            continue
        if architecture == "gpt-oss" and ".experts." in name:
            found |= _split_gpt_oss(name, tensor)
            continue
        if ".kv_b_proj." in name and not old_latent:
            found |= _split_latent_heads(name, tensor, config)
            continue
        bias = name.replace("correction_bias", "correction.bias")
        own = names.get_name(bias, try_suffixes=(".weight", ".bias"))
        assert own is not None, name
        found[f"{own}.weight" if own.endswith("sinks") else own] = tensor
    for name, each in experts.items():
        own = names.get_name(name, try_suffixes=(".weight",))
        assert own is not None, name
        found[own] = np.stack([each[index] for index in range(len(each))])
    return found


def _split_latent_heads(name: str, tensor: np.ndarray, config: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Keys [heads, rank, size] and values [heads, size, rank] of one tensor."""
    heads = tensor.reshape(config["num_attention_heads"], -1, config["kv_lora_rank"])
    size, layer = config["qk_nope_head_dim"], name.split(".")[2]
    keys = np.ascontiguousarray(heads[:, :size].swapaxes(1, 2))
    return {f"blk.{layer}.attn_k_b.weight": keys, f"blk.{layer}.attn_v_b.weight": np.ascontiguousarray(heads[:, size:])}


def _split_gpt_oss(name: str, tensor: np.ndarray) -> dict[str, np.ndarray]:
    """Experts [E, in, out] and their biases [E, out], where gate and up alternate."""
    layer = name.split(".")[2]
    kind = "bias" if name.endswith("_bias") else "weight"
    tensor = tensor if kind == "bias" else tensor.swapaxes(1, 2)
    parts = {"gate": tensor[:, 0::2], "up": tensor[:, 1::2]} if "gate_up" in name else {"down": tensor}
    return {f"blk.{layer}.ffn_{part}_exps.{kind}": np.ascontiguousarray(each) for part, each in parts.items()}


def _list_factors(config: Mapping[str, Any]) -> dict[str, np.ndarray]:
    rope = config.get("rope_parameters") or {}
    if rope.get("rope_type") == "longrope":
        return {
            f"rope_factors_{length}.weight": np.array(rope[f"{length}_factor"], np.float32)
            for length in ("long", "short")
        }
    if rope.get("rope_type") != "llama3":
        return {}
    layer = parse_config(config).layers[0].rope
    assert layer is not None
    scaled = layer.inverse_frequencies(1)
    plain = 1 / rope["rope_theta"] ** (np.arange(len(scaled)) / len(scaled))
    return {"rope_freqs.weight": (plain / scaled).astype(np.float32)}

"""Writes a trained model as a Hugging Face checkpoint, and reads one back for the evaluation of what was written."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array
from safetensors.flax import load_file, save_file

from demo_lm.model import DemoConfig, Params
from demo_lm.tokens import (
    ASSISTANT,
    ASSISTANT_ID,
    BOS,
    BOS_ID,
    CHAT_TEMPLATE,
    EOS,
    EOS_ID,
    SYSTEM,
    SYSTEM_ID,
    UNK_ID,
    USER,
    USER_ID,
)

MAX_POSITION_EMBEDDINGS = 2048
_NORMS = ("input_layernorm", "post_attention_layernorm")
PROJECTIONS = {
    "self_attn": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "mlp": ("gate_proj", "up_proj", "down_proj"),
}


def export_checkpoint(directory: Path, config: DemoConfig, params: Params, tokenizer: Path) -> None:
    """Writes the three JSON files, `tokenizer.model` and `model.safetensors` into `directory`, which it makes.

    Weights are rounded to bfloat16 and laid out as `[out, in]`, under Hugging Face's names for Llama.
    """
    directory.mkdir(parents=True, exist_ok=True)
    weights = {name: jnp.asarray(value, jnp.bfloat16) for name, value in _rename(config, params).items()}
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    shutil.copyfile(tokenizer, directory / "tokenizer.model")
    _write_json(directory / "config.json", _describe_model(config))
    _write_json(
        directory / "generation_config.json",
        {"bos_token_id": BOS_ID, "eos_token_id": EOS_ID, "do_sample": False},
    )
    _write_json(directory / "tokenizer_config.json", _describe_tokenizer())


def load_checkpoint(directory: Path) -> tuple[DemoConfig, Params]:
    """The inverse of `export_checkpoint`: sizes and float32 parameters that hold bfloat16 values.

    Raises KeyError when the file lacks a tensor that the configuration asks for.
    """
    raw = json.loads((directory / "config.json").read_text())
    config = DemoConfig(**{name: raw[name] for name in DemoConfig.__dataclass_fields__})
    weights = load_file(directory / "model.safetensors")
    params: dict[str, Any] = {
        "embed_tokens": jnp.float32(weights["model.embed_tokens.weight"]),
        "norm": {"scale": jnp.float32(weights["model.norm.weight"])},
    }
    for index in range(config.num_hidden_layers):
        theirs, ours = f"model.layers.{index}", f"layers_{index}"
        for norm in _NORMS:
            params[f"{ours}_{norm}"] = {"scale": jnp.float32(weights[f"{theirs}.{norm}.weight"])}
        for block, names in PROJECTIONS.items():
            params[f"{ours}_{block}"] = {
                name: {"kernel": jnp.float32(weights[f"{theirs}.{block}.{name}.weight"].T)} for name in names
            }
    return config, params


def _rename(config: DemoConfig, params: Params) -> dict[str, Array]:
    weights = {
        "model.embed_tokens.weight": params["embed_tokens"],
        "model.norm.weight": params["norm"]["scale"],
    }
    for index in range(config.num_hidden_layers):
        theirs, ours = f"model.layers.{index}", f"layers_{index}"
        for norm in _NORMS:
            weights[f"{theirs}.{norm}.weight"] = params[f"{ours}_{norm}"]["scale"]
        for block, names in PROJECTIONS.items():
            for name in names:
                weights[f"{theirs}.{block}.{name}.weight"] = params[f"{ours}_{block}"][name]["kernel"].T
    return weights


def _describe_model(config: DemoConfig) -> dict[str, Any]:
    sizes = {name: getattr(config, name) for name in DemoConfig.__dataclass_fields__}
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **sizes,
        "attention_bias": False,
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
        "hidden_act": "silu",
        "max_position_embeddings": MAX_POSITION_EMBEDDINGS,
        "mlp_bias": False,
        "rope_scaling": None,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
    }


def _describe_tokenizer() -> dict[str, Any]:
    special = {UNK_ID: "<unk>", BOS_ID: BOS, EOS_ID: EOS, USER_ID: USER, ASSISTANT_ID: ASSISTANT, SYSTEM_ID: SYSTEM}
    flags = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}
    return {
        "tokenizer_class": "LlamaTokenizer",
        "add_bos_token": True,
        "add_eos_token": False,
        "add_prefix_space": False,
        "added_tokens_decoder": {str(token_id): {"content": text, **flags} for token_id, text in special.items()},
        "additional_special_tokens": [USER, ASSISTANT, SYSTEM],
        "bos_token": BOS,
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "eos_token": EOS,
        "legacy": False,
        "model_max_length": MAX_POSITION_EMBEDDINGS,
        "sp_model_kwargs": {},
        "unk_token": "<unk>",
    }


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")

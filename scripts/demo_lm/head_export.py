"""Writes a trained head as an EAGLE-3 checkpoint, as heads are published, and reads one back for its measurement."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
from safetensors.numpy import load_file, save_file

from demo_lm.export import MAX_POSITION_EMBEDDINGS
from demo_lm.head import HeadConfig
from demo_lm.model import Params
from demo_lm.tokens import BOS_ID, EOS_ID

AUX_KEY = "eagle_aux_hidden_state_layer_ids"
ARCHITECTURE = "LlamaForCausalLMEagle3"
_NORMS = {
    "input_layernorm": "midlayer.input_layernorm",
    "hidden_norm": "midlayer.hidden_norm",
    "post_attention_layernorm": "midlayer.post_attention_layernorm",
    "norm": "norm",
}
_PROJECTIONS = {
    "fc": "fc",
    **{name: f"midlayer.self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "o_proj")},
    **{name: f"midlayer.mlp.{name}" for name in ("gate_proj", "up_proj", "down_proj")},
}


def export_head(directory: Path, config: HeadConfig, params: Params, draft_ids: np.ndarray) -> None:
    """Writes `config.json` and `model.safetensors` into `directory`, which it makes.

    Weights are bfloat16, `[out, in]`, and the embedding is left out: it is the target's. `d2t` (int64) is what to add
    to a draft id to get the target's id; `t2d` (bool) marks the target's ids that can be drafted.
    """
    directory.mkdir(parents=True, exist_ok=True)
    weights = {f"{theirs}.weight": params[ours]["scale"] for ours, theirs in _NORMS.items()}
    weights |= {f"{theirs}.weight": params[ours]["kernel"].T for ours, theirs in _PROJECTIONS.items()}
    weights["lm_head.weight"] = params["lm_head"]
    tensors = {name: np.ascontiguousarray(value, ml_dtypes.bfloat16) for name, value in weights.items()}
    drafted = draft_ids.astype(np.int64)
    tensors["d2t"] = drafted - np.arange(len(drafted))
    tensors["t2d"] = np.isin(np.arange(config.vocab_size), drafted)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(_describe_head(config), indent=2) + "\n")


def load_head(directory: Path) -> tuple[HeadConfig, Params, np.ndarray]:
    """The inverse of `export_head`: sizes, float32 parameters that hold bfloat16 values, and int32 draft ids.

    Raises KeyError when the file lacks a tensor or the configuration a size.
    """
    raw = json.loads((directory / "config.json").read_text())
    sizes = {name: raw[name] for name in HeadConfig.__dataclass_fields__ if name != "aux_layers"}
    config = HeadConfig(**sizes, aux_layers=tuple(raw[AUX_KEY]))
    tensors = load_file(directory / "model.safetensors")
    params: dict[str, Any] = {
        ours: {"scale": jnp.float32(tensors[f"{theirs}.weight"])} for ours, theirs in _NORMS.items()
    }
    for ours, theirs in _PROJECTIONS.items():
        params[ours] = {"kernel": jnp.float32(tensors[f"{theirs}.weight"].T)}
    params["lm_head"] = jnp.float32(tensors["lm_head.weight"])
    draft_ids = (tensors["d2t"] + np.arange(config.draft_vocab_size)).astype(np.int32)
    return config, params, draft_ids


def _describe_head(config: HeadConfig) -> dict[str, Any]:
    sizes = {name: getattr(config, name) for name in HeadConfig.__dataclass_fields__ if name != "aux_layers"}
    return {
        "architectures": [ARCHITECTURE],
        "model_type": "llama",
        **sizes,
        "num_hidden_layers": 1,
        AUX_KEY: list(config.aux_layers),
        "attention_bias": False,
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
        "hidden_act": "silu",
        "max_position_embeddings": MAX_POSITION_EMBEDDINGS,
        "mlp_bias": False,
        "rope_scaling": None,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }

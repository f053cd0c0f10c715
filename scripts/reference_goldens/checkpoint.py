"""Random checkpoints of a golden case: weights, files, and the older spelling of config.json."""

from __future__ import annotations

import copy
import json
import shutil
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, Mistral4ForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from .mxfp4 import is_packed, pack_checkpoint, round_values
from .spec import SMALL, Case

_UNLISTED = {"mistral4": Mistral4ForCausalLM}  # published with an eye, so AutoModelForCausalLM does not know it

Config = Any
Model = Any


def build_config(case: Case, overrides: dict[str, Any] | None = None) -> Config:
    """The transformers config of `case`, some keys replaced by `overrides`."""
    # Rope dictionaries are edited in place by the config classes, so each config gets its own copy.
    keys = copy.deepcopy({**SMALL, **case.config, **(overrides or {})})
    if case.family == "gpt_neox":
        keys.pop("num_key_value_heads")  # the family has no such key
    return AutoConfig.for_model(case.family, **keys)


def build_model(config: Config) -> Model:
    """An eager-attention f32 model with unset weights."""
    unlisted = _UNLISTED.get(config.model_type)
    make = AutoModelForCausalLM.from_config if unlisted is None else unlisted._from_config
    return make(config, attn_implementation="eager", dtype=torch.float32).eval()


def fix_rope_length(model: Model, seq_len: int | None) -> None:
    """Evaluates dynamic rope scaling at `seq_len` for good, whatever length the model later sees.

    transformers recomputes the frequencies as a sequence grows while cached keys keep the older ones, so its
    result depends on how the sequence was cut into forward passes. Pinning the length removes that.
    """
    if seq_len is None:
        return
    rotary = model.model.rotary_emb
    inv_freq, rotary.attention_scaling = ROPE_INIT_FUNCTIONS["dynamic"](model.config, seq_len=seq_len)
    rotary.inv_freq.copy_(inv_freq)
    rotary.rope_type = "default"


def choose_norm_centre(case: Case, name: str) -> float:
    """The mean of a norm's stored weights.

    A tied head favours the token it just read, for ever, unless sublayers outweigh the embedding in the residual
    stream: so tied cases have small embeddings, and large weights in Gemma's post norms and the final norm. Gemma 4
    does not divide scores by the root of a head's size: small norms of q and k keep its attention soft.
    """
    is_gemma, is_gemma4 = case.family.startswith("gemma"), case.family.startswith("gemma4")
    is_hybrid = case.family.startswith(("qwen3_next", "qwen3_5")) and not name.endswith("linear_attn.norm.weight")
    scale = 1.0
    if name in ("model.norm.weight", "model.embedding_norm.weight", "model.norm_f.weight"):
        scale = case.final_norm
    elif is_gemma and "post_" in name:
        scale = 3.0
    elif is_gemma4 and ("q_norm" in name or "k_norm" in name):
        scale = 0.5
    # Hybrids and older Gemmas add one to what is stored.
    return scale - 1.0 if is_hybrid or (is_gemma and not is_gemma4) else scale


def draw_weight(case: Case, name: str, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Random values of one parameter, a function of (seed, name) only; rounded to the checkpoint's dtype."""
    rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
    values = rng.standard_normal(shape)
    if name.endswith("bias"):
        values = 0.3 * values
    elif name.endswith("sinks"):
        pass
    elif name.endswith("A_log"):
        values = values - 2.0  # states that last for some tokens
    elif name.endswith("router.scale"):
        values = 10.0 + 2.0 * values  # its router divides by the root of D
    elif name.endswith(("layer_scalar", "per_expert_scale")):
        values = 1.0 + 0.2 * values
    elif "norm" in name:
        values = choose_norm_centre(case, name) + 0.2 * values
    elif any(part in name for part in ("embed_tokens", "embed_in", "embeddings")):
        values = case.embed_std * values
    elif "lm_head" in name:
        values = case.head_std * values
    else:
        values = case.linear_std * values
    dtype = getattr(torch, case.dtype)
    drawn = torch.from_numpy(values.astype(np.float32)).to(dtype).to(torch.float32)
    return round_values(drawn) if case.experts == "mxfp4" and is_packed(name) else drawn


def fill_weights(case: Case, model: Model, seed: int) -> None:
    """Sets every parameter of `model` from `seed`."""
    with torch.no_grad():
        learned = ("e_score_correction_bias", "expert_bias", "layer_scalar")
        buffers = [each for each in model.named_buffers() if each[0].endswith(learned)]
        for name, parameter in [*model.named_parameters(), *buffers]:
            parameter.copy_(draw_weight(case, name, tuple(parameter.shape), seed))


def save_checkpoint(case: Case, model: Model, folder: Path) -> None:
    """Writes config.json, the safetensors files (with an index when sharded) and generation_config.json."""
    if folder.exists():
        shutil.rmtree(folder)
    stored = copy.deepcopy(model).to(getattr(torch, case.dtype))
    options = {"max_shard_size": case.shard_size} if case.shard_size else {}
    stored.save_pretrained(folder, save_original_format=case.experts != "joined", **options)
    if case.experts == "mxfp4":
        pack_checkpoint(folder)
    if case.legacy_config:
        keys = json.loads((folder / "config.json").read_text())
        text = json.dumps(spell_config_old_style(keys), indent=2, sort_keys=True) + "\n"
        (folder / "config_legacy.json").write_text(text)


def load_checkpoint(folder: Path, case: Case, config_name: str = "config.json") -> Model:
    """The f32 model of the files in `folder`; 16-bit weights are widened, nothing is computed in 16 bits."""
    config = AutoConfig.from_pretrained(folder / config_name)
    model = (
        _UNLISTED.get(config.model_type, AutoModelForCausalLM)
        .from_pretrained(folder, config=config, attn_implementation="eager", dtype=torch.float32)
        .eval()
    )
    fix_rope_length(model, case.rope_seq_len)
    return model


def spell_config_old_style(keys: dict[str, Any]) -> dict[str, Any]:
    """The same config as transformers 4 wrote it: rope_theta, rope_scaling, torch_dtype, layer patterns."""
    old = copy.deepcopy(keys)
    old["transformers_version"] = "4.40.0"
    old["torch_dtype"] = old.pop("dtype")
    rope = old.pop("rope_parameters")
    if old["model_type"] == "gemma3_text":
        old["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
        old["sliding_window_pattern"] = old.pop("_sliding_window_pattern")
    rope = rope.get("full_attention", rope)
    theta, share = rope.pop("rope_theta"), rope.pop("partial_rotary_factor", None)
    if old["model_type"] == "gpt_neox":
        old["rotary_emb_base"], old["rotary_pct"] = theta, share
    else:
        old["rope_theta"] = theta
    if old["model_type"] == "glm4":
        old["partial_rotary_factor"] = share
    old["rope_scaling"] = spell_rope_scaling_old_style(old["model_type"], rope)
    spell_layers_old_style(old)
    if old["model_type"] == "qwen2" and old["sliding_window"] is None:
        old["sliding_window"] = 16  # switched off by use_sliding_window, as in published Qwen2 files
    return old


def spell_rope_scaling_old_style(model_type: str, rope: dict[str, Any]) -> dict[str, Any] | None:
    """What `rope_scaling` held, of rope parameters without the base."""
    rope_type = rope.pop("rope_type")
    if rope_type == "default":
        return None
    if rope_type == "llama3" or model_type in ("gemma3_text", "olmo3"):  # younger than the key's renaming
        return {"rope_type": rope_type, **rope}
    if model_type == "phi3":
        return {"type": rope_type, **{key: rope[key] for key in ("short_factor", "long_factor")}}
    return {"type": rope_type, **rope}


def spell_layers_old_style(old: dict[str, Any]) -> None:
    """Takes out what `old` says of each layer where older keys, or the family, say the same."""
    if old["model_type"] in ("qwen2", "gemma2", "gemma3_text", "olmo3", "smollm3", "cohere2"):
        old.pop("layer_types")  # derived from max_window_layers, a pattern's length or the family's pattern then
    if old["model_type"] == "smollm3":
        interval = old["no_rope_layer_interval"]
        if old["no_rope_layers"] == [int((i + 1) % interval != 0) for i in range(old["num_hidden_layers"])]:
            old.pop("no_rope_layers")
    if old["model_type"] == "cohere2":
        old |= {
            "sliding_window_pattern": 4,
            "layer_switch": 4,
            "order_of_interleaved_layers": "local_attn_first",
            "position_embedding_type": "rope_gptj",
            "rotary_pct": 1.0,
            "use_embedding_sharing": True,
            "use_gated_activation": True,
            "use_parallel_block": True,
            "use_parallel_embedding": True,
        }

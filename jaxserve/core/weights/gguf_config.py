"""Makes a config.json of a GGUF file's metadata and of the types and shapes of its tensors."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxserve.core.weights.gguf_architectures import ARCHITECTURES, Architecture, choose_architecture
from jaxserve.core.weights.gguf_names import TensorName, find_form, list_names
from jaxserve.errors import ConfigError, shorten
from jaxserve.gguf_file import GGUFFile, GGUFTensor, list_end_tokens, open_gguf

_log = logging.getLogger(__name__)

# Keys below the architecture's name that change nothing here, or are read below by name.
_OTHER_KEYS = frozenset({"vocab_size", "tensor_data_layout", "rope.scaling.finetuned", "attention.causal"})
_READ_KEYS = _OTHER_KEYS | {"attention.key_length", "attention.value_length", "rope.dimension_count"}
_LATENT_KEYS = _READ_KEYS | {"attention.key_length_mla", "attention.value_length_mla", "expert_gating_func"}
_SCALING = "rope.scaling."
_SCALING_KEYS = {
    "factor": "factor",
    "original_context_length": "original_max_position_embeddings",
    "attn_factor": "attention_factor",
    "yarn_log_multiplier": "mscale_all_dim",
    "yarn_beta_fast": "beta_fast",
    "yarn_beta_slow": "beta_slow",
}
_LLAMA_FACTORS, _LONG_FACTORS, _SHORT_FACTORS = (
    f"{name}.weight" for name in ("rope_freqs", "rope_factors_long", "rope_factors_short")
)
_GROUPS = {  # how compressed-tensors names the forms of matrices that keep their bits
    "int8": ("int-quantized", "int", 8),
    "int4": ("pack-quantized", "int", 4),
    "float4": ("mxfp4-pack-quantized", "float", 4),
}
_LARGE_GEMMAS = {"gemma2": 46, "gemma3_text": 62}  # layers of those whose scale is not that of a head
_PARTS = ("key", "value")
FACTORS = frozenset({_LLAMA_FACTORS, _LONG_FACTORS, _SHORT_FACTORS})


def find_architecture(file: GGUFFile) -> tuple[str, Architecture]:
    """Returns the name and the architecture of a file; ConfigError for one that is not read."""
    name, found = file.metadata.get("general.architecture"), choose_architecture(file.metadata)
    if found is None:
        message = f"{shorten(name)} is not read from GGUF files; known are {', '.join(ARCHITECTURES)}"
        raise ConfigError(f"{message}. Use the original repository, in safetensors", field="general.architecture")
    return str(name), found


def read_gguf_config(path: Path) -> dict[str, Any]:
    """Returns the config.json that describes the GGUF file at `path` to its family.

    Raises:
        ConfigError: an architecture or a key that is not read; `field` is the key.
        WeightsError: as `open_gguf`, and for tensors that no architecture has.
    """
    from jaxserve.families.registry import FAMILIES

    file = open_gguf(path)
    name, architecture = find_architecture(file)
    keys = {key[len(name) + 1 :]: value for key, value in file.metadata.items() if key.startswith(f"{name}.")}
    config = {"model_type": architecture.model_type, "architectures": [architecture.class_name]}
    config |= architecture.fixed | _read_keys(name, architecture, keys)
    embedding = file.tensors.get("token_embd.weight")
    config |= {
        "vocab_size": embedding.shape[0] if embedding is not None else keys.get("vocab_size"),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "dtype": "float32" if _has_only_floats(file) else "bfloat16",
        "eos_token_id": list_end_tokens(file.metadata) or None,
        "bos_token_id": file.metadata.get("tokenizer.ggml.bos_token_id"),
    }
    known = FAMILIES[architecture.model_type].keys
    for key, tensor in (("attention_bias", "blk.0.attn_q.bias"), ("mlp_bias", "blk.0.ffn_up.bias")):
        if key in known and architecture.model_type not in ("phi3", "gpt_oss"):
            config[key] = tensor in file.tensors
    if architecture.latent:
        if keys.get("expert_gating_func", 1) not in (1, 2):
            message = f"must be 1 (softmax) or 2 (sigmoid), not {shorten(keys['expert_gating_func'])}"
            raise ConfigError(message, field=f"{name}.expert_gating_func", value=keys["expert_gating_func"])
        config |= _read_latent_heads(name, config, keys)
    else:
        config |= _read_heads(name, config, keys, known)
    scaling = _read_scaling(file, architecture, keys, config)
    config |= {"rope_scaling": scaling} if scaling else {}
    names = list_names(file, architecture)
    _log_expanded(file, names, architecture, str(config["dtype"]))
    quantization = _describe_quantization(names, architecture)
    return config | ({"quantization_config": quantization} if quantization else {})


def _read_keys(name: str, architecture: Architecture, keys: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the values of keys that config.json has, too; ConfigError for an unknown key, unless it is off."""
    found, others = {}, _LATENT_KEYS if architecture.latent else _READ_KEYS
    for key, value in keys.items():
        own = architecture.find_key(key)
        if own is not None:
            found[own] = _shorten_float(value)
        elif value and key not in others and not key.startswith(_SCALING):
            message = f"{shorten(value)} is not supported for the architecture {name}"
            raise ConfigError(message, field=f"{name}.{key}", value=value)
    if keys.get("attention.causal") is False:
        raise ConfigError("only true is supported", field=f"{name}.attention.causal", value=False)
    return found


def _shorten_float(value: Any) -> Any:
    """Returns a number that files keep in 32 bits as its shortest text says it: 1e-05 in place of 9.99999974e-06."""
    return float(str(np.float32(value))) if isinstance(value, float) else value


def _read_heads(
    name: str, config: Mapping[str, Any], keys: Mapping[str, Any], known: Mapping[str, object]
) -> dict[str, Any]:
    """Returns the sizes of heads, what of them rotates and, where the family asks, the number that scales products."""
    heads, hidden = config.get("num_attention_heads"), config.get("hidden_size")
    if not isinstance(heads, int) or not isinstance(hidden, int) or heads < 1:
        field = f"{name}.attention.head_count"
        raise ConfigError(f"must be a number for all layers, not {shorten(heads)}", field=field, value=heads)
    size = keys.get("attention.key_length", hidden // heads)
    if keys.get("attention.value_length", size) != size:
        field = f"{name}.attention.value_length"
        raise ConfigError(f"must be {shorten(size)}, as keys have", field=field, value=keys["attention.value_length"])
    found = {"head_dim": size, "num_key_value_heads": config.get("num_key_value_heads", heads)}
    rotating = keys.get("rope.dimension_count", size)
    if isinstance(rotating, int) and isinstance(size, int) and size > 0:
        share = rotating / size
        found |= {"partial_rotary_factor": share} if share != 1 or known.get("partial_rotary_factor") else {}
    if "query_pre_attn_scalar" in known:
        is_large = config.get("num_hidden_layers") == _LARGE_GEMMAS[str(config["model_type"])]
        found["query_pre_attn_scalar"] = hidden // heads if is_large else size
    return found


def _read_latent_heads(name: str, config: Mapping[str, Any], keys: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the sizes of heads of latent attention, which newer files have under names of their own."""
    rotating = keys.get("rope.dimension_count")
    key, value = (keys.get(f"attention.{part}_length_mla", keys.get(f"attention.{part}_length")) for part in _PARTS)
    if not all(isinstance(size, int) for size in (rotating, key, value)) or not 0 < rotating < key:
        message = f"must be numbers, the first above the second, not {shorten(key)} and {shorten(rotating)}"
        raise ConfigError(message, field=f"{name}.attention.key_length_mla and rope.dimension_count", value=key)
    sizes = {"qk_nope_head_dim": key - rotating, "qk_rope_head_dim": rotating, "v_head_dim": value}
    return sizes | {"num_key_value_heads": config.get("num_attention_heads")}


def _read_scaling(
    file: GGUFFile, architecture: Architecture, keys: Mapping[str, Any], config: dict[str, Any]
) -> dict[str, Any] | None:
    """Returns `rope_scaling`: by its type, or with a divisor for each frequency where files have those as tensors."""
    kind = keys.get(f"{_SCALING}type", "linear" if f"{_SCALING}factor" in keys else "none")
    given = {key: _shorten_float(keys[_SCALING + key]) for key in _SCALING_KEYS if _SCALING + key in keys}
    scaling = {_SCALING_KEYS[key]: value for key, value in given.items()}
    original = scaling.get("original_max_position_embeddings")
    if _LONG_FACTORS in file.tensors:
        if architecture.model_type == "phi3":
            config["original_max_position_embeddings"] = original
        factors = {"long_factor": _LONG_FACTORS, "short_factor": _SHORT_FACTORS}
    elif _LLAMA_FACTORS in file.tensors:
        factors = {"long_factor": _LLAMA_FACTORS, "short_factor": _LLAMA_FACTORS}
        scaling = {"attention_factor": 1.0, "original_max_position_embeddings": config.get("max_position_embeddings")}
    elif kind in ("none", "") or (kind == "linear" and scaling.get("factor", 1.0) == 1.0):
        return None
    elif kind in ("linear", "yarn"):
        truncate = {"truncate": False} if architecture.model_type == "gpt_oss" else {}
        if "mscale_all_dim" in scaling:  # files hold a tenth of it, and that of keys alone is the same
            scaling["mscale"] = scaling["mscale_all_dim"] = _shorten_float(10 * scaling["mscale_all_dim"])
        return {"rope_type": kind, **(scaling if kind == "yarn" else {"factor": scaling["factor"]}), **truncate}
    else:
        raise ConfigError(f"{shorten(kind)} is not supported", field=f"{_SCALING}type", value=kind)
    numbers = {key: _read_factors(file.tensors[name], name) for key, name in factors.items() if name in file.tensors}
    return {"rope_type": "longrope", **scaling, **numbers}


def _read_factors(tensor: GGUFTensor, name: str) -> list[float]:
    if tensor.type != "F32" or len(tensor.shape) != 1:
        raise ConfigError(f"must be a list of F32, not {tensor.type} of shape {tensor.shape}", field=name)
    return [_shorten_float(float(each)) for each in np.frombuffer(tensor.data[tensor.start : tensor.end], "<f4")]


def _has_only_floats(file: GGUFFile) -> bool:
    """Whether all matrices of a file have 32 bits."""
    return all(tensor.type == "F32" for tensor in file.tensors.values() if len(tensor.shape) > 1)


def _log_expanded(file: GGUFFile, names: Mapping[str, TensorName], architecture: Architecture, dtype: str) -> None:
    """Logs the matrices of few bits that are expanded, with their bytes."""
    kept = {each.gguf_name for name, each in names.items() if find_form(name, each, architecture) is not None}
    few = {
        name: tensor
        for name, tensor in file.tensors.items()
        if name not in kept and len(tensor.shape) > 1 and tensor.block > 1
    }
    if few:
        before = sum(tensor.end - tensor.start for tensor in few.values())
        after = sum(math.prod(tensor.shape) for tensor in few.values()) * (4 if dtype == "float32" else 2)
        kinds = ", ".join(sorted({tensor.type for tensor in few.values()}))
        text = "%s: %d matrices in %s are expanded to %s, %.0f MB to %.0f MB; --quantization holds them in fewer bits"
        _log.info(text, file.path.name, len(few), kinds, dtype, before / 1e6, after / 1e6)


def _describe_quantization(names: Mapping[str, TensorName], architecture: Architecture) -> dict[str, Any] | None:
    """Returns the `quantization_config` of the matrices that keep their bits, in the format of compressed-tensors.

    gpt-oss has a format of its own.
    """
    forms = {name: find_form(name, each, architecture) for name, each in names.items()}
    kept = {name.removesuffix(".weight"): form for name, form in forms.items() if form is not None}
    if architecture.model_type == "gpt_oss":
        return {"quant_method": "mxfp4"} if kept else None
    if not kept:
        return None
    used = sorted(set(kept.values()), key=lambda form: -list(kept.values()).count(form))
    matrices = {name.removesuffix(".weight") for name, each in names.items() if len(each.shape) == 2}
    groups = {}
    for form in used:
        stored, kind, bits = _GROUPS[form]
        weights = {"type": kind, "num_bits": bits, "symmetric": True, "strategy": "group", "group_size": 32}
        targets = ["Linear"] if form == used[0] else sorted(name for name in kept if kept[name] == form)
        groups[f"group_{len(groups)}"] = {"targets": targets, "weights": weights, "format": stored}
    ignore = sorted(matrices - kept.keys())
    return {"quant_method": "compressed-tensors", "config_groups": groups, "ignore": ignore}

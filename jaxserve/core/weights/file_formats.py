"""Recognises checkpoint formats by their files: the two that are read, and others, to say what would work instead."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal

from jaxserve.core.models.hf_config import QUANTIZATION_KEY
from jaxserve.core.weights.json_files import MAX_JSON_BYTES, parse_json_object
from jaxserve.errors import ConfigError, shorten
from jaxserve.files import read_regular
from jaxserve.gguf_file import is_gguf

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
PARAMS_FOLDER = "params"  # in Orbax checkpoints

ADAPTER_CONFIG = "adapter_config.json"
ORIGINAL_CONFIG = "params.json"
# Files that quantization tools write, some of them beside a config.json that says nothing, and the tools' methods.
QUANTIZATION_FILES = {"quantize_config.json": "gptq", "quant_config.json": "awq"}

_GGUF = "a GGUF model is one file; give its path, of the hub as owner/name:file.gguf"
_GGUF_NAME = re.compile(r"-gguf(:[^/]*)?$", re.IGNORECASE)  # a repository, as llama.cpp's users name them
_NO_WEIGHTS = re.compile(r"(training_args|optimizer|scheduler)\.")  # pickles of training runs


def checkpoint_format(path: Path) -> Literal["safetensors", "orbax"]:
    """Returns the format of the parameters in the directory `path`; `save_params` writes "orbax"."""
    return "orbax" if (path / PARAMS_FOLDER).is_dir() else "safetensors"


def has_weights(path: Path) -> bool:
    """Whether the directory `path` holds weights in a format that is read, or is a GGUF file."""
    return is_gguf(path) or any((path / name).exists() for name in (SINGLE_FILE, INDEX_FILE, PARAMS_FOLDER))


def refuse_foreign_name(model: str) -> None:
    """Raises ConfigError (field "model") for the name of a repository of GGUF files."""
    if _GGUF_NAME.search(model):
        raise ConfigError(f"{shorten(model)}: {_GGUF}", field="model", value=model)


def refuse_foreign_folder(path: Path, *, need_weights: bool) -> None:
    """Raises ConfigError (field "model", or the telling file) when `path` holds a checkpoint in a format not read.

    A directory without any checkpoint passes: later readers name what it lacks. Without `need_weights`, config.json is
    enough.
    """
    for name, method in QUANTIZATION_FILES.items():
        if (path / name).is_file() and not _read_key(path / "config.json", QUANTIZATION_KEY):
            message = (
                f"says that the weights are quantized ({method}), and config.json has no {QUANTIZATION_KEY}; put the "
                "settings there as transformers writes them"
            )
            raise ConfigError(message, field=str(path / name))
    if (path / "config.json").exists() and (not need_weights or has_weights(path)):
        return
    reason = describe_foreign(path)
    if reason is not None:
        raise ConfigError(f"{path}: {reason}", field="model", value=str(path))


def describe_foreign(path: Path) -> str | None:
    """Returns which unreadable format the directory `path` holds and what to give instead; None if none is found."""
    if (path / ADAPTER_CONFIG).is_file():
        return _describe_adapter(path / ADAPTER_CONFIG)
    if next(path.glob("*.gguf"), None) is not None:
        return _GGUF
    if (path / ORIGINAL_CONFIG).is_file() or next(path.glob("consolidated*"), None) is not None:
        return (
            "the format of the publisher's own code (params.json, consolidated*) is not read; use the repository's "
            "files for transformers: config.json and model*.safetensors"
        )
    pickled = sorted(file.name for suffix in ("bin", "pt", "pth") for file in path.glob(f"*.{suffix}"))
    pickled = [name for name in pickled if not _NO_WEIGHTS.match(name)]
    if pickled:
        return f"{pickled[0]} is a pickle, which can run code and is never read: convert it to safetensors"
    return None


def _describe_adapter(file: Path) -> str:
    base = _read_key(file, "base_model_name_or_path")
    of_base = f" of {shorten(base)}" if base else ""
    return (
        f"a LoRA adapter{of_base} is no model; give its base model, with enable_lora, and the adapter to requests "
        "(lora_request) or to jaxserve generate --lora"
    )


def _read_key(file: Path, key: str) -> object:
    """Returns a value of a JSON file; None where it cannot be read, which later readers report."""
    try:
        return parse_json_object(read_regular(file, MAX_JSON_BYTES)).get(key)
    except (OSError, ValueError):
        return None

"""Reads what sentence-transformers writes beside a reranker (`CrossEncoder`) that is a classifier."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxserve.core.weights.json_files import read_config_file, read_config_list
from jaxserve.core.weights.sentence_transformers import MODULES_FILE, PROMPTS_FILE, TEXTS_FILE
from jaxserve.errors import ConfigError, shorten

_TASK = "sequence-classification"
_KNOWN = ("transformer_task", "modality_config", "module_output_name", "unpad_inputs")


def is_cross_encoder(path: Path, hf_config: Mapping[str, Any]) -> bool:
    """Whether a classifier is the only module of modules.json in the directory `path`."""
    file, names = path / MODULES_FILE, hf_config.get("architectures")
    if not file.exists() or not str(names).endswith("ForSequenceClassification']"):
        return False
    kinds = [str(entry.get("type")) if isinstance(entry, Mapping) else "" for entry in read_config_list(file)]
    return len(kinds) == 1 and kinds[0].startswith("sentence_transformers.") and kinds[0].endswith(".Transformer")


def check_texts(path: Path) -> None:
    """Raises ConfigError, naming the file, for a setting of a reranker's texts that is not read."""
    file = path / TEXTS_FILE
    settings = read_config_file(file) if file.exists() else {}
    if settings.get("transformer_task", _TASK) != _TASK:
        raise ConfigError(f"is for another task than {_TASK}", field=str(file))
    for key, value in settings.items():
        if value and key not in _KNOWN:
            raise ConfigError(f"{shorten(key)} is not read; known are {', '.join(_KNOWN)}", field=str(file))


def add_activation(hf_config: dict[str, Any], path: Path) -> dict[str, Any]:
    """Returns a reranker's config.json with the activation of its scores, which newer files name beside it.

    Raises ConfigError, naming the file, for a prompt that every text would get.
    """
    file = path / PROMPTS_FILE
    settings = read_config_file(file) if file.exists() else {}
    if settings.get("default_prompt_name") is not None:
        message = "default_prompt_name is not read for a reranker; set it to null, and put the prompt before queries"
        raise ConfigError(message, field=str(file), value=settings["default_prompt_name"])
    named = hf_config.get("sentence_transformers") or hf_config.get("sbert_ce_default_activation_function")
    if named or settings.get("activation_fn") is None:
        return hf_config
    return {**hf_config, "sentence_transformers": {"activation_fn": settings["activation_fn"]}}

"""Reads how embeddings are made from the files that sentence-transformers writes beside a checkpoint.

modules.json lists the modules of a model, and each may have a folder with its settings and weights. The names of their
classes were moved in version 6; only the last part of a name counts.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxserve.core.layers.activations import ACTIVATIONS
from jaxserve.core.layers.pooling import DenseConfig, PoolerConfig
from jaxserve.core.weights.json_files import read_config_file, read_config_list
from jaxserve.errors import ConfigError, shorten
from jaxserve.pooling_options import PoolingType

MODULES_FILE, TEXTS_FILE, PROMPTS_FILE = (
    "modules.json",
    "sentence_bert_config.json",
    "config_sentence_transformers.json",
)
MODULE_FILES = ("*_Pooling/config.json", "*_Dense/config.json", "*_Dense/model.safetensors")
"""Patterns of the files in folders that are read."""

_SETTINGS = "config.json"
_ORDER = ("Transformer", "Pooling", "Dense", "Normalize")
_POOLING: Mapping[str, PoolingType] = {"cls": "CLS", "mean": "MEAN", "lasttoken": "LAST"}
_OLD_POOLING = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "lasttoken",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
}
# PyTorch's classes whose names are not those of ACTIVATIONS in small letters.
_CLASSES = {"Identity": "linear", "Hardswish": "hardswish", "LeakyReLU": "leaky_relu"}
_FOLDER = re.compile(r"\d+_(Pooling|Dense)")


@dataclass(frozen=True)
class SentenceModules:
    """The modules of a model: its pooler, and what they say of texts.

    `max_seq_length` are the most tokens of one, None where the files do not say; `lowercases`: in small letters.
    """

    pooler: PoolerConfig
    max_seq_length: int | None = None
    lowercases: bool = False


def read_modules(path: Path) -> SentenceModules | None:
    """Returns the modules that the files in the directory `path` describe, None if there is no modules.json.

    Raises ConfigError, naming the file and the key, for a module, or a setting of one, that is not read.
    """
    file = path / MODULES_FILE
    if not file.exists():
        return None
    modules = [_read_module(file, entry) for entry in read_config_list(file)]
    names = [name for name, _ in modules]
    if names[:2] != ["Transformer", "Pooling"] or sorted(names, key=_ORDER.index) != names or _repeats(names):
        message = f"has the modules {', '.join(names)}; read are Transformer, Pooling, any number of Dense, Normalize"
        raise ConfigError(message, field=str(file), value=names)
    _refuse_prompts(path / PROMPTS_FILE)
    denses = tuple(_read_dense(path, folder) for name, folder in modules if name == "Dense")
    pooler = PoolerConfig(_read_pooling(path / modules[1][1] / _SETTINGS), denses, normalizes="Normalize" in names)
    return SentenceModules(pooler, *_read_texts(path / TEXTS_FILE))


def _repeats(names: Iterable[str]) -> bool:
    single = [name for name in names if name != "Dense"]
    return len(set(single)) < len(single)


def _read_module(file: Path, entry: object) -> tuple[str, str]:
    """Returns a module's name and folder."""
    kind, folder = (entry.get("type"), entry.get("path")) if isinstance(entry, Mapping) else (None, None)
    package, _, name = str(kind).rpartition(".")
    if name not in _ORDER or package.partition(".")[0] != "sentence_transformers":
        message = f"the module {shorten(kind)} is not read; known are {', '.join(_ORDER)} of sentence_transformers"
        raise ConfigError(message, field=str(file), value=kind)
    if name == "Transformer" and folder:
        message = f"the model is in the folder {shorten(folder)}; it is read from the files beside modules.json only"
        raise ConfigError(message, field=str(file), value=folder)
    if name in ("Pooling", "Dense") and not (isinstance(folder, str) and _FOLDER.fullmatch(folder)):
        message = f"the folder of {name} must have a name like 1_{name}, not {shorten(folder)}"
        raise ConfigError(message, field=str(file), value=folder)
    return name, str(folder)


def _read_pooling(file: Path) -> PoolingType:
    settings = read_config_file(file)
    mode = settings.get("pooling_mode")
    if mode is None:
        mode = [name for key, name in _OLD_POOLING.items() if settings.get(key)]
    modes = [mode] if isinstance(mode, str) else mode
    if not isinstance(modes, list) or len(modes) != 1 or modes[0] not in _POOLING:
        message = f"pools by {shorten(mode)}; read is one of {', '.join(_POOLING)}"
        raise ConfigError(message, field=str(file), value=mode)
    if settings.get("include_prompt") is False:
        raise ConfigError("leaves prompts out (include_prompt: false), which is not served", field=str(file))
    known = {"pooling_mode", "include_prompt", "embedding_dimension", "word_embedding_dimension", *_OLD_POOLING}
    _require_known(file, settings, known)
    return _POOLING[modes[0]]


def _read_dense(path: Path, folder: str) -> DenseConfig:
    file = path / folder / _SETTINGS
    settings = read_config_file(file)
    sizes = settings.get("in_features"), settings.get("out_features")
    if not all(isinstance(size, int) and not isinstance(size, bool) and size >= 1 for size in sizes):
        raise ConfigError(f"in_features and out_features must be sizes, not {shorten(sizes)}", field=str(file))
    for key in ("module_input_name", "module_output_name"):
        if settings.get(key) not in (None, "sentence_embedding"):
            message = f"{key} {shorten(settings[key])} is not read; known is sentence_embedding"
            raise ConfigError(message, field=str(file), value=settings[key])
    named = {"in_features", "out_features", "bias", "activation_function", "module_input_name", "module_output_name"}
    _require_known(file, settings, named)
    given = str(settings.get("activation_function", "torch.nn.modules.activation.Tanh"))
    name = given.rpartition(".")[2]
    activation = _CLASSES.get(name, name.lower())
    if activation not in ACTIVATIONS or not given.startswith("torch.nn."):
        raise ConfigError(f"the activation {shorten(given)} is not read", field=str(file), value=given)
    return DenseConfig(sizes[0], sizes[1], bool(settings.get("bias", True)), activation, f"{folder}/linear")


def _read_texts(file: Path) -> tuple[int | None, bool]:
    """Returns the most tokens of a text, and whether it is written in small letters."""
    if not file.exists():
        return None, False
    settings = read_config_file(file)
    if settings.get("transformer_task", "feature-extraction") != "feature-extraction":
        raise ConfigError("is for another task than feature-extraction", field=str(file))
    known = ("max_seq_length", "do_lower_case", "transformer_task", "modality_config", "module_output_name")
    _require_known(file, settings, (*known, "unpad_inputs"))
    length = settings.get("max_seq_length")
    if length is not None and (not isinstance(length, int) or isinstance(length, bool) or length < 1):
        message = f"max_seq_length must be a number of tokens, not {shorten(length)}"
        raise ConfigError(message, field=str(file), value=length)
    return length, bool(settings.get("do_lower_case"))


def _refuse_prompts(file: Path) -> None:
    """Raises ConfigError for a prompt that the model puts before each text unasked."""
    name = read_config_file(file).get("default_prompt_name") if file.exists() else None
    if name is not None:
        message = f"default_prompt_name {shorten(name)} is not served; set it to null, and put prompts before texts"
        raise ConfigError(message, field=str(file), value=name)


def _require_known(file: Path, settings: Mapping[str, Any], known: Iterable[str]) -> None:
    """Raises ConfigError for a setting that is not read, unless it is off."""
    for key, value in settings.items():
        if value and key not in known:
            raise ConfigError(f"{shorten(key)} is not read; known are {', '.join(sorted(known))}", field=str(file))

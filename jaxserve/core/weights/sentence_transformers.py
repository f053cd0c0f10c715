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
from jaxserve.core.layers.pooling import LAST, DenseConfig, LayerNormConfig, PoolerConfig
from jaxserve.core.weights.json_files import read_config_file, read_config_list
from jaxserve.errors import ConfigError, shorten
from jaxserve.pooling_options import PoolingType

MODULES_FILE, TEXTS_FILE, PROMPTS_FILE = (
    "modules.json",
    "sentence_bert_config.json",
    "config_sentence_transformers.json",
)
MODULE_FILES = (
    *(f"*_{name}/config.json" for name in ("Pooling", "Dense", "LayerNorm", "LogitScore")),
    *(f"*_{name}/model.safetensors" for name in ("Dense", "LayerNorm")),
)
"""Patterns of the files in folders that are read."""

_SETTINGS = "config.json"
_BEHIND = ("Dense", "LayerNorm")  # modules behind Pooling, in any number and order
_MODULES = ("Transformer", "Pooling", *_BEHIND, "Normalize", "LogitScore")
_POOLING: Mapping[str, PoolingType] = {
    "cls": "CLS",
    "mean": "MEAN",
    "lasttoken": "LAST",
    "max": "MAX",
    "mean_sqrt_len_tokens": "MEAN_SQRT",
    "weightedmean": "WEIGHTED_MEAN",
}
_OLD_POOLING = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}  # in the order in which their vectors stand
# PyTorch's classes whose names are not those of ACTIVATIONS in small letters.
_CLASSES = {"Identity": "linear", "Hardswish": "hardswish", "LeakyReLU": "leaky_relu"}
_FOLDER = re.compile(r"\d+_(Pooling|Dense|LayerNorm|LogitScore)")


@dataclass(frozen=True)
class LogitScore:
    """A reranker's score: the logit of one token, less that of the other, if there is one."""

    true_token_id: int
    false_token_id: int | None


@dataclass(frozen=True)
class Prompts:
    """What is put in front of texts, by name. `default` is the name of what every text gets, None for nothing.

    With `are_pooled` their tokens are pooled like those of the text.
    """

    by_name: Mapping[str, str]
    default: str | None = None
    are_pooled: bool = True


NO_PROMPTS = Prompts({})


@dataclass(frozen=True)
class SentenceModules:
    """The modules of a model: its pooler, and what they say of texts.

    `max_seq_length` are the most tokens of one, None where the files do not say; `lowercases`: in small letters.
    """

    pooler: PoolerConfig
    max_seq_length: int | None = None
    lowercases: bool = False
    prompts: Prompts = NO_PROMPTS
    logit_score: LogitScore | None = None


def read_modules(path: Path) -> SentenceModules | None:
    """Returns the modules that the files in the directory `path` describe, None if there is no modules.json.

    Raises ConfigError, naming the file and the key, for a module, or a setting of one, that is not read.
    """
    file = path / MODULES_FILE
    if not file.exists():
        return None
    modules = [_read_module(file, entry) for entry in read_config_list(file)]
    names = [name for name, _ in modules]
    if names == ["Transformer", "LogitScore"]:
        score = _read_logit_score(path / modules[1][1] / _SETTINGS)
        return SentenceModules(LAST, *_read_texts(path / TEXTS_FILE, task="text-generation"), logit_score=score)
    normalizes = names[-1:] == ["Normalize"]
    behind = modules[2 : len(modules) - normalizes]
    if names[:2] != ["Transformer", "Pooling"] or not all(name in _BEHIND for name, _ in behind):
        known = f"Transformer, Pooling, any number of {' and '.join(_BEHIND)}, Normalize; or Transformer, LogitScore"
        raise ConfigError(f"has the modules {', '.join(names)}; read are {known}", field=str(file), value=names)
    denses = tuple(
        _read_dense(path, folder) if name == "Dense" else _read_norm(path, folder) for name, folder in behind
    )
    (first, *others), pools_prompts = _read_pooling(path / modules[1][1] / _SETTINGS)
    pooler = PoolerConfig(first, denses, normalizes=normalizes, joined=tuple(others))
    prompts = _read_prompts(path / PROMPTS_FILE, are_pooled=pools_prompts)
    return SentenceModules(pooler, *_read_texts(path / TEXTS_FILE), prompts)


def _read_module(file: Path, entry: object) -> tuple[str, str]:
    """Returns a module's name and folder."""
    kind, folder = (entry.get("type"), entry.get("path")) if isinstance(entry, Mapping) else (None, None)
    package, _, name = str(kind).rpartition(".")
    if name not in _MODULES or package.partition(".")[0] != "sentence_transformers":
        message = f"the module {shorten(kind)} is not read; known are {', '.join(_MODULES)} of sentence_transformers"
        raise ConfigError(message, field=str(file), value=kind)
    if name == "Transformer" and folder:
        message = f"the model is in the folder {shorten(folder)}; it is read from the files beside modules.json only"
        raise ConfigError(message, field=str(file), value=folder)
    if name not in ("Transformer", "Normalize") and not (isinstance(folder, str) and _FOLDER.fullmatch(folder)):
        message = f"the folder of {name} must have a name like 1_{name}, not {shorten(folder)}"
        raise ConfigError(message, field=str(file), value=folder)
    return name, str(folder)


def _read_pooling(file: Path) -> tuple[list[PoolingType], bool]:
    """Returns the types whose vectors stand side by side, and whether the tokens of prompts are pooled."""
    settings = read_config_file(file)
    mode = settings.get("pooling_mode")
    if mode is None:
        mode = [name for key, name in _OLD_POOLING.items() if settings.get(key)] or "mean"
    modes = [mode] if isinstance(mode, str) else mode
    if (
        not isinstance(modes, list)
        or not modes
        or not all(isinstance(each, str) and each in _POOLING for each in modes)
    ):
        message = f"pools by {shorten(mode)}; read are {', '.join(_POOLING)}"
        raise ConfigError(message, field=str(file), value=mode)
    known = {"pooling_mode", "include_prompt", "embedding_dimension", "word_embedding_dimension", *_OLD_POOLING}
    _require_known(file, settings, known)
    return [_POOLING[each] for each in modes], settings.get("include_prompt") is not False


def _read_norm(path: Path, folder: str) -> LayerNormConfig:
    file = path / folder / _SETTINGS
    settings = read_config_file(file)
    size = settings.get("dimension")
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise ConfigError(f"dimension must be a size, not {shorten(size)}", field=str(file), value=size)
    _require_known(file, settings, {"dimension"})
    return LayerNormConfig(size, f"{folder}/norm")


def _read_logit_score(file: Path) -> LogitScore:
    settings = read_config_file(file)
    ids = [settings.get(key) for key in ("true_token_id", "false_token_id")]
    if ids[0] is None or any(each is not None and (not isinstance(each, int) or each < 0) for each in ids):
        message = f"true_token_id and false_token_id must be token ids, not {shorten(ids)}"
        raise ConfigError(message, field=str(file), value=ids)
    _require_known(file, settings, {"true_token_id", "false_token_id", "module_input_name"})
    return LogitScore(*ids)


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
    _require_known(file, settings, {*named, "use_residual"})
    given = str(settings.get("activation_function", "torch.nn.modules.activation.Tanh"))
    name = given.rpartition(".")[2]
    activation = _CLASSES.get(name, name.lower())
    if activation not in ACTIVATIONS or not given.startswith("torch.nn."):
        raise ConfigError(f"the activation {shorten(given)} is not read", field=str(file), value=given)
    bias, residual = bool(settings.get("bias", True)), bool(settings.get("use_residual"))
    return DenseConfig(sizes[0], sizes[1], bias, activation, f"{folder}/linear", residual=residual)


def _read_texts(file: Path, task: str = "feature-extraction") -> tuple[int | None, bool]:
    """Returns the most tokens of a text, and whether it is written in small letters."""
    if not file.exists():
        return None, False
    settings = read_config_file(file)
    if settings.get("transformer_task", task) != task:
        raise ConfigError(f"is for another task than {task}", field=str(file))
    known = ("max_seq_length", "do_lower_case", "transformer_task", "modality_config", "module_output_name")
    _require_known(file, settings, (*known, "unpad_inputs"))
    length = settings.get("max_seq_length")
    if length is not None and (not isinstance(length, int) or isinstance(length, bool) or length < 1):
        message = f"max_seq_length must be a number of tokens, not {shorten(length)}"
        raise ConfigError(message, field=str(file), value=length)
    return length, bool(settings.get("do_lower_case"))


def _read_prompts(file: Path, *, are_pooled: bool) -> Prompts:
    """Returns what the file puts in front of texts; ConfigError for what is not text, and for an unknown default."""
    settings = read_config_file(file) if file.exists() else {}
    found, default = settings.get("prompts") or {}, settings.get("default_prompt_name")
    if not isinstance(found, Mapping) or not all(isinstance(text, str) for text in found.values()):
        raise ConfigError(f"prompts must be texts by name, not {shorten(found)}", field=str(file), value=found)
    if default is not None and default not in found:
        message = f"default_prompt_name {shorten(default)} is none of its prompts ({', '.join(found) or 'none'})"
        raise ConfigError(message, field=str(file), value=default)
    if default is not None and found[default] and not are_pooled:
        message = f"puts the prompt {shorten(default)} in front of every text and pools none of its tokens "
        message += "(include_prompt: false), which is not served; set default_prompt_name to null"
        raise ConfigError(message, field=str(file), value=default)
    return Prompts(dict(found), default, are_pooled)


def _require_known(file: Path, settings: Mapping[str, Any], known: Iterable[str]) -> None:
    """Raises ConfigError for a setting that is not read, unless it is off."""
    for key, value in settings.items():
        if value and key not in known:
            raise ConfigError(f"{shorten(key)} is not read; known are {', '.join(sorted(known))}", field=str(file))

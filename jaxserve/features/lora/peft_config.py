"""Reads adapter_config.json as PEFT writes it: with all defaults, so values are judged, not whether a key stands."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxserve.core.weights.file_formats import ADAPTER_CONFIG
from jaxserve.core.weights.json_files import read_config_file
from jaxserve.errors import ConfigError, shorten

# Keys that change nothing in an adapter that is written, whatever their value: how it was trained and initialised.
_HARMLESS = frozenset({
    "peft_type", "auto_mapping", "base_model_name_or_path", "revision", "task_type", "inference_mode", "lora_dropout",
    "peft_version", "runtime_config", "megatron_core", "eva_config", "corda_config", "lora_ga_config",
    "qalora_group_size",
})  # fmt: skip
_READ = frozenset({
    "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "target_modules", "exclude_modules",
    "layers_to_transform", "layers_pattern", "init_lora_weights", "bias",
})  # fmt: skip
# Keys that must have no value, and what is not served otherwise.
_REFUSED: Mapping[str, str] = {
    "use_dora": "weight-decomposed adapters (DoRA) are not served",
    "lora_bias": "biases of adapters are not served",
    "modules_to_save": "modules that were trained whole are not served; save the model itself",
    "trainable_token_indices": "trained embeddings of tokens are not served",
    "target_parameters": "adapters of parameters that are no module's weight, as packed experts, are not served",
    "fan_in_fan_out": "weights that are stored [in, out] are those of no family here",
    "layer_replication": "models with repeated layers are not served",
    "alora_invocation_tokens": "adapters that begin at certain tokens (aLoRA) are not served",
    "arrow_config": "mixtures of adapters (Arrow) are not served",
    "use_qalora": "adapters with pooled inputs (QA-LoRA) are not served",
    "loftq_config": "LoftQ changes the base model, which is then another than the one that is served",
    "megatron_config": "adapters of Megatron's layers are not served",
    "ensure_weight_tying": "adapters of tied embeddings are not served",
}
# Initialisations after which an adapter fits a changed base model, unless PEFT has converted it.
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
ALL_LINEAR = "all-linear"
_MAX_PATTERN = 1_000  # characters
_REPEATS = re.compile(r"(?<![\\(])[*+?{][?+]?")  # a lazy or a possessive one counts once
_REPEATED_GROUP = re.compile(r"(?<!\\)\)[*+{]")
_MAX_REPEATS = 5  # those of the patterns that Unsloth writes; with more, or of groups, matching may take for ever


@dataclass(frozen=True)
class PeftConfig:
    """What adapter_config.json says of modules, whose names are the base model's ("model.layers.0.mlp.up_proj")."""

    rank: int
    alpha: float
    rank_stabilized: bool
    ranks: Mapping[str, int]  # by pattern, of the modules that have another
    alphas: Mapping[str, float]
    targets: str | tuple[str, ...] | None  # a pattern, names, or None: not said
    excluded: str | tuple[str, ...]
    layers: tuple[int, ...] | None
    layer_patterns: tuple[str, ...]

    @property
    def largest_rank(self) -> int:
        """The largest rank of any module."""
        return max(self.rank, *self.ranks.values(), 1)

    def find_rank(self, module: str) -> int:
        """Returns the rank of a module's adapter."""
        return _find(self.ranks, module, self.rank)

    def find_scale(self, module: str) -> float:
        """Returns the number that a module's product B A is multiplied by."""
        alpha, rank = _find(self.alphas, module, self.alpha), self.find_rank(module)
        return alpha / (math.sqrt(rank) if self.rank_stabilized else rank)

    def targets_module(self, module: str) -> bool:
        """Whether the adapter must have matrices of a linear module; False if the config does not say."""
        if self.targets is None or _names(self.excluded, module):
            return False
        if isinstance(self.targets, str):
            return self.targets == ALL_LINEAR or _names(self.targets, module)
        return _names(self.targets, module) and (self.layers is None or self._find_layer(module) in self.layers)

    def _find_layer(self, module: str) -> int | None:
        patterns = [rf".*\.{pattern}\.(\d+)\." for pattern in self.layer_patterns] or [r".*\.[^.]*\.(\d+)\."]
        found = (re.match(pattern, module) for pattern in patterns)
        return next((int(each[1]) for each in found if each is not None), None)


def read_peft_config(folder: Path) -> PeftConfig:
    """Returns what the adapter_config.json of a directory says.

    Raises:
        ConfigError: it is missing or malformed, or a key has a value that is not served.
    """
    file = folder / ADAPTER_CONFIG
    if not file.is_file():
        raise ConfigError(f"there is no {ADAPTER_CONFIG}; adapters are read in PEFT's format", field=str(folder))
    reader = _Reader(str(file), read_config_file(file))
    reader.refuse()
    return PeftConfig(
        rank=reader.count("r", 8),
        alpha=reader.number("lora_alpha", 8),
        rank_stabilized=reader.flag("use_rslora"),
        ranks={pattern: reader.require_count("rank_pattern", each) for pattern, each in reader.table("rank_pattern")},
        alphas={
            pattern: reader.require_number("alpha_pattern", each) for pattern, each in reader.table("alpha_pattern")
        },
        targets=reader.names("target_modules"),
        excluded=reader.names("exclude_modules") or (),
        layers=reader.layers(),
        layer_patterns=reader.patterns("layers_pattern"),
    )


class _Reader:
    """Checked values of one file; None stands for a key that is not set."""

    def __init__(self, file: str, values: Mapping[str, Any]) -> None:
        self._file, self._values = file, values

    def error(self, key: str, message: str) -> ConfigError:
        """Returns the error about a key."""
        return ConfigError(f"{key}: {message}", field=self._file, value=self._values.get(key))

    def refuse(self) -> None:
        """Raises ConfigError for what is not served."""
        values = self._values
        if values.get("peft_type") != "LORA":
            raise self.error("peft_type", f"must be 'LORA', got {shorten(values.get('peft_type'))}")
        for key, value in values.items():
            if key in _HARMLESS or key in _READ or value in (None, False, [], {}):
                continue  # PEFT writes the keys of all its versions, and these values leave them off
            reason = _REFUSED.get(key, "the key is not known, so the adapter may mean something else here")
            raise self.error(key, f"{reason}, and this is {shorten(value)}")
        if values.get("bias") not in (None, "none"):
            raise self.error(
                "bias", f"trained biases are not served, so it must be 'none', got {shorten(values['bias'])}"
            )
        init = values.get("init_lora_weights")
        if isinstance(init, str) and init.startswith(_CHANGES_BASE):
            message = "fits a base model that this initialisation has changed; convert it with PEFT's save_pretrained("
            raise self.error(
                "init_lora_weights", f"{shorten(init)} {message}path_initial_model_for_weight_conversion=...)"
            )

    def count(self, key: str, default: int) -> int:
        """Returns an integer of at least 1."""
        value = self._values.get(key)
        return default if value is None else self.require_count(key, value)

    def require_count(self, key: str, value: object) -> int:
        """Returns a value that must be an integer of at least 1."""
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self.error(key, f"must be an integer of at least 1, got {shorten(value)}")
        return value

    def number(self, key: str, default: float) -> float:
        """Returns a finite number."""
        value = self._values.get(key)
        return default if value is None else self.require_number(key, value)

    def require_number(self, key: str, value: object) -> float:
        """Returns a value that must be a finite number."""
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not abs(value) < 1e30:
            raise self.error(key, f"must be a finite number, got {shorten(value)}")
        return float(value)

    def flag(self, key: str) -> bool:
        """Returns true or false."""
        value = self._values.get(key)
        if value not in (None, True, False):
            raise self.error(key, f"must be true or false, got {shorten(value)}")
        return bool(value)

    def table(self, key: str) -> list[tuple[str, Any]]:
        """Returns the entries of an object whose keys are patterns."""
        value = self._values.get(key) or {}
        if not isinstance(value, Mapping):
            raise self.error(key, f"must be an object, got {shorten(value)}")
        return [(self._check_pattern(key, pattern), each) for pattern, each in value.items()]

    def names(self, key: str) -> str | tuple[str, ...] | None:
        """Returns names of modules, or one pattern."""
        value = self._values.get(key)
        if value is None or isinstance(value, str):
            return None if value is None else self._check_pattern(key, value)
        return self._strings(key, value)

    def patterns(self, key: str) -> tuple[str, ...]:
        """Returns one pattern or several."""
        value = self._values.get(key) or ()
        found = (value,) if isinstance(value, str) else self._strings(key, value)
        return tuple(self._check_pattern(key, pattern) for pattern in found)

    def layers(self) -> tuple[int, ...] | None:
        """Returns the layers that alone have adapters; None: all."""
        value, key = self._values.get("layers_to_transform"), "layers_to_transform"
        found = [value] if isinstance(value, int) else value
        if found in (None, []):
            return None
        is_list = isinstance(found, list) and all(isinstance(each, int) and each >= 0 for each in found)
        if not is_list:
            raise self.error(key, f"must be a list of layers, got {shorten(value)}")
        return tuple(found)

    def _strings(self, key: str, value: object) -> tuple[str, ...]:
        if not isinstance(value, Sequence) or not all(isinstance(each, str) for each in value):
            raise self.error(key, f"must be a list of names, got {shorten(value)}")
        return tuple(value)

    def _check_pattern(self, key: str, pattern: str) -> str:
        if len(pattern) > _MAX_PATTERN:
            raise self.error(key, f"a pattern has at most {_MAX_PATTERN} characters, got {len(pattern)}")
        if _REPEATED_GROUP.search(pattern) or len(_REPEATS.findall(pattern)) > _MAX_REPEATS:
            message = f"a pattern repeats no group, and has at most {_MAX_REPEATS} of * + ? and {{"
            raise self.error(key, f"{message}, got {shorten(pattern)}")
        try:
            re.compile(pattern)
        except (re.error, RecursionError) as error:
            raise self.error(key, f"{shorten(pattern)} is not a regular expression: {error}") from error
        return pattern


def _find[T](by_pattern: Mapping[str, T], module: str, default: T) -> T:
    """Returns the value of the first pattern that matches the end of a module's name."""
    found = (value for pattern, value in by_pattern.items() if re.match(rf"(.*\.)?({pattern})$", module))
    return next(found, default)


def _names(given: str | tuple[str, ...], module: str) -> bool:
    """Whether a pattern matches a module's whole name, or one of several names is its end."""
    if isinstance(given, str):
        return bool(given) and re.fullmatch(given, module) is not None
    return any(module == name or module.endswith(f".{name}") for name in given)

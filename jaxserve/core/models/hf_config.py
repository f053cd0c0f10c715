"""Reads a checkpoint's config.json: typed values of known keys. Every error names the key."""

from __future__ import annotations

import copy
import difflib
from collections.abc import Iterable, Mapping

from jaxserve.errors import ConfigError, shorten

QUANTIZATION_KEY = "quantization_config"
MODELOPT = "modelopt"  # the method of quantization that has a file of its own beside config.json
REQUIRED = object()  # the default of a key that files must have

MATRYOSHKA_KEYS = ("is_matryoshka", "matryoshka_dimensions")  # whether vectors may be cut, and to how many numbers

# fmt: off
# Keys that never change what an inference pass computes, whatever their value.
_HARMLESS = frozenset({
    "architectures", "model_type", "transformers_version", "name_or_path", "auto_map", "use_cache",
    "initializer_range", "attention_dropout", "hidden_dropout", "attn_pdrop",
    "embd_pdrop", "resid_pdrop", "classifier_dropout", "pretraining_tp", "output_attentions",
    "output_hidden_states", "return_dict", "torchscript", "is_composition", "bos_token_id", "pad_token_id",
    "sep_token_id", "cls_token_id", "unk_token_id", "mask_token_id", "decoder_start_token_id", "forced_bos_token_id",
    "forced_eos_token_id", "tokenizer_class", "prefix", "task_specific_params", "problem_type", "id2label",
    "label2id", "num_labels", "_num_labels", "finetuning_task", "use_bfloat16", "tf_legacy_loss", "attn_implementation",
    "cache_implementation", "is_decoder", "gradient_checkpointing", "max_length",
    "min_length", "do_sample", "early_stopping", "num_beams", "num_beam_groups", "diversity_penalty",
    "temperature", "top_k", "top_p", "typical_p", "repetition_penalty", "length_penalty",
    "no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "bad_words_ids", "num_return_sequences",
    "output_scores", "return_dict_in_generate", "remove_invalid_values", "exponential_decay_length_penalty",
    "suppress_tokens", "begin_suppress_tokens", "unsloth_version", "unsloth_fixed",
    "transformers.js_config",
    # the activation of a reranker's scores, which its pooler reads
    "sentence_transformers", "sbert_ce_default_activation_function",
    # the tokenizer's words and limit, and what a model card says
    "bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token", "mask_token",
    "additional_special_tokens", "model_max_length", "base_model", "base_model_name_or_path", "license",
    *MATRYOSHKA_KEYS,
})
# fmt: on

_INNER = ("text_config", "vision_config")  # configs inside that of a model which reads more than text
_MAX_INTEGER = 2**31 - 1  # sizes and token ids are 32-bit on devices
_MAX_NUMBER = 1e12  # far above any published number, and float32 keeps it finite
_DTYPES = {"float32": "float32", "bfloat16": "bfloat16", "float16": "float16", "half": "float16", "float": "float32"}


class HFConfig:
    """A config.json, read through one family's known keys.

    Reading an unknown key is a KeyError, a bug of the family. An unknown key in the file is a ConfigError, so that
    nothing a checkpoint asks for is silently dropped, unless it is off (null, false, zero or empty) or begins with an
    underscore, as the notes of libraries do.
    """

    def __init__(
        self,
        raw: Mapping[str, object],
        keys: Mapping[str, object],
        ignored_keys: Iterable[str] = (),
        *,
        place: str | None = None,
    ) -> None:
        """Reads nothing. `place` is the key of the file that has this config; None: it is the file, or its text's."""
        self._raw = raw
        self._keys = keys
        self._names: Mapping[str, str] = {}
        known = keys.keys() | _HARMLESS | set(ignored_keys)
        for key, value in raw.items():
            if value and key not in known and not key.startswith("_"):
                raise _unknown(key, value, keys, place)

    def rename(self, names: Mapping[str, str]) -> HFConfig:
        """Returns the same file, in which the keys of `names` have the values' names; errors name those of the file."""
        other = copy.copy(self)
        other._names = names
        return other

    def get(self, key: str) -> object:
        """Returns the value in the file, else the family's default; ConfigError if a required key is missing."""
        key = self._name(key)
        default = self._keys[key]
        value = self._raw.get(key, default)
        if value is REQUIRED:
            raise ConfigError("is missing from the model's config.json", field=key)
        return value

    def _name(self, key: str) -> str:
        return self._names.get(key, key)

    def integer(self, key: str, *, minimum: int = 1, maximum: int = _MAX_INTEGER) -> int:
        """Returns an integer within the bounds."""
        return check_integer(self._name(key), self.get(key), minimum=minimum, maximum=maximum)

    def optional_integer(self, key: str) -> int | None:
        """Returns an integer of at least 1, or None where the file says null."""
        value = self.get(key)
        return None if value is None else check_integer(self._name(key), value)

    def number(self, key: str, *, minimum: float | None = None) -> float:
        """Returns a number of at least `minimum`; without one, a number above zero."""
        return check_number(self._name(key), self.get(key), minimum=minimum)

    def optional_number(self, key: str) -> float | None:
        """Returns a number above zero, or None where the file says null."""
        value = self.get(key)
        return None if value is None else check_number(self._name(key), value)

    def flag(self, key: str) -> bool:
        """Returns a boolean; null counts as false."""
        value = self.get(key)
        if value is not None and not isinstance(value, bool):
            raise ConfigError(f"must be true or false, not {shorten(value)}", field=self._name(key), value=value)
        return bool(value)

    def choice(self, key: str, choices: Iterable[str]) -> str:
        """Returns one of `choices`."""
        value, allowed = self.get(key), sorted(choices)
        if not isinstance(value, str) or value not in allowed:
            raise ConfigError(
                f"{shorten(value)} is not supported; known are {', '.join(allowed)}", field=self._name(key), value=value
            )
        return value

    def mapping(self, key: str) -> dict[str, object]:
        """Returns a copy of a JSON object; null counts as empty."""
        return check_mapping(self._name(key), self.get(key))

    def require_off(self, *keys: str) -> None:
        """Raises ConfigError unless each key is absent, null, false or zero."""
        for key in keys:
            value = self.get(key)
            if value is not None and value is not False and value != 0:
                raise ConfigError(f"only null or false is supported, not {shorten(value)}", field=key, value=value)

    def require(self, **values: object) -> None:
        """Raises ConfigError unless each key has this value or is absent; null counts as absent."""
        for key, value in values.items():
            found = self.get(key)
            if found is not None and found != value:
                raise ConfigError(f"only {shorten(value)} is supported, not {shorten(found)}", field=key, value=found)

    def dtype(self) -> str:
        """Returns the checkpoint's dtype; if the file names none, the family's default, else "float32"."""
        key = "dtype" if self._raw.get("dtype") is not None else "torch_dtype"
        value = self._raw.get(key)
        if value is None:
            value = self._keys["dtype"] or "float32"
        name = str(value).removeprefix("torch.")
        if name not in _DTYPES:
            raise ConfigError(
                f"{shorten(value)} is not supported; known are float32, bfloat16, float16", field=key, value=value
            )
        return _DTYPES[name]

    def eos_token_ids(self) -> tuple[int, ...]:
        """Returns the ids of the EOS tokens, none if the file names none."""
        value = self.get("eos_token_id")
        ids = value if isinstance(value, list) else [] if value is None else [value]
        return tuple(check_integer("eos_token_id", token_id, minimum=0) for token_id in ids)


def override_config(raw: Mapping[str, object], overrides: Mapping[str, object]) -> dict[str, object]:
    """Returns a config.json with other values of some keys, without the keys whose value is None.

    A mapping for an inner config, as `vision_config` is, does the same to that. Where only `text_config` has a key, it
    is changed there. Raises ConfigError for a key to drop that is not there.
    """
    text = _find_inner(raw, "text_config")
    inner = {key: value for key, value in overrides.items() if key in text and key not in raw}
    outer: dict[str, object] = {key: value for key, value in overrides.items() if key not in inner}
    if inner:
        outer["text_config"] = inner | _find_inner(overrides, "text_config")
    for key in _INNER:
        given, found = outer.get(key), raw.get(key)
        if isinstance(given, Mapping) and isinstance(found, Mapping):
            outer[key] = _change(found, given, key)
    return _change(raw, outer, "config.json", text)


def _find_inner(config: Mapping[str, object], key: str) -> dict[str, object]:
    """Returns an inner config, empty if there is none."""
    found = config.get(key)
    return dict(found) if isinstance(found, Mapping) else {}


def _change(
    raw: Mapping[str, object], overrides: Mapping[str, object], place: str, more: Iterable[str] = ()
) -> dict[str, object]:
    """Returns the values that `place` has then; `more` are keys that could have been given beside its own."""
    dropped = {key for key, value in overrides.items() if value is None}
    for key in dropped - raw.keys():
        message = f"{place} has no {shorten(key)} to drop; its keys are {', '.join(sorted({*raw, *more}))}"
        raise ConfigError(message, field="hf_overrides", value=key)
    return {key: value for key, value in {**raw, **overrides}.items() if key not in dropped}


def _unknown(key: str, value: object, keys: Iterable[str], place: str | None) -> ConfigError:
    """Returns the error for a key that is none of the family's `keys`."""
    near = difflib.get_close_matches(key[:100], sorted(keys), n=1)
    message = f"{shorten(value)} is not supported for this architecture"
    message += f", whose nearest key is {near[0]}" if near else ""
    override = f"{{{shorten(key)}: None}}" if place is None else f"{{{place!r}: {{{shorten(key)}: None}}}}"
    message += f"; if the model computes the same without this key, drop it by hf_overrides={override}"
    message += " (of a drafter, from its config.json)"
    return ConfigError(message, field=key, value=value)


def check_integer(key: str, value: object, *, minimum: int = 1, maximum: int = _MAX_INTEGER) -> int:
    """Returns `value` if it is an integer within the bounds; raises ConfigError naming `key`."""
    if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value <= maximum:
        raise ConfigError(
            f"must be an integer from {minimum} to {maximum}, not {shorten(value)}", field=key, value=value
        )
    return value


def check_number(key: str, value: object, *, minimum: float | None = None) -> float:
    """Returns `value` as a float if it is at least `minimum` (without one, above 0) and at most 1e12.

    Raises ConfigError naming `key`.
    """
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not (value > 0 if minimum is None else value >= minimum) or not value <= _MAX_NUMBER:
        bound = "above 0" if minimum is None else f"of at least {minimum:g}"
        raise ConfigError(f"must be a number {bound}, not {shorten(value)}", field=key, value=value)
    return float(value)


def check_mapping(key: str, value: object) -> dict[str, object]:
    """Returns a copy of a JSON object, null counting as empty; raises ConfigError naming `key`."""
    if value is not None and not isinstance(value, Mapping):
        raise ConfigError(f"must be an object or null, not {shorten(value)}", field=key, value=value)
    return dict(value or {})

"""Default parameters of requests from a model's generation_config.json, and its unsupported keys."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxserve.errors import ConfigError, InvalidRequestError, shorten
from jaxserve.model_options import ModelOptions
from jaxserve.sampling_params import SamplingParams

_log = logging.getLogger(__name__)
_FILE = "generation_config.json"
_NAMES = {  # keys of the file with a parameter of their own
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "stop_strings": "stop",
}
# Unsupported keys that change tokens in transformers; null and the values beside them change nothing. Two keys are
# ignored silently, as in vLLM: `do_sample`, because a request's temperature decides it, and `max_length`, which is the
# model's context in nearly all files.
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "assistant_early_exit": (),
    "begin_suppress_tokens": ([],),
    "constraints": ([],),
    "diversity_penalty": (0,),
    "dola_layers": (),
    "encoder_no_repeat_ngram_size": (0,),
    "encoder_repetition_penalty": (1,),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "exponential_decay_length_penalty": (),
    "force_words_ids": ([],),
    "forced_bos_token_id": (),
    "forced_decoder_ids": ([],),
    "forced_eos_token_id": (),
    "guidance_scale": (1,),
    "max_time": (),
    "min_length": (0,),
    "no_repeat_ngram_size": (0,),
    "num_beam_groups": (1,),
    "num_beams": (1,),
    "num_return_sequences": (1,),
    "penalty_alpha": (0,),
    "sequence_bias": ({}, []),
    "token_healing": (False,),
    "top_h": (),
    "typical_p": (1,),
    "watermarking_config": (),
}


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """The parameters that requests inherit unless they set them."""

    params: SamplingParams
    max_tokens: int | None = None  # the file's; None: a server's answers end with the context
    is_limit: bool = False  # the operator chose the file, so `max_tokens` also limits a server's requests

    def limit_tokens(self, asked: int | None) -> int | None:
        """Returns the `max_tokens` of a server's request that asked for `asked` tokens; None: no limit."""
        if self.max_tokens is None or asked is None:
            return self.max_tokens if asked is None else asked
        return min(asked, self.max_tokens) if self.is_limit else asked


def find_generation_config(options: ModelOptions, path: Path | None) -> dict[str, Any]:
    """Returns the entries of generation_config.json: the model's own, those of a named directory, or {}.

    Args:
        options: `generation_config` is "auto", "vllm" (none) or a directory.
        path: the model's directory, if it has one.

    Raises:
        ConfigError: the directory has no such file, or the file is malformed.
    """
    from jaxserve.core.weights import read_generation_config

    if options.generation_config == "vllm":
        return {}
    if not options.names_generation_config:
        return read_generation_config(path) if path is not None else {}
    directory = Path(options.generation_config).expanduser()
    if not (directory / _FILE).is_file():
        message = f"must be 'auto', 'vllm' or a directory with a {_FILE}, got {shorten(options.generation_config)}"
        raise ConfigError(message, field="generation_config", value=options.generation_config)
    return read_generation_config(directory)


def read_end_tokens(options: ModelOptions, path: Path | None) -> tuple[int, ...]:
    """Returns the end tokens in the model's own files, and in the directory that `generation_config` names.

    They apply with any tokenizer, and without one.
    """
    from jaxserve.tokenizers.files import read_eos_token_ids

    own = read_eos_token_ids(path) if path is not None else ()
    if options.names_generation_config:
        own += read_eos_token_ids(Path(options.generation_config).expanduser())
    return tuple(dict.fromkeys(own))


def read_generation_defaults(
    given: Mapping[str, Any], *, end_tokens: Sequence[int], has_tokenizer: bool, is_limit: bool = False
) -> GenerationDefaults:
    """Returns the defaults in a generation_config.json. One warning names its unsupported keys.

    Args:
        given: the file's entries; null counts as absent.
        end_tokens: the model's; `bad_words_ids` cannot forbid them.
        has_tokenizer: stop strings need one.
        is_limit: whether `max_new_tokens` limits all requests of a server.

    Raises:
        ConfigError: names the file and the key with an invalid value.
    """
    known = {key: value for key, value in given.items() if value is not None}
    unsupported = [key for key, harmless in _UNSUPPORTED.items() if key in known and known[key] not in harmless]
    if not has_tokenizer and known.pop("stop_strings", None):
        unsupported.append("stop_strings")
    if unsupported:
        named = ", ".join(f"{key}={shorten(given[key])}" for key in unsupported)
        _log.warning("%s asks for what is not supported, and answers are made without it: %s", _FILE, named)
    options = {name: known[key] for key, name in _NAMES.items() if key in known}
    if "max_tokens" not in options and isinstance(options.get("min_tokens"), int):
        options["max_tokens"] = max(options["min_tokens"], SamplingParams().max_tokens or 1)
    options |= _read_bans(known, end_tokens)
    try:
        params = SamplingParams(**options)
    except InvalidRequestError as error:
        keys = {name: key for key, name in _NAMES.items()} | {"bad_words": "bad_words_ids"}
        message = f"{keys.get(error.field, error.field)}{str(error).removeprefix(error.field)}"
        raise ConfigError(message, field=_FILE, value=error.value) from error
    return GenerationDefaults(params, known.get("max_new_tokens"), is_limit)


def _read_bans(known: Mapping[str, Any], end_tokens: Sequence[int]) -> dict[str, Any]:
    """Returns the parameters `suppress_tokens` (single tokens) and `bad_words` (sequences of several)."""
    words, tokens = known.get("bad_words_ids", []), known.get("suppress_tokens", [])
    for key, value, kind in (("bad_words_ids", words, list), ("suppress_tokens", tokens, int)):
        if not isinstance(value, list) or not all(isinstance(each, kind) for each in value):
            wanted = "token ids" if kind is int else "lists of token ids"
            raise ConfigError(f"{key}: must be a list of {wanted}, got {shorten(value)}", field=_FILE, value=value)
    single = [word[0] for word in words if len(word) == 1 and word[0] not in end_tokens]
    return {"suppress_tokens": (*tokens, *single), "bad_words": [word for word in words if len(word) != 1]}

"""The option `speculative_config`: how tokens are drafted, in vLLM's keys."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, NoReturn

from jaxserve.errors import ConfigError, shorten

_FIELD = "speculative_config"
_SUFFIX_DRAFTS = 8  # longer runs of copied text are rare, and every draft costs, right or wrong
_CORPUS_TOKENS = 65_536
_LAST_ROW = 2**31 - 1
_COMMON = ("method", "num_speculative_tokens", "rejection_sample_method", "num_speculative_tokens_per_batch_size")
_KEYS = {
    "ngram": ("prompt_lookup_min", "prompt_lookup_max"),
    "suffix": (
        "suffix_decoding_max_tree_depth",
        "suffix_decoding_max_spec_factor",
        "suffix_decoding_min_token_prob",
        "suffix_decoding_max_cached_requests",
        "suffix_decoding_corpus_tokens",
    ),
    "eagle3": ("model", "draft_sample_method"),
    "mtp": ("draft_sample_method",),
    "draft_model": ("model", "draft_sample_method"),
}
METHODS = tuple(_KEYS)
_SYNONYMS = {"[ngram]": "ngram", "ngram_gpu": "ngram", "mimo_mtp": "mtp"}
_CHAINS = "drafts are chains of single tokens; leave it out"
_TARGETS = "a drafter has the target's; leave it out"
_SYNTHETIC = "every draft is compared with the row's own token; leave it out"

# Keys of vLLM that have no counterpart: (values that would change nothing, what to do about others).
_FOREIGN: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "acceptance_method": (("rejection_sampler",), _SYNTHETIC),
    "adaptive_verification": ((False,), "the width of a step follows measured times anyway; leave it out"),
    "attention_backend": ((), _TARGETS),
    "code_revision": ((), "a repository's code is never run; leave it out"),
    "disable_by_batch_size": (
        (),
        "use num_speculative_tokens_per_batch_size, or leave it out: widths follow the clock",
    ),
    "disable_eagle_block_drop": ((True, False), ""),
    "disable_log_stats": ((True, False), ""),
    "disable_logprobs": ((False,), "log-probabilities are the same with drafts and without"),
    "disable_padded_drafter_batch": ((True, False), ""),
    "draft_load_config": (({},), _TARGETS),
    "draft_tensor_parallel_size": ((), "must be that of the target, which the drafter shares; leave it out"),
    "enable_adaptive_verification": ((False,), "the width of a step follows measured times anyway; leave it out"),
    "enforce_eager": ((True, False), ""),
    "index_share_for_mtp_iteration": ((False,), "there is no sparse attention; leave it out"),
    "kv_cache_dtype": (("auto",), _TARGETS),
    "max_model_len": ((), "drafts are made up to the target's max_model_len; leave it out"),
    "moe_backend": ((), "a drafter with experts chooses its products as any model does"),
    "parallel_drafting": ((False,), _CHAINS),
    "quantization": ((), "quantized drafters are not read; use the unquantized repository"),
    "revision": ((), "give a directory as model"),
    "speculative_token_tree": ((), _CHAINS),
    "synthetic_acceptance_length": ((), _SYNTHETIC),
    "synthetic_acceptance_rates": ((), _SYNTHETIC),
    "tensor_parallel_size": ((), "is an option of the engine, which the drafter shares; leave it out here"),
    "use_heterogeneous_vocab": ((False,), "a drafter must have the target's vocabulary"),
    "use_local_argmax_reduction": ((True, False), ""),
}


@dataclass(frozen=True, slots=True)
class SpeculativeConfig:
    """Who drafts, and how many tokens. The keys of other methods are refused, so each is None or a default there."""

    method: str  # "ngram", "suffix", "eagle3", "mtp" or "draft_model"
    num_speculative_tokens: int  # the most drafts of a row in a step
    model: str | None = None  # the checkpoint of the head or the draft model
    prompt_lookup_min: int = 1  # ngram: the fewest tokens that must match
    prompt_lookup_max: int = 1  # and the most that are compared
    suffix_decoding_max_tree_depth: int = 24  # suffix: the most tokens that are compared
    suffix_decoding_max_spec_factor: float = 1.0  # drafts per matched token
    suffix_decoding_min_token_prob: float = 0.1  # share of a draft among the continuations seen
    suffix_decoding_max_cached_requests: int = 10_000  # finished answers to search; 0: only the row's own tokens
    suffix_decoding_corpus_tokens: int = _CORPUS_TOKENS  # tokens of finished answers that are kept
    draft_sample_method: str = "greedy"  # or "probabilistic": drafts are drawn with the row's own uniforms
    rejection_sample_method: str = "standard"
    num_speculative_tokens_per_batch_size: tuple[tuple[int, int, int], ...] | None = None  # (from, to, drafts)

    @property
    def has_weights(self) -> bool:
        """Whether drafts come from a model of their own, and so cost time."""
        return "draft_sample_method" in _KEYS[self.method]

    def to_dict(self) -> dict[str, Any]:
        """Returns the keys of its method and what else is not a default, as `read_speculative_config` takes them."""
        own = (*_COMMON, *_KEYS.get(self.method, ()))
        named = {f.name: (getattr(self, f.name), f.default) for f in fields(self)}
        return {
            name: value
            for name, (value, default) in named.items()
            if value is not None and (name in own or value != default)
        }


def read_speculative_config(value: Mapping[str, Any] | SpeculativeConfig) -> SpeculativeConfig:
    """Returns the config of vLLM's keys, with vLLM's defaults; None as a value means "not set".

    Without `method`, it follows from `model` where vLLM reads it off the name: "ngram", or a name with "eagle3". Two
    lookups differ from vLLM: `suffix` drafts at most 8 tokens by default (vLLM: `suffix_decoding_max_tree_depth`), and
    `num_speculative_tokens_per_batch_size` comes out without gaps: rows between two ranges, or beyond the last, have
    the drafts of the range before them (as vLLM looks them up).

    Raises:
        ConfigError: a key is unknown, belongs to another method, or has a value that cannot be honoured. `field` is
            "speculative_config." and the key.
    """
    if isinstance(value, SpeculativeConfig):
        value = value.to_dict()
    if not isinstance(value, Mapping):
        message = f"must be a table of keys like {{'method': 'ngram', ...}}, got {shorten(value)}"
        raise ConfigError(message, field=_FIELD, value=value)
    given = _drop_harmless({name: each for name, each in value.items() if each is not None})
    method = given["method"] = _find_method(given)
    if method in ("ngram", "suffix") and given.get("model") in (method, "[ngram]", "ngram_gpu"):
        del given["model"]  # vLLM's scripts repeat the method
    _refuse_other_methods(method, given)
    _require_one_of(given, "rejection_sample_method", "standard")
    if method == "ngram":
        given |= _read_lookup(given)
    elif method == "suffix":
        _check_suffix(given)
    elif "model" in _KEYS[method]:
        model = given.get("model")
        if not isinstance(model, str) or not model:
            _refuse(
                "model", f"must name the checkpoint of the drafter for method {method!r}, got {shorten(model)}", model
            )
    _require_one_of(given, "draft_sample_method", "greedy", "probabilistic")
    limit = _read_num_drafts(method, given)
    if "num_speculative_tokens_per_batch_size" in given:
        table = given["num_speculative_tokens_per_batch_size"]
        given["num_speculative_tokens_per_batch_size"] = _read_table(table, limit)
    return SpeculativeConfig(**given | {"num_speculative_tokens": limit})


def _refuse(key: str, message: str, value: object) -> NoReturn:
    raise ConfigError(message, field=f"{_FIELD}.{key}", value=value)


def _drop_harmless(given: dict[str, Any]) -> dict[str, Any]:
    """Returns the keys without those of vLLM that would change nothing; ConfigError for others and unknown ones."""
    known = [f.name for f in fields(SpeculativeConfig)]
    for name, value in given.items():
        if name in _FOREIGN:
            harmless, instead = _FOREIGN[name]
            if value not in harmless:
                _refuse(name, f"{instead or 'must be true or false'}, got {shorten(value)}", value)
        elif name not in known:
            near = difflib.get_close_matches(str(name), known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"
            _refuse(str(name), f"not a key; {hint}", value)
    return {name: value for name, value in given.items() if name in known}


def _find_method(given: Mapping[str, Any]) -> str:
    """Returns the method by its name here."""
    method, model = given.get("method"), given.get("model")
    if method is None and isinstance(model, str):
        method = "eagle3" if "eagle3" in model.lower() else model if _SYNONYMS.get(model, model) == "ngram" else None
    if method is None:
        _refuse("method", f"must be given: {', '.join(METHODS)}", None)
    name = _SYNONYMS.get(method, method) if isinstance(method, str) else method
    if name not in METHODS:
        _refuse("method", f"must be one of {', '.join(METHODS)}, got {shorten(method)}", method)
    return str(name)


def _refuse_other_methods(method: str, given: Mapping[str, Any]) -> None:
    own = (*_COMMON, *_KEYS[method])
    for name, value in given.items():
        if name in own:
            continue
        if name == "model" and method == "mtp":
            _refuse(name, "must be left out for method 'mtp', whose head is in the target's own checkpoint", value)
        owners = " and ".join(repr(each) for each, keys in _KEYS.items() if name in keys)
        _refuse(name, f"belongs to {owners}, not to method {method!r}; leave it out", value)


def _read_num_drafts(method: str, given: Mapping[str, Any]) -> int:
    count = given.get("num_speculative_tokens", _SUFFIX_DRAFTS if method == "suffix" else None)
    if count is None:
        _refuse("num_speculative_tokens", f"must be given for method {method!r}: the most drafts of a step", None)
    return _require_integer("num_speculative_tokens", count, 1)


def _require_integer(key: str, value: Any, least: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        _refuse(key, f"must be an integer of at least {least}, got {shorten(value)}", value)
    return int(value)


def _require_one_of(given: Mapping[str, Any], key: str, *choices: str) -> None:
    if key in given and given[key] not in choices:
        _refuse(key, f"must be {' or '.join(map(repr, choices))}, got {shorten(given[key])}", given[key])


def _read_lookup(given: Mapping[str, Any]) -> dict[str, int]:
    """Returns both bounds of the tokens compared: 5 by default, and each the other's where only one is given."""
    bounds = "prompt_lookup_min", "prompt_lookup_max"
    asked = [_require_integer(key, given[key], 1) for key in bounds if key in given] or [5]
    low, high = asked[0], asked[-1]
    if low > high:
        _refuse("prompt_lookup_min", f"must be at most prompt_lookup_max={high}, got {low}", low)
    return {"prompt_lookup_min": low, "prompt_lookup_max": high}


def _check_suffix(given: Mapping[str, Any]) -> None:
    depth, requests = "suffix_decoding_max_tree_depth", "suffix_decoding_max_cached_requests"
    corpus, factor, share = (
        "suffix_decoding_corpus_tokens",
        "suffix_decoding_max_spec_factor",
        "suffix_decoding_min_token_prob",
    )
    for key, least in ((depth, 1), (requests, 0), (corpus, 1)):
        if key in given:
            _require_integer(key, given[key], least)
    if given.get(requests) == 0 and given.get(corpus, _CORPUS_TOKENS) != _CORPUS_TOKENS:
        _refuse(corpus, f"must be left out with {requests}=0, which keeps no finished answers", given[corpus])
    if factor in given and not (_is_number(given[factor]) and 0 < given[factor] < math.inf):
        _refuse(factor, f"must be a number above 0, got {shorten(given[factor])}", given[factor])
    if share in given and not (_is_number(given[share]) and 0 <= given[share] <= 1):
        _refuse(share, f"must be a number in [0, 1], got {shorten(given[share])}", given[share])


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _read_table(table: Any, limit: int) -> tuple[tuple[int, int, int], ...]:
    """Returns (first row count, last row count, drafts) of ranges without gaps, the last without an end."""
    key = "num_speculative_tokens_per_batch_size"
    found: list[tuple[int, int, int]] = []
    if not isinstance(table, list | tuple) or not table:
        _refuse(key, f"must be a list of [from, to, drafts], got {shorten(table)}", table)
    for entry in table:
        is_triple = isinstance(entry, list | tuple) and len(entry) == 3
        if not is_triple or any(not isinstance(each, int) or isinstance(each, bool) for each in entry):
            _refuse(key, f"must be a list of [from, to, drafts], got {shorten(entry)} in it", table)
        first, last, count = entry
        before = found[-1][1] if found else 0
        if not before < first <= last or (not found and first != 1):
            where = f"begin above {before}" if found else "begin at 1"
            _refuse(
                key, f"ranges must ascend without overlap; {shorten(entry)} must {where}, and not end before", table
            )
        if not 0 <= count <= limit:
            _refuse(key, f"drafts must be 0 to num_speculative_tokens={limit}, got {shorten(entry)}", table)
        found.append((first, last, count))
    ends = [first - 1 for first, _, _ in found[1:]] + [_LAST_ROW]
    return tuple((first, end, count) for (first, _, count), end in zip(found, ends, strict=True))

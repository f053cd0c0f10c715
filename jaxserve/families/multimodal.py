"""Multimodal checkpoints that are served as text: their language model is read, and the rest is left out."""

from __future__ import annotations

import logging
from dataclasses import replace

from jaxserve.core.models.base import DecoderConfig, Family
from jaxserve.core.models.hf_config import REQUIRED, HFConfig
from jaxserve.core.models.trunk import Trunk
from jaxserve.errors import ConfigError

KEYS: dict[str, object] = {
    "text_config": REQUIRED,
    "tie_word_embeddings": None,
    "eos_token_id": None,
    "dtype": None,
    "torch_dtype": None,
}

TRUNK = Trunk(
    "model.language_model.embed_tokens", "model.language_model.layers", "model.language_model.norm", "lm_head"
)
"""The names that transformers gives the language model since its version 4.52."""

_log = logging.getLogger(__name__)


def serve_as_text(
    text: Family,
    model_type: str,
    architecture: str,
    *,
    ignored_keys: tuple[str, ...],
    towers: tuple[str, ...],
    trunk: Trunk = TRUNK,
) -> Family:
    """Returns the family of checkpoints whose `text_config` is one of `text`.

    Args:
        ignored_keys: those of config.json that only other inputs than text need.
        towers: the modules that read them, whose weights are left out.
    """

    def parse(config: HFConfig) -> DecoderConfig:
        modules = ", ".join(f"{tower}.*" for tower in towers)
        _log.info("%s: text is served by the language model; only other inputs need %s", model_type, modules)
        inner = HFConfig(_read_text_config(config, text.model_type), text.keys, text.ignored_keys)
        return replace(text.parse(inner), family=model_type)

    return replace(
        text,
        model_type=model_type,
        architecture=architecture,
        keys=KEYS,
        parse=parse,
        ignored_keys=ignored_keys,
        trunk=trunk,
        ignored_weights=(*text.ignored_weights, *(rf"{tower.replace('.', r'\.')}\..*" for tower in towers)),
        headless=(),
    )


def _read_text_config(config: HFConfig, model_type: str) -> dict[str, object]:
    """Returns `text_config`; keys that the outer object has as well override it."""
    text = config.mapping("text_config")
    if text.get("model_type", model_type) != model_type:
        raise ConfigError(f"only {model_type} is supported", field="text_config.model_type", value=text["model_type"])
    outer = {key: config.get(key) for key in KEYS if key != "text_config"}
    return text | {key: value for key, value in outer.items() if value is not None}

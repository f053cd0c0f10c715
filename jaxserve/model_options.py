"""The options that say which model is served, and in which form."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxserve.errors import ConfigError, shorten
from jaxserve.options import check_at_least, check_choices, option
from jaxserve.presets import DEMO_MODEL
from jaxserve.quantization_config import CHOICES, SYNONYMS, QuantizationConfig, read_quantization_config


def read_hf_overrides(value: Any) -> dict[str, Any] | None:
    """Returns a table of config.json's keys and their values, None if it is empty; ConfigError if it is no table."""
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        message = f'must be a table of keys of config.json like {{"key": value}}, got {shorten(value)}'
        raise ConfigError(message, field="hf_overrides", value=value)
    return dict(value) or None


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """What to serve."""

    model: str = option(
        DEMO_MODEL, "checkpoint directory, GGUF file, Hugging Face model id, preset name, 'demo' or 'smol'"
    )
    tokenizer: str | None = option(None, "directory or file of the tokenizer, when it is not the model's")
    skip_tokenizer_init: bool = option(False, "work on token ids only")
    hf_overrides: Mapping[str, Any] | None = option(
        None,
        "values in place of those in config.json, by key; null drops a key, and a table changes an inner config",
        read=read_hf_overrides,
    )
    revision: str | None = option(None, "branch, tag or commit of a Hugging Face model id")
    dtype: str = option(
        "auto",
        "dtype of weights and activations; auto: the checkpoint's, or float16 on GPUs that emulate its bfloat16",
        choices=("auto", "float32", "bfloat16", "float16"),
        synonyms={"half": "float16", "float": "float32"},
    )
    load_format: str = option(
        "auto",
        "format of the weights; dummy: random weights, made on the device",
        choices=("auto", "safetensors", "orbax", "dummy"),
    )
    allow_nonfinite: bool = option(False, "use weights that hold NaN or infinity; scales in files still must be finite")
    quantization: str | None = option(
        None,
        "what weights of 16 or 32 bits become while they are read; default: they stay (docs/quantization.md). Of a "
        "quantized checkpoint: its method, which is known without it",
        choices=CHOICES,
        synonyms=SYNONYMS,
    )
    quantization_config: QuantizationConfig | None = option(  # noqa: RUF009 - declares a field, as everywhere
        None,
        "the same for projections and experts apart, and modules that are left out: "
        '{"linear": {"weight": SCHEME, "activation": HOW}, "moe": {"weight": SCHEME}, "ignore": [NAME]}',
        read=read_quantization_config,
    )
    max_model_len: int | None = option(
        None, "tokens of a prompt and its answer together; default: what the model supports"
    )
    generation_config: str = option(
        "auto",
        "defaults of requests; auto: the model's generation_config.json; vllm: none; or a directory with another",
    )
    seed: int = option(0, "seed of dummy weights, and of the seeds drawn for requests without one")

    def __post_init__(self) -> None:
        check_choices(self)
        check_at_least(self, max_model_len=2, seed=0)
        if self.quantization == "online" and self.quantization_config is None:
            raise ConfigError("needs quantization_config, which says how", field="quantization", value="online")

    @property
    def names_generation_config(self) -> bool:
        """Whether `generation_config` is a directory."""
        return self.generation_config not in ("auto", "vllm")

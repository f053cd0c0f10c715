"""The description of an engine, which recordings, bundles and nodes compare: of quantized models above all."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from jaxserve.config import EngineConfig
from jaxserve.core.models.matrix_formats import MatrixFormat, Quantization, Targets
from jaxserve.core.runtime.identity import describe_model, list_chosen_options
from jaxserve.families.registry import parse_config
from jaxserve.features.multinode.wire import pack
from jaxserve.presets import load_preset
from jaxserve.quantization_config import QuantizationConfig
from pallas_kernels import QuantizedProducts
from tests.golden_cases import load_case
from tests.quantized_files import METHODS

LLAMA = load_preset("llama-30m") or {}
CONFIGS = {name: LLAMA | {"quantization_config": dict(method.config)} for name, method in METHODS.items()}
CONFIGS["gpt-oss"] = load_case("gpt_oss_mxfp4").config


@pytest.mark.parametrize("name", CONFIGS)
def test_a_quantized_model_is_described_in_values_of_json(name: str) -> None:
    described = describe_model(parse_config(CONFIGS[name]))
    assert described["model"]["quantization"]["rules"]
    assert json.loads(pack(described)[4:]) == described  # as nodes send it
    assert json.loads(json.dumps(described)) == described  # as files have it


def test_sets_are_sorted_so_that_two_processes_have_them_alike() -> None:
    names = [f"model.layers.{index}.mlp.gate" for index in range(40)]
    settings = METHODS["awq"].config | {"modules_to_not_convert": names}
    described = describe_model(parse_config(LLAMA | {"quantization_config": settings}))
    (targets, _), *_ = described["model"]["quantization"]["rules"]
    assert targets["names"] == sorted(names)


FORM = MatrixFormat("plain", "int8", (1, None))
QUANTIZATION = Quantization("gptq", ((Targets(), FORM),))
# Another value than the default of each field.
OTHER_FORMATS: dict[str, Any] = {
    "packing": "gptq",
    "dtype": "int4",
    "block": (1, 8),
    "scale": "scales",
    "other_scale": "weight_scale",
    "zeros": True,
    "zero_offset": 1,
    "ordered": True,
    "scale_dtype": "bfloat16",
    "factor": "weight_scale_2",
    "divides": True,
    "quantizes_rows": True,
}
OTHER_TARGETS: dict[str, Any] = {"names": frozenset({"lm_head"}), "patterns": ("model",)}
OTHER_QUANTIZATIONS: dict[str, Any] = {
    "method": "awq",
    "rules": (),
    "while_loading": True,
    "num_devices": 2,
    "widened": True,
    "products": QuantizedProducts(row_dtypes=("int8",)),
}
OTHER_OPTIONS: dict[str, Any] = {
    "linear": "fp8_per_block",
    "moe": "mxfp4",
    "activation": "int8_per_token",
    "ignore": frozenset({"lm_head", "k_proj"}),
}


def list_changes() -> list[Quantization]:
    formats = [dataclasses.replace(FORM, **{name: value}) for name, value in OTHER_FORMATS.items()]
    targets = [Targets(**{name: value}) for name, value in OTHER_TARGETS.items()]
    rules = [(Targets(), form) for form in formats] + [(each, FORM) for each in targets]
    changed = [dataclasses.replace(QUANTIZATION, rules=(rule,)) for rule in rules]
    return changed + [dataclasses.replace(QUANTIZATION, **{name: value}) for name, value in OTHER_QUANTIZATIONS.items()]


def test_every_field_of_a_quantization_is_part_of_the_description() -> None:
    for kind, others in (
        (MatrixFormat, OTHER_FORMATS),
        (Targets, OTHER_TARGETS),
        (Quantization, OTHER_QUANTIZATIONS),
        (QuantizationConfig, OTHER_OPTIONS),
    ):
        assert list(others) == [field.name for field in dataclasses.fields(kind)], kind
    model = parse_config(LLAMA)
    texts = [
        json.dumps(describe_model(dataclasses.replace(model, quantization=each)))
        for each in (None, QUANTIZATION, *list_changes())
    ]
    assert len(set(texts)) == len(texts)


TABLES: dict[str, dict[str, Any]] = {
    **{name: {"quantization_config": QuantizationConfig(**{name: value})} for name, value in OTHER_OPTIONS.items()},
    "pooler": {"pooler_config": {"pooling_type": "MEAN", "use_activation": False, "dimensions": 8}},
}


@pytest.mark.parametrize("name", TABLES)
def test_an_option_that_is_described_is_read_again(name: str) -> None:
    config = EngineConfig.from_options(**TABLES[name])
    options = list_chosen_options(config)
    assert options and json.loads(pack(options)[4:]) == options
    assert EngineConfig.from_options(**json.loads(json.dumps(options))) == config

"""What users are told of quantized weights."""

from __future__ import annotations

import dataclasses

from jaxserve.core.runtime.memory import params_bytes
from jaxserve.core.runtime.weight_report import describe_weights
from jaxserve.families.registry import param_specs, parse_config
from jaxserve.presets import load_preset

LLAMA = load_preset("llama-3.1-8b") or {}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128}


def test_bits_count_scales_and_zero_points() -> None:
    model = parse_config(LLAMA | {"quantization_config": AWQ})
    assert describe_weights(model) == "awq as int4, 4.31 bits each"  # 4 + (32 + 8) / 128
    assert model.quantization is not None
    wide = dataclasses.replace(model, quantization=dataclasses.replace(model.quantization, widened=True))
    assert describe_weights(wide) == "awq as int8, 8.31 bits each"
    assert describe_weights(parse_config(LLAMA)) is None


def test_all_expanded() -> None:
    settings = AWQ | {
        "modules_to_not_convert": ["self_attn.q_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.down_proj"]
    }
    model = parse_config(LLAMA | {"quantization_config": settings})
    assert describe_weights(model) == "awq, all expanded to bfloat16"


def test_the_plan_counts_packed_bytes() -> None:
    plain, packed = (
        params_bytes(param_specs(parse_config(LLAMA | extra)), 1) for extra in ({}, {"quantization_config": AWQ})
    )
    quantized = 32 * (4096 * (4096 + 2 * 1024) + 4096 * 4096 + 3 * 4096 * 14336)
    assert plain - packed == quantized * 2 - quantized * (4 + 40 / 128) / 8

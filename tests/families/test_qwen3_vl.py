"""Qwen3-VL: its checkpoints are read as Qwen 3, whose values its language model has."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from jaxserve.errors import ConfigError
from jaxserve.families.registry import ignored_weights, list_params, parse_config
from tests.families.rotations import drop_sections
from tests.golden_cases import load_case

DENSE, MOE = "qwen3", "qwen3_moe"


def wrap(name: str, **text: Any) -> dict[str, Any]:
    """The config.json of a Qwen3-VL whose language model is that of a golden, as published."""
    kind, architecture = ("qwen3_vl_moe", "Qwen3VLMoe") if name == MOE else ("qwen3_vl", "Qwen3VL")
    inner = {key: value for key, value in load_case(name).config.items() if key != "architectures"}
    rope = {"rope_type": "default", "mrope_section": [1, 1, 2], "mrope_interleaved": True, "rope_theta": 10000.0}
    inner = {key: value for key, value in inner.items() if key not in ("rope_scaling", "rope_theta")}
    return {
        "model_type": kind,
        "architectures": [f"{architecture}ForConditionalGeneration"],
        "text_config": inner | {"model_type": f"{kind}_text", "rope_parameters": rope} | text,
        "vision_config": {"depth": 2, "deepstack_visual_indexes": [0]},
        "vision_start_token_id": 5,
        "image_token_id": 6,
    }


@pytest.mark.parametrize("name", [DENSE, MOE])
def test_checkpoints_are_read_as_qwen3(name: str) -> None:
    plain, config = parse_config(load_case(name).config), parse_config(wrap(name))
    assert replace(drop_sections(config), family=plain.family) == plain
    names = {name for parameter in list_params(config).values() for name in parameter.source.names}
    assert {each.rsplit(".layers", 1)[0] for each in names if ".layers" in each} == {"model.language_model"}
    for each in ("model.visual.blocks.0.attn.qkv.weight", "model.visual.deepstack_merger_list.0.norm.bias"):
        assert any(re.fullmatch(pattern, each) for pattern in ignored_weights(config))


def test_packed_experts_are_input_first() -> None:
    """The files have [E, in, out] where transformers' other models with packed experts have [E, out, in]."""
    plain, config = list_params(parse_config(load_case(MOE).config)), list_params(parse_config(wrap(MOE)))
    rng = np.random.default_rng(0)
    for name in ("layers.1.experts.gate_up.weight", "layers.1.experts.down.weight"):
        packed, other = plain[name].source.otherwise, config[name].source
        assert packed is not None
        assert other.names == tuple(each.replace("model.", "model.language_model.", 1) for each in packed.names)
        tensor = rng.standard_normal(packed.shapes[0])
        assert other.shapes == (tensor.swapaxes(1, 2).shape,)
        np.testing.assert_array_equal(other.build(tensor.swapaxes(1, 2)), packed.build(tensor))


def test_experts_that_are_not_normalized_are_refused() -> None:
    with pytest.raises(ConfigError, match="norm_topk_prob"):
        parse_config(wrap(MOE, norm_topk_prob=False))

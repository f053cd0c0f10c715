"""Qwen3-VL, dense and with experts: the language model of a checkpoint that reads images is Qwen 3."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from jaxserve.core.models.base import CheckpointLayer, DecoderConfig, HostArray, Parameter, Table
from jaxserve.core.models.hf_config import HFConfig
from jaxserve.core.models.parameters import make_source
from jaxserve.families import qwen2_moe, qwen3, qwen3_moe
from jaxserve.families.multimodal import serve_as_text

VISION_KEYS = ("vision_config", "image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
TOWERS = ("model.visual",)


def list_layer_params(layer: CheckpointLayer) -> Table:
    """As Qwen3-MoE's; experts of one tensor each for gate and up, and for down, are [E, in, out]."""
    table = qwen2_moe.list_layer_params(layer)
    return {name: _transpose(each) if name.startswith("experts.") else each for name, each in table.items()}


def _transpose(parameter: Parameter) -> Parameter:
    """Returns a parameter of all experts whose packed form is read with the last two axes of its tensor exchanged."""
    packed = parameter.source.otherwise
    assert packed is not None
    (shape,) = packed.shapes

    def build(tensor: np.ndarray) -> HostArray:
        return packed.build(np.swapaxes(tensor, 1, 2))

    return replace(parameter, source=make_source(packed.names, ((shape[0], shape[2], shape[1]),), build))


def parse_moe(config: HFConfig) -> DecoderConfig:
    """Reads the `text_config` of a model with experts, whose weights are always normalized."""
    config.require(norm_topk_prob=True)
    return qwen3_moe.parse(config)


FAMILY = serve_as_text(
    replace(qwen3.FAMILY, model_type="qwen3_vl_text"),
    "qwen3_vl",
    "Qwen3VLForConditionalGeneration",
    ignored_keys=VISION_KEYS,
    towers=TOWERS,
)

MOE_FAMILY = serve_as_text(
    replace(
        qwen3_moe.FAMILY,
        model_type="qwen3_vl_moe_text",
        keys=qwen3_moe.KEYS | {"norm_topk_prob": True},
        parse=parse_moe,
        table=list_layer_params,
    ),
    "qwen3_vl_moe",
    "Qwen3VLMoeForConditionalGeneration",
    ignored_keys=VISION_KEYS,
    towers=TOWERS,
)

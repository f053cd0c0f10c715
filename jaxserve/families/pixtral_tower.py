"""The tower of Pixtral and of Mistral Small 3: a transformer over patches, and a projector into the text model.

Parameters, beside those of the layers: `patches` [values of a patch, D]; `pre_norm`, in front of the layers; and
`projector` with `up` and `down`. Mistral Small 3 has in front of these `norm` and `merge` [patches of a square x D, D].
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from jaxtyping import Array, Float

from jaxserve.core.layers.activations import ACTIVATIONS, LEARNED
from jaxserve.core.layers.context import LayerContext
from jaxserve.core.layers.linear import linear
from jaxserve.core.layers.mlp import MLPConfig, plain_mlp
from jaxserve.core.layers.norm import NormConfig, normalize
from jaxserve.core.models.base import CheckpointLayer, DecoderConfig, Leaves, Stream, Table
from jaxserve.core.models.common import read_num_layers
from jaxserve.core.models.hf_config import HFConfig, check_integer, check_mapping
from jaxserve.core.models.layouts import JoinedRows, transpose
from jaxserve.core.models.parameters import (
    attention_params,
    linear_params,
    mlp_params,
    norm_params,
    wide_norm_params,
)
from jaxserve.core.models.tower import Tower, TowerConfig
from jaxserve.core.models.tower_parts import (
    COLOURS,
    arrange_squares,
    describe_squares,
    embed_patches,
    make_blocks,
    patch_params,
    read_axial_rope,
    read_heads,
    rotate_places,
    run_blocks,
)
from jaxserve.errors import ConfigError
from jaxserve.families.mistral import TOWERS
from jaxserve.media.processors import ImageProcessor
from jaxserve.media.processors.pixtral import PixtralShape
from jaxserve.media.prompt import ImageTokens

KEYS: dict[str, object] = {
    "model_type": "pixtral",
    "hidden_size": 1024,
    "hidden_act": "gelu",
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_channels": 3,
    "head_dim": None,
    "patch_size": 16,
    "rope_theta": 10000.0,
    "rope_parameters": None,
}
_IGNORED = (
    *("dtype", "torch_dtype"),  # the tower has the dtype of the text model
    *("image_size", "tie_word_embeddings"),  # the processor has the longest edge; there are no words
)
_AROUND: dict[str, object] = {
    "multimodal_projector_bias": False,
    "projector_hidden_act": "gelu",
    "spatial_merge_size": 2,
    "vision_feature_layer": -1,
}
# Pixtral's own files are those of a model whose defaults are for another tower.
_AROUND_PIXTRAL = {
    "multimodal_projector_bias": True,
    "projector_hidden_act": "gelu",
    "vision_feature_layer": -2,
    "vision_feature_select_strategy": "default",
}
_TOWER, _PROJECTOR = TOWERS
_NORM = NormConfig(eps=1e-5)
_MODULES = {part: f"attention.{part}_proj" for part in "qkvo"}
_MARK, _ROW_END, _END = "[IMG]", "[IMG_BREAK]", "[IMG_END]"


def parse(raw: Mapping[str, Any], text: DecoderConfig, processor: ImageProcessor) -> TowerConfig:
    """Returns the tower that `vision_config` and the keys around it describe; ConfigError names the key."""
    config = HFConfig(check_mapping("vision_config", raw.get("vision_config")), KEYS, _IGNORED, place="vision_config")
    config.require(model_type=KEYS["model_type"], num_channels=COLOURS)
    attention, around = read_heads(config, "num_attention_heads", bias=False), _read_around(raw)
    config.require(head_dim=attention.head_dim)
    merges, shape = _merges(raw), processor.shape
    assert isinstance(shape, PixtralShape)
    merge_size = around.integer("spatial_merge_size") if merges else 1
    for key, size, found in (
        ("patch_size", config.integer("patch_size"), shape.patch_size),
        ("spatial_merge_size", merge_size, shape.merge_size),
    ):
        if size != found:
            raise ConfigError(f"{size} must be that of processor_config.json, {found}", field=key, value=size)
    activations = ACTIVATIONS.keys() - LEARNED.keys()
    mlp = MLPConfig(config.integer("intermediate_size"), config.choice("hidden_act", activations))
    depth = read_num_layers(config)
    return TowerConfig(
        blocks=make_blocks(text, config.integer("hidden_size"), depth, attention, mlp, _NORM),
        processor=processor,
        out_size=text.hidden_size,
        merge_size=merge_size,
        rope=read_axial_rope(config, attention.head_dim, config.number("rope_theta")),
        projector=MLPConfig(
            text.hidden_size,
            around.choice("projector_hidden_act", activations),
            bias=around.flag("multimodal_projector_bias"),
            gated=False,
        ),
        merger_norm=NormConfig(text.norm.eps) if merges else None,
    )


def _merges(raw: Mapping[str, Any]) -> bool:
    """Whether a square of patches is one vector, as in Mistral Small 3."""
    return raw.get("model_type") == "mistral3"


def _read_around(raw: Mapping[str, Any]) -> HFConfig:
    """Returns the keys around `vision_config`, of which the projector reads the last layer."""
    merges = _merges(raw)
    keys = _AROUND if merges else _AROUND_PIXTRAL
    config = HFConfig({key: raw[key] for key in keys if key in raw}, keys)
    config.require(vision_feature_layer=-1, **({} if merges else {"vision_feature_select_strategy": "full"}))
    return config


def read_tokens(raw: Mapping[str, Any]) -> ImageTokens:
    """Returns the tokens of an image. Its rows have ends, whose ids the tokenizer knows."""
    name = "image_token_index" if "image_token_index" in raw else "image_token_id"
    return ImageTokens(
        mark=_MARK,
        placeholder=_MARK,
        placeholder_id=check_integer(name, raw.get(name), minimum=0),
        row_end=_ROW_END,
        end=_END,
        merge_size=_read_around(raw).integer("spatial_merge_size") if _merges(raw) else 1,
    )


def list_params(config: TowerConfig) -> Table:
    """Returns all parameters by dotted path ("layers.0.qkv.weight")."""
    blocks, size = config.blocks, config.blocks.hidden_size
    patch_size = config.processor.shape.patch_size
    kernel = COLOURS, patch_size, patch_size
    table = patch_params(blocks, f"{_TOWER}.patch_conv", kernel, bias=False)
    table |= wide_norm_params(blocks, "pre_norm", f"{_TOWER}.ln_pre", size)
    for index in range(blocks.num_layers):
        layer = CheckpointLayer(blocks, index, f"{_TOWER}.transformer.layers.{index}")
        params = norm_params(layer, {"attn_norm": "attention_norm", "mlp_norm": "ffn_norm"})
        params |= attention_params(layer, modules=_MODULES) | mlp_params(layer, module="feed_forward")
        table |= {f"layers.{index}.{name}": parameter for name, parameter in params.items()}
    return table | _list_projector(config)


def _list_projector(config: TowerConfig) -> Table:
    blocks, size, out = config.blocks, config.blocks.hidden_size, config.out_size
    assert config.projector is not None
    table: Table = {}
    if config.merger_norm is not None:
        wide, module = size * config.merge_size**2, {f"{_PROJECTOR}.patch_merger.merging_layer": size}
        table |= wide_norm_params(blocks, "projector.norm", f"{_PROJECTOR}.norm", size)
        table |= linear_params(
            blocks, "projector.merge", module, (wide, size), (None, None), _order_squares(size), bias=False
        )
    for leaf, name, shape, axes in (
        ("up", "linear_1", (size, out), (None, "ffn")),
        ("down", "linear_2", (out, out), ("ffn", None)),
    ):
        modules, bias = {f"{_PROJECTOR}.{name}": out}, config.projector.bias
        table |= linear_params(blocks, f"projector.{leaf}", modules, shape, axes, transpose, bias=bias)
    return table


def _order_squares(size: int) -> Any:
    """Returns what makes [patches x D, D] of a matrix [D, D x patches]: a patch's numbers lie beside each other."""

    def build(tensor: np.ndarray) -> JoinedRows:
        return transpose(tensor.reshape(len(tensor), size, -1).swapaxes(1, 2).reshape(len(tensor), -1))

    return build


def run(
    config: TowerConfig, params: Mapping[str, Any], arrays: Mapping[str, Array], ctx: LayerContext
) -> Float[Array, "M 1 D"]:
    """Returns the vectors of all squares of patches."""
    assert config.rope is not None
    x = embed_patches(config, params["patches"], arrays["patches"], ctx)
    x = normalize(config.blocks.norm, params["pre_norm"], x)
    turns = config.rope.inverse_frequencies(1).reshape(-1, 2).T  # every other one is by the column
    rotary = rotate_places(arrays["places"], turns)
    (x,) = run_blocks(config, params["layers"], x, replace(ctx, rotary=rotary))
    return _project(config, params["projector"], x, ctx)[:, None]


def _project(config: TowerConfig, leaves: Leaves, x: Stream, ctx: LayerContext) -> Stream:
    assert config.projector is not None
    if config.merger_norm is not None:
        joined = normalize(config.merger_norm, leaves["norm"], x).reshape(-1, config.merge_size**2 * x.shape[-1])
        x = linear(ctx, leaves["merge"], joined)
    return plain_mlp(config.projector, leaves, x, ctx)


TOWER = Tower(
    processor="pixtral",
    modules=TOWERS,
    parse=parse,
    tokens=read_tokens,
    table=list_params,
    arrange=arrange_squares,
    inputs=describe_squares,
    run=run,
)

"""The tower of Qwen3-VL: a transformer over patches, whose output and some of its layers become vectors for the text.

That of Qwen 3.5 and later is the same without deep layers.

Parameters, beside those of the layers: `patches` [values of a patch in all frames, D] and its bias; `positions`
[side * side, D]; `merger`, and `deep_0` and so on for the deep layers, each with `norm`, `up` and `down`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxserve.core.layers.activations import ACTIVATIONS, LEARNED
from jaxserve.core.layers.context import LayerContext
from jaxserve.core.layers.mlp import MLPConfig, plain_mlp
from jaxserve.core.layers.norm import NormConfig, normalize
from jaxserve.core.models.base import CheckpointLayer, DecoderConfig, Leaves, Stream, Table
from jaxserve.core.models.common import read_num_layers
from jaxserve.core.models.hf_config import REQUIRED, HFConfig, check_integer, check_mapping
from jaxserve.core.models.layouts import transpose
from jaxserve.core.models.parameters import (
    fused_attention_params,
    linear_params,
    norm_params,
    plain_mlp_params,
    vocab_params,
    wide_norm_params,
)
from jaxserve.core.models.tower import Tower, TowerConfig
from jaxserve.core.models.tower_parts import (
    COLOURS,
    embed_patches,
    make_blocks,
    patch_params,
    read_axial_rope,
    read_heads,
    rotate_places,
    run_blocks,
)
from jaxserve.errors import ConfigError, shorten
from jaxserve.media.items import Grid, MediaItem
from jaxserve.media.patch_positions import find_places, stretch_table
from jaxserve.media.processors import ImageProcessor
from jaxserve.media.processors.qwen3_vl import Qwen3VLShape
from jaxserve.media.prompt import ImageTokens

KEYS: dict[str, object] = {
    "depth": REQUIRED,
    "hidden_size": REQUIRED,
    "hidden_act": "gelu_pytorch_tanh",
    "intermediate_size": REQUIRED,
    "num_heads": REQUIRED,
    "in_channels": 3,
    "patch_size": REQUIRED,
    "spatial_merge_size": REQUIRED,
    "temporal_patch_size": REQUIRED,
    "out_hidden_size": REQUIRED,
    "num_position_embeddings": REQUIRED,
    "deepstack_visual_indexes": REQUIRED,
    "rope_parameters": None,
}
_PLAIN_KEYS = KEYS | {"deepstack_visual_indexes": []}
_IGNORED = ("dtype", "torch_dtype")  # the tower has the dtype of the text model
_MODULE = "model.visual"
_NORM = NormConfig(eps=1e-6, centered=True, bias=True, wide=True)
_KEPT_GRIDS = 64  # of 16,384 patches each they have 42 MB
_MARK = "<|image_pad|>"


def parse(raw: Mapping[str, Any], text: DecoderConfig, processor: ImageProcessor) -> TowerConfig:
    """Returns the tower that `vision_config` describes; ConfigError names its key."""
    has_deep_layers = text.family.startswith("qwen3_vl")
    keys = KEYS if has_deep_layers else _PLAIN_KEYS
    config = HFConfig(check_mapping("vision_config", raw.get("vision_config")), keys, _IGNORED, place="vision_config")
    config.require(in_channels=COLOURS, **({} if has_deep_layers else {"deepstack_visual_indexes": []}))
    if not any(kind.rope is not None and kind.rope.sections is not None for kind in text.layers):
        message = "must have mrope_section with mrope_interleaved: tokens of images have three positions"
        raise ConfigError(message, field="text_config.rope_parameters")
    attention = read_heads(config, "num_heads", bias=True)
    _check_processor(config, processor)
    if config.integer("out_hidden_size") != text.hidden_size:
        message = f"must be the hidden_size of text_config, {text.hidden_size}"
        raise ConfigError(message, field="out_hidden_size", value=config.get("out_hidden_size"))
    cells = config.integer("num_position_embeddings")
    if math.isqrt(cells) ** 2 != cells:
        raise ConfigError(f"{cells} is no square number", field="num_position_embeddings", value=cells)
    depth = read_num_layers(config.rename({"num_hidden_layers": "depth"}))
    activation = config.choice("hidden_act", ACTIVATIONS.keys() - LEARNED.keys())
    mlp = MLPConfig(config.integer("intermediate_size"), activation, bias=True, gated=False)
    blocks = make_blocks(text, config.integer("hidden_size"), depth, attention, mlp, _NORM)
    return TowerConfig(
        blocks=blocks,
        processor=processor,
        out_size=text.hidden_size,
        merge_size=config.integer("spatial_merge_size"),
        deep_layers=_read_deep_layers(config, min(depth, text.num_layers), depth),
        positions=math.isqrt(cells),
        rope=read_axial_rope(config, attention.head_dim // 2),
    )


def _check_processor(config: HFConfig, processor: ImageProcessor) -> None:
    """Raises ConfigError unless the processor cuts images as the tower reads them."""
    shape = processor.shape
    assert isinstance(shape, Qwen3VLShape)
    for key, found in (
        ("patch_size", shape.patch_size),
        ("temporal_patch_size", shape.temporal_patch_size),
        ("spatial_merge_size", shape.merge_size),
    ):
        if config.integer(key) != found:
            message = f"{config.get(key)} must be {key.removeprefix('spatial_')} of preprocessor_config.json, {found}"
            raise ConfigError(message, field=key, value=config.get(key))


def _read_deep_layers(config: HFConfig, most: int, depth: int) -> tuple[int, ...]:
    """Returns the layers whose outputs go to layers of the text model: `most` of both there are."""
    key = "deepstack_visual_indexes"
    found = config.get(key)
    if not isinstance(found, list):
        raise ConfigError(f"must be a list of layers, not {shorten(found)}", field=key, value=found)
    layers = [check_integer(key, index, minimum=0, maximum=depth - 1) for index in found]
    if sorted(set(layers)) != layers:
        raise ConfigError(f"must ascend, not {shorten(found)}", field=key, value=found)
    if len(layers) > most:
        message = f"has {len(layers)} layers; the text model has only {most} to add them to"
        raise ConfigError(message, field=key, value=found)
    return tuple(layers)


def read_tokens(raw: Mapping[str, Any]) -> ImageTokens:
    """Returns the tokens of an image; the chat template writes those around it."""
    placeholder = check_integer("image_token_id", raw.get("image_token_id"), minimum=0)
    return ImageTokens(mark=_MARK, placeholder=_MARK, placeholder_id=placeholder)


def list_params(config: TowerConfig) -> Table:
    """Returns all parameters by dotted path ("layers.0.qkv.weight")."""
    blocks, size = config.blocks, config.blocks.hidden_size
    table = patch_params(blocks, f"{_MODULE}.patch_embed.proj", _describe_kernel(config), bias=True)
    positions = (config.positions**2, size)
    table |= vocab_params(blocks, "positions", f"{_MODULE}.pos_embed", positions, shard_vocab=False)
    for index in range(blocks.num_layers):
        layer = CheckpointLayer(blocks, index, f"{_MODULE}.blocks.{index}")
        params = norm_params(layer, {"attn_norm": "norm1", "mlp_norm": "norm2"})
        params |= fused_attention_params(layer, qkv="attn.qkv", out="attn.proj")
        params |= plain_mlp_params(layer, up="mlp.linear_fc1", down="mlp.linear_fc2")
        table |= {f"layers.{index}.{name}": parameter for name, parameter in params.items()}
    table |= _list_merger(config, "merger", f"{_MODULE}.merger", size)
    for index in range(len(config.deep_layers)):
        module = f"{_MODULE}.deepstack_merger_list.{index}"
        table |= _list_merger(config, f"deep_{index}", module, size * config.merge_size**2)
    return table


def _describe_kernel(config: TowerConfig) -> tuple[int, int, int, int]:
    """Returns colours, frames, rows and columns of a patch, in the order of its values."""
    shape = config.processor.shape
    assert isinstance(shape, Qwen3VLShape)
    return COLOURS, shape.temporal_patch_size, shape.patch_size, shape.patch_size


def _list_merger(config: TowerConfig, leaf: str, module: str, norm_size: int) -> Table:
    """Returns the parameters that make vectors of squares of patches, behind a norm over `norm_size` numbers."""
    blocks, wide = config.blocks, config.blocks.hidden_size * config.merge_size**2
    up, down = {f"{module}.linear_fc1": wide}, {f"{module}.linear_fc2": config.out_size}
    table = wide_norm_params(blocks, f"{leaf}.norm", f"{module}.norm", norm_size)
    table |= linear_params(blocks, f"{leaf}.up", up, (wide, wide), (None, "ffn"), transpose, bias=True)
    shape = (wide, config.out_size)
    return table | linear_params(blocks, f"{leaf}.down", down, shape, ("ffn", None), transpose, bias=True)


def arrange(config: TowerConfig, items: Sequence[MediaItem]) -> dict[str, np.ndarray]:
    """Returns "patches", "places", "cells" and "weights" of images behind each other, as `describe_inputs`."""
    patches = np.frombuffer(b"".join(item.patches for item in items), np.uint8)
    found = [_find_positions(item.grid, config.merge_size, config.positions) for item in items]
    places, cells, weights = (np.concatenate(each) for each in zip(*found, strict=True))
    return {"patches": patches.reshape(len(places), -1), "places": places, "cells": cells, "weights": weights}


@functools.lru_cache(maxsize=_KEPT_GRIDS)
def _find_positions(grid: Grid, merge_size: int, side: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    return find_places(grid, merge_size), *stretch_table(grid, merge_size, side)


def describe_inputs(config: TowerConfig, num_patches: int) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the arrays of N patches: bytes, rows and columns, and the cells of the table around each patch."""
    colours, _, rows, columns = _describe_kernel(config)
    return {
        "patches": jax.ShapeDtypeStruct((num_patches, colours * rows * columns), jnp.uint8),
        "places": jax.ShapeDtypeStruct((num_patches, 2), jnp.int32),
        "cells": jax.ShapeDtypeStruct((num_patches, 4), jnp.int32),
        "weights": jax.ShapeDtypeStruct((num_patches, 4), jnp.float32),
    }


def run(
    config: TowerConfig, params: Mapping[str, Any], arrays: Mapping[str, Array], ctx: LayerContext
) -> Float[Array, "M P D"]:
    """Returns the vectors of all squares of patches: of the last layer, then of each deep layer."""
    assert config.rope is not None
    _, frames, *_ = _describe_kernel(config)
    embedded = embed_patches(config, params["patches"], arrays["patches"], ctx, frames=frames)
    positions = _mix_positions(params["positions"]["weight"], arrays["cells"], arrays["weights"])
    embedded += positions.astype(embedded.dtype)
    rotary = rotate_places(arrays["places"], config.rope.inverse_frequencies(1))
    inner = replace(ctx, rotary=rotary)
    *streams, x = run_blocks(config, params["layers"], embedded, inner, stops=config.deep_layers)
    deep = [_merge(config, params[f"deep_{at}"], _join_squares(config, each), ctx) for at, each in enumerate(streams)]
    return jnp.stack([_merge(config, params["merger"], x, ctx), *deep], axis=1)


def _mix_positions(
    table: Float[Array, "cells D"], cells: Int[Array, "N 4"], weights: Float[Array, "N 4"]
) -> Float[Array, "N D"]:
    """Returns the mean of the vectors of each patch's cells, float32. Cells outside count as the nearest one."""
    found = (table.at[cells[:, corner]].get(mode="clip").astype(jnp.float32) for corner in range(cells.shape[1]))
    return sum(vector * weights[:, corner, None] for corner, vector in enumerate(found))


def _join_squares(config: TowerConfig, x: Float[Array, "N D"]) -> Float[Array, "M wide"]:
    """Returns the patches of each square side by side."""
    return x.reshape(-1, config.merge_size**2 * x.shape[-1])


def _merge(config: TowerConfig, leaves: Leaves, x: Float[Array, "rows size"], ctx: LayerContext) -> Stream:
    """Returns the vectors of squares of patches, [M, out]. The norm is over what `x` has side by side."""
    joined = _join_squares(
        config, normalize(config.blocks.norm, leaves["norm"], x).reshape(-1, config.blocks.hidden_size)
    )
    return plain_mlp(MLPConfig(joined.shape[-1], "gelu", bias=True, gated=False), leaves, joined, ctx)


TOWER = Tower(
    processor="qwen3_vl",
    modules=(_MODULE,),
    parse=parse,
    tokens=read_tokens,
    table=list_params,
    arrange=arrange,
    inputs=describe_inputs,
    run=run,
)

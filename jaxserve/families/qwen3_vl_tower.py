"""The tower of Qwen3-VL: a transformer over patches, whose output and some of its layers become vectors for the text.

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
from jax import lax
from jaxtyping import Array, Float, Int

from jaxserve.core.layers.activations import ACTIVATIONS, LEARNED
from jaxserve.core.layers.attention import AttentionConfig
from jaxserve.core.layers.context import LayerContext, Rotary
from jaxserve.core.layers.embedding import EmbeddingConfig
from jaxserve.core.layers.linear import linear
from jaxserve.core.layers.mlp import MLPConfig, plain_mlp
from jaxserve.core.layers.norm import NormConfig, normalize
from jaxserve.core.layers.rope import RopeConfig
from jaxserve.core.models.base import CheckpointLayer, DecoderConfig, LayerKind, Leaves, Stream, Table
from jaxserve.core.models.blocks import pre_norm_layer
from jaxserve.core.models.common import read_num_layers
from jaxserve.core.models.hf_config import REQUIRED, HFConfig, check_integer, check_mapping, check_number
from jaxserve.core.models.layouts import JoinedRows, transpose
from jaxserve.core.models.parameters import (
    fused_attention_params,
    linear_params,
    norm_params,
    plain_mlp_params,
    vocab_params,
    wide_norm_params,
)
from jaxserve.core.models.tower import Tower, TowerConfig
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
_IGNORED = ("dtype", "torch_dtype")  # the tower has the dtype of the text model
_ROPE_KEYS = {"rope_type": "axial", "rope_theta": 10000.0}
_MODULE = "model.visual"
_NORM = NormConfig(eps=1e-6, centered=True, bias=True, wide=True)
_COLOURS = 3
_KEPT_GRIDS = 64  # of 16,384 patches each they have 42 MB
_MARK = "<|image_pad|>"


def parse(raw: Mapping[str, Any], text: DecoderConfig, processor: ImageProcessor) -> TowerConfig:
    """Returns the tower that `vision_config` describes; ConfigError names its key."""
    config = HFConfig(check_mapping("vision_config", raw.get("vision_config")), KEYS, _IGNORED, place="vision_config")
    config.require(in_channels=_COLOURS)
    hidden, heads = config.integer("hidden_size"), config.integer("num_heads")
    if hidden % heads or hidden // heads % 4:
        message = f"{heads} must cut hidden_size {hidden} into heads of a multiple of 4, which rotate by halves"
        raise ConfigError(message, field="num_heads", value=heads)
    _check_processor(config, processor)
    if config.integer("out_hidden_size") != text.hidden_size:
        message = f"must be the hidden_size of text_config, {text.hidden_size}"
        raise ConfigError(message, field="out_hidden_size", value=config.get("out_hidden_size"))
    cells = config.integer("num_position_embeddings")
    if math.isqrt(cells) ** 2 != cells:
        raise ConfigError(f"{cells} is no square number", field="num_position_embeddings", value=cells)
    head_dim, depth = hidden // heads, read_num_layers(config.rename({"num_hidden_layers": "depth"}))
    activation = config.choice("hidden_act", ACTIVATIONS.keys() - LEARNED.keys())
    mlp = MLPConfig(config.integer("intermediate_size"), activation, bias=True, gated=False)
    attention = AttentionConfig(heads, heads, head_dim, head_dim**-0.5, qkv_bias=True, out_bias=True, causal=False)
    blocks = DecoderConfig(
        family=text.family,
        hidden_size=hidden,
        layers=(LayerKind(attention, None, None, mlp),) * depth,
        norm=_NORM,
        embedding=EmbeddingConfig(vocab_size=1, tied=True),
        max_position_embeddings=1,
        max_model_len=1,
        eos_token_ids=(),
        dtype=text.dtype,
        only_pools=True,
    )
    return TowerConfig(
        blocks=blocks,
        processor=processor,
        out_size=text.hidden_size,
        merge_size=config.integer("spatial_merge_size"),
        deep_layers=_read_deep_layers(config, min(depth, text.num_layers), depth),
        positions=math.isqrt(cells),
        rope=_read_rope(config, head_dim),
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


def _read_rope(config: HFConfig, head_dim: int) -> RopeConfig:
    """Returns the rotation of half a head by one coordinate."""
    given = config.mapping("rope_parameters")
    for key, value in given.items():
        if key not in _ROPE_KEYS or (key == "rope_type" and value != _ROPE_KEYS[key]):
            message = f"{shorten(value)} is not supported; known are {', '.join(map(str, _ROPE_KEYS))} (axial)"
            raise ConfigError(message, field=f"rope_parameters.{key}", value=value)
    theta = check_number("rope_parameters.rope_theta", given.get("rope_theta", _ROPE_KEYS["rope_theta"]))
    return RopeConfig(head_dim // 2, theta)


def read_tokens(raw: Mapping[str, Any]) -> ImageTokens:
    """Returns the tokens of an image; the chat template writes those around it."""
    placeholder = check_integer("image_token_id", raw.get("image_token_id"), minimum=0)
    return ImageTokens(mark=_MARK, placeholder=_MARK, placeholder_id=placeholder)


def list_params(config: TowerConfig) -> Table:
    """Returns all parameters by dotted path ("layers.0.qkv.weight")."""
    blocks, size = config.blocks, config.blocks.hidden_size
    kernel = _describe_kernel(config)
    patch = {f"{_MODULE}.patch_embed.proj": size}
    shape = (math.prod(kernel), size)
    table = linear_params(blocks, "patches", patch, shape, (None, None), _flatten_kernel, bias=True)
    weight = table["patches.weight"]
    source = replace(weight.source, shapes=((size, *kernel),))
    table["patches.weight"] = replace(weight, source=source)
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
    return _COLOURS, shape.temporal_patch_size, shape.patch_size, shape.patch_size


def _flatten_kernel(tensor: np.ndarray) -> JoinedRows:
    """Returns [values, D] of a convolution's weight [D, colours, frames, rows, columns]; a bias [D] unchanged."""
    return transpose(tensor if tensor.ndim == 1 else tensor.reshape(len(tensor), -1))


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
    blocks, pool = config.blocks, ctx.pool
    x = _embed_patches(config, params["patches"], arrays["patches"], ctx)
    x += _mix_positions(params["positions"]["weight"], arrays["cells"], arrays["weights"]).astype(x.dtype)
    rotary = _rotate_places(config, arrays["places"])
    deep = []
    for index, kind in enumerate(blocks.layers):
        x, pool = pre_norm_layer(blocks, kind, params["layers"][index], x, replace(ctx, rotary=rotary, pool=pool))
        if index in config.deep_layers:
            deep.append(_merge(config, params[f"deep_{len(deep)}"], _join_squares(config, x), ctx))
    return jnp.stack([_merge(config, params["merger"], x, ctx), *deep], axis=1)


def _embed_patches(config: TowerConfig, leaf: Leaves, patches: Float[Array, "N values"], ctx: LayerContext) -> Stream:
    """Returns the stream of patches as bytes, each repeated as the frames that the tower reads at once."""
    form, (colours, frames, *_) = config.processor.form, _describe_kernel(config)
    values = patches.reshape(len(patches), colours, 1, -1).astype(jnp.float32) * np.float32(form.rescale_factor)
    if form.mean is not None and form.std is not None:
        mean, std = (np.array(each, np.float32)[:, None, None] for each in (form.mean, form.std))
        values = (values - mean) / std
    values = values.astype(config.blocks.dtype)
    repeated = jnp.broadcast_to(values, (len(patches), colours, frames, values.shape[-1]))
    return linear(ctx, leaf, repeated.reshape(len(patches), -1))


def _mix_positions(
    table: Float[Array, "cells D"], cells: Int[Array, "N 4"], weights: Float[Array, "N 4"]
) -> Float[Array, "N D"]:
    """Returns the mean of the vectors of each patch's cells, float32. Cells outside count as the nearest one."""
    found = (table.at[cells[:, corner]].get(mode="clip").astype(jnp.float32) for corner in range(cells.shape[1]))
    return sum(vector * weights[:, corner, None] for corner, vector in enumerate(found))


def _rotate_places(config: TowerConfig, places: Int[Array, "N 2"]) -> Rotary:
    """Returns cosines and sines [N, half a head]: angles by the row, then by the column."""
    assert config.rope is not None
    frequencies = jnp.asarray(config.rope.inverse_frequencies(1))
    angles = (places.astype(jnp.float32)[:, :, None] * frequencies).reshape(len(places), -1)
    return lax.optimization_barrier((jnp.cos(angles), jnp.sin(angles)))  # else XLA makes them anew for each head


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

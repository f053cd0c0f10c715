"""The tower of Gemma 3: SigLIP over the patches of one size of image, whose vectors are pooled and projected.

Parameters, beside those of the layers: `patches` [values of a patch, D] and its bias; `positions` [side * side, D];
`final_norm`, behind the layers; `projection`, with `norm` [D] and `weight` [D, size of the text model].
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
from jaxtyping import Array, Float

from jaxserve.core.layers.activations import ACTIVATIONS, LEARNED
from jaxserve.core.layers.attention import AttentionConfig
from jaxserve.core.layers.context import LayerContext
from jaxserve.core.layers.linear import linear
from jaxserve.core.layers.mlp import MLPConfig
from jaxserve.core.layers.norm import NormConfig, normalize
from jaxserve.core.models.base import (
    CheckpointLayer,
    DecoderConfig,
    Parameter,
    ParamSpec,
    Table,
    WeightSource,
)
from jaxserve.core.models.common import read_num_layers
from jaxserve.core.models.hf_config import REQUIRED, HFConfig, check_integer, check_mapping
from jaxserve.core.models.parameters import (
    attention_params,
    make_source,
    norm_params,
    plain_mlp_params,
    vocab_params,
    wide_norm_params,
)
from jaxserve.core.models.tower import Tower, TowerConfig
from jaxserve.core.models.tower_parts import COLOURS, embed_patches, make_blocks, patch_params, run_blocks
from jaxserve.errors import ConfigError
from jaxserve.media.items import MediaItem
from jaxserve.media.processors import ImageProcessor
from jaxserve.media.processors.gemma3 import Gemma3Shape
from jaxserve.media.prompt import ImageTokens

KEYS: dict[str, object] = {
    "hidden_size": REQUIRED,
    "hidden_act": "gelu_pytorch_tanh",
    "intermediate_size": REQUIRED,
    "num_hidden_layers": REQUIRED,
    "num_attention_heads": REQUIRED,
    "num_channels": 3,
    "image_size": REQUIRED,
    "patch_size": REQUIRED,
    "layer_norm_eps": 1e-6,
    "vision_use_head": False,
}
MODULES = ("vision_tower", "multi_modal_projector")
_IGNORED = ("dtype", "torch_dtype")  # the tower has the dtype of the text model
_TOWER, _PROJECTOR = MODULES
_PUBLISHED = f"{_TOWER}.vision_model"  # transformers 5 writes its modules without the second name
_MODULES = {"q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj", "o": "self_attn.out_proj"}
_MARK, _PLACEHOLDER, _END = "<start_of_image>", "<image_soft_token>", "<end_of_image>"
_PLACEHOLDER_ID = 262144  # of published vocabularies


def parse(raw: Mapping[str, Any], text: DecoderConfig, processor: ImageProcessor) -> TowerConfig:
    """Returns the tower that `vision_config` describes; ConfigError names its key."""
    config = HFConfig(check_mapping("vision_config", raw.get("vision_config")), KEYS, _IGNORED, place="vision_config")
    config.require(num_channels=COLOURS, vision_use_head=False)
    hidden, heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    if hidden % heads:
        message = f"{heads} must cut hidden_size {hidden} into heads"
        raise ConfigError(message, field="num_attention_heads", value=heads)
    shape = processor.shape
    assert isinstance(shape, Gemma3Shape)
    for key, found in (("image_size", shape.size), ("patch_size", shape.patch_size)):
        if config.integer(key) != found:
            message = f"{config.get(key)} must be {found}, as images are resized and cut (preprocessor_config.json)"
            raise ConfigError(message, field=key, value=config.get(key))
    _check_tokens(raw, shape)
    head_dim = hidden // heads
    activation = config.choice("hidden_act", ACTIVATIONS.keys() - LEARNED.keys())
    mlp = MLPConfig(config.integer("intermediate_size"), activation, bias=True, gated=False)
    attention = AttentionConfig(heads, heads, head_dim, head_dim**-0.5, qkv_bias=True, out_bias=True, causal=False)
    norm = NormConfig(config.number("layer_norm_eps"), centered=True, bias=True, wide=True)
    side = shape.size // shape.patch_size
    return TowerConfig(
        blocks=make_blocks(text, hidden, read_num_layers(config), attention, mlp, norm),
        processor=processor,
        out_size=text.hidden_size,
        merge_size=side // math.isqrt(shape.num_tokens),
        positions=side,
        mutual="all",
    )


def _check_tokens(raw: Mapping[str, Any], shape: Gemma3Shape) -> None:
    """Raises ConfigError unless config.json has as many tokens for an image as the processor."""
    key = "mm_tokens_per_image"
    count = check_integer(key, raw.get(key, 256), minimum=1)
    if count != shape.num_tokens:
        message = f"{count} must be image_seq_length of the processor, {shape.num_tokens}"
        raise ConfigError(message, field=key, value=count)


def read_tokens(raw: Mapping[str, Any]) -> ImageTokens:
    """Returns the tokens of an image. The chat template writes the first of those around it."""
    names = ("image_token_id", "image_token_index")
    name = next((each for each in names if each in raw), names[1])
    placeholder = check_integer(name, raw.get(name, _PLACEHOLDER_ID), minimum=0)
    return ImageTokens(
        mark=_MARK,
        placeholder=_PLACEHOLDER,
        placeholder_id=placeholder,
        before=f"\n\n{_MARK}",
        after=f"{_END}\n\n",
        apart=True,
    )


def list_params(config: TowerConfig) -> Table:
    """Returns all parameters by dotted path ("layers.0.qkv.weight")."""
    blocks, size = config.blocks, config.blocks.hidden_size
    table = patch_params(blocks, f"{_PUBLISHED}.embeddings.patch_embedding", _describe_kernel(config), bias=True)
    positions = (config.positions**2, size)
    table |= vocab_params(
        blocks, "positions", f"{_PUBLISHED}.embeddings.position_embedding", positions, shard_vocab=False
    )
    for index in range(blocks.num_layers):
        layer = CheckpointLayer(blocks, index, f"{_PUBLISHED}.encoder.layers.{index}")
        params = norm_params(layer, {"attn_norm": "layer_norm1", "mlp_norm": "layer_norm2"})
        params |= attention_params(layer, modules=_MODULES)
        params |= plain_mlp_params(layer, up="mlp.fc1", down="mlp.fc2")
        table |= {f"layers.{index}.{name}": parameter for name, parameter in params.items()}
    table |= wide_norm_params(blocks, "final_norm", f"{_PUBLISHED}.post_layernorm", size)
    table = {name: replace(each, source=_rename(each.source)) for name, each in table.items()}
    pooled = replace(blocks, norm=_find_pooled_norm(config))
    table |= wide_norm_params(pooled, "projection.norm", f"{_PROJECTOR}.mm_soft_emb_norm", size)
    spec = ParamSpec((size, config.out_size), blocks.dtype, (None, None), "normal", (size,))
    name = f"{_PROJECTOR}.mm_input_projection_weight"
    return table | {"projection.weight": Parameter(spec, make_source((name,), (spec.shape,), lambda tensor: tensor))}


def _rename(source: WeightSource) -> WeightSource:
    """Returns a source that is also found under the names that transformers writes."""
    names = tuple(name.replace(_PUBLISHED, _TOWER, 1) for name in source.names)
    return replace(source, otherwise=replace(source, names=names))


def _describe_kernel(config: TowerConfig) -> tuple[int, int, int]:
    """Returns colours, rows and columns of a patch, in the order of its values."""
    patch_size = config.processor.shape.patch_size
    return COLOURS, patch_size, patch_size


def _find_pooled_norm(config: TowerConfig) -> NormConfig:
    """Returns the norm of pooled vectors, which is one of Gemma's."""
    return NormConfig(config.blocks.norm.eps, unit_offset=True, wide=True)


def arrange(config: TowerConfig, items: Sequence[MediaItem]) -> dict[str, np.ndarray]:
    """Returns "patches" and "places" of images behind each other, as `describe_inputs`.

    The patches of a vector, a square, are made neighbours. They keep their places, so attention gives the same.
    """
    order = _order_squares(config.positions, config.merge_size)
    patches = np.frombuffer(b"".join(item.patches for item in items), np.uint8)
    patches = patches.reshape(len(items), len(order), -1)[:, order]
    return {"patches": patches.reshape(-1, patches.shape[-1]), "places": np.tile(order, len(items))}


@functools.cache
def _order_squares(side: int, merge_size: int) -> np.ndarray:
    """Returns the indices of the patches of an image, int32, square by square."""
    squares = side // merge_size
    rows = np.arange(side * side, dtype=np.int32).reshape(squares, merge_size, squares, merge_size)
    return rows.swapaxes(1, 2).reshape(-1)


def describe_inputs(config: TowerConfig, num_patches: int) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the arrays of N patches: bytes, and the index of each patch in its image, row by row."""
    return {
        "patches": jax.ShapeDtypeStruct((num_patches, math.prod(_describe_kernel(config))), jnp.uint8),
        "places": jax.ShapeDtypeStruct((num_patches,), jnp.int32),
    }


def run(
    config: TowerConfig, params: Mapping[str, Any], arrays: Mapping[str, Array], ctx: LayerContext
) -> Float[Array, "M 1 D"]:
    """Returns the vectors of all squares of patches."""
    x = embed_patches(config, params["patches"], arrays["patches"], ctx)
    x += params["positions"]["weight"].at[arrays["places"]].get(mode="clip")
    (x,) = run_blocks(config, params["layers"], x, ctx)
    x = normalize(config.blocks.norm, params["final_norm"], x)
    projection, squares = params["projection"], x.reshape(-1, config.merge_size**2, x.shape[-1])
    pooled = jnp.mean(squares.astype(jnp.float32), axis=1).astype(x.dtype)
    return linear(ctx, projection, normalize(_find_pooled_norm(config), projection["norm"], pooled))[:, None]


TOWER = Tower(
    processor="gemma3",
    modules=MODULES,
    parse=parse,
    tokens=read_tokens,
    table=list_params,
    arrange=arrange,
    inputs=describe_inputs,
    run=run,
)

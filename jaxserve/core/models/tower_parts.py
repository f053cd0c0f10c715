"""Parts that towers share: their blocks, patches as a product, and the rotation by rows and columns."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from jaxserve.core.layers.attention import AttentionConfig
from jaxserve.core.layers.context import LayerContext, Rotary
from jaxserve.core.layers.embedding import EmbeddingConfig
from jaxserve.core.layers.linear import linear
from jaxserve.core.layers.mlp import MLPConfig
from jaxserve.core.layers.norm import NormConfig
from jaxserve.core.layers.rope import RopeConfig
from jaxserve.core.layers.stack import Layers, fold_layers
from jaxserve.core.models.base import DecoderConfig, LayerKind, Leaves, Stream, Table
from jaxserve.core.models.blocks import pre_norm_layer
from jaxserve.core.models.hf_config import HFConfig, check_number
from jaxserve.core.models.layouts import JoinedRows, transpose
from jaxserve.core.models.parameters import linear_params
from jaxserve.core.models.tower import TowerConfig
from jaxserve.errors import ConfigError, shorten
from jaxserve.media.items import MediaItem
from jaxserve.media.patch_positions import find_places
from jaxserve.media.processors.processor import PixelForm

COLOURS = 3
_ROPE_TYPES = ("axial", "default")  # two names of the same
_THETA = 10000.0


def read_heads(config: HFConfig, key: str, *, bias: bool) -> AttentionConfig:
    """Returns attention without a mask; `key` has the number of heads, which rotate by rows and columns."""
    hidden, heads = config.integer("hidden_size"), config.integer(key)
    if hidden % heads or hidden // heads % 4:
        message = f"{heads} must cut hidden_size {hidden} into heads of a multiple of 4, which rotate by halves"
        raise ConfigError(message, field=key, value=heads)
    head_dim = hidden // heads
    return AttentionConfig(heads, heads, head_dim, head_dim**-0.5, qkv_bias=bias, out_bias=bias, causal=False)


def make_blocks(
    text: DecoderConfig, hidden_size: int, depth: int, attention: AttentionConfig, mlp: MLPConfig, norm: NormConfig
) -> DecoderConfig:
    """Returns the transformer of a tower, in the dtype of its text model; nothing reads its embedding."""
    return DecoderConfig(
        family=text.family,
        hidden_size=hidden_size,
        layers=(LayerKind(attention, None, None, mlp),) * depth,
        norm=norm,
        embedding=EmbeddingConfig(vocab_size=1, tied=True),
        max_position_embeddings=1,
        max_model_len=1,
        eos_token_ids=(),
        dtype=text.dtype,
        only_pools=True,
    )


def read_axial_rope(config: HFConfig, rotary_dim: int, theta: float = _THETA) -> RopeConfig:
    """Returns the rotation by coordinates that `rope_parameters` describes; `theta` is the default of its base."""
    known = ("rope_type", "rope_theta")
    given = config.mapping("rope_parameters")
    for key, value in given.items():
        if key not in known or (key == "rope_type" and value not in _ROPE_TYPES):
            message = f"{shorten(value)} is not supported; known are {', '.join(known)} ({', '.join(_ROPE_TYPES)})"
            raise ConfigError(message, field=f"rope_parameters.{key}", value=value)
    return RopeConfig(rotary_dim, check_number("rope_parameters.rope_theta", given.get("rope_theta", theta)))


def patch_params(blocks: DecoderConfig, module: str, kernel: tuple[int, ...], *, bias: bool) -> Table:
    """Returns `patches` [values of a patch, D] of a convolution whose kernel [D, *kernel] is as wide as its steps."""
    size = blocks.hidden_size
    shape = (math.prod(kernel), size)
    table = linear_params(blocks, "patches", {module: size}, shape, (None, None), _flatten_kernel, bias=bias)
    weight = table["patches.weight"]
    return table | {"patches.weight": replace(weight, source=replace(weight.source, shapes=((size, *kernel),)))}


def _flatten_kernel(tensor: np.ndarray) -> JoinedRows:
    """Returns [values, D] of a convolution's weight [D, ...]; a bias [D] unchanged."""
    return transpose(tensor if tensor.ndim == 1 else tensor.reshape(len(tensor), -1))


def arrange_squares(config: TowerConfig, items: Sequence[MediaItem]) -> dict[str, np.ndarray]:
    """Returns "patches" and "places" of images behind each other, as `describe_squares`.

    Their patches lie row by row in the items. Those of a vector, a square, are made neighbours. They keep their places,
    so attention gives the same.
    """
    patches, places = [], []
    for item in items:
        place = find_places(item.grid, config.merge_size)
        rows = np.frombuffer(item.patches, np.uint8).reshape(item.num_patches, -1)
        patches.append(rows[place[:, 0] * item.grid[2] + place[:, 1]])
        places.append(place)
    return {"patches": np.concatenate(patches), "places": np.concatenate(places)}


def describe_squares(config: TowerConfig, num_patches: int) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the arrays of N patches: bytes, and their rows and columns."""
    values = COLOURS * config.processor.shape.patch_size**2
    return {
        "patches": jax.ShapeDtypeStruct((num_patches, values), jnp.uint8),
        "places": jax.ShapeDtypeStruct((num_patches, 2), jnp.int32),
    }


def embed_patches(
    config: TowerConfig,
    leaf: Leaves,
    patches: Int[Array, "N values"],
    ctx: LayerContext,
    *,
    form: PixelForm | None = None,
    frames: int = 1,
) -> Stream:
    """Returns the stream of patches as bytes, each [colours, ...] and repeated as so many frames.

    Args:
        form: how bytes become numbers, if not as the processor says.
    """
    form = config.processor.form if form is None else form
    values = patches.reshape(len(patches), COLOURS, 1, -1).astype(jnp.float32) * np.float32(form.rescale_factor)
    if form.mean is not None and form.std is not None:
        mean, std = (np.array(each, np.float32)[:, None, None] for each in (form.mean, form.std))
        values = (values - mean) / std
    values = values.astype(config.blocks.dtype)
    repeated = jnp.broadcast_to(values, (len(patches), COLOURS, frames, values.shape[-1]))
    return linear(ctx, leaf, repeated.reshape(len(patches), -1))


def run_blocks(
    config: TowerConfig,
    layers: Layers,
    x: Stream,
    ctx: LayerContext,
    *,
    layer: Callable[..., tuple[Stream, Any]] = pre_norm_layer,
    stops: Sequence[int] = (),
) -> list[Stream]:
    """Returns the stream behind the blocks `stops`, ascending, and behind the last one.

    Keys and values are in the context's pool. The blocks are alike, so those that are stacked run in a loop
    (`fold_layers`): a TPU's compiler takes ten seconds for each further one.

    Args:
        layer: the function of a block.
    """
    (kind,) = set(config.blocks.layers)

    def run(leaves: Leaves, carry: tuple[Stream, Any]) -> tuple[Stream, Any]:
        stream, pool = carry
        return layer(config.blocks, kind, leaves, stream, replace(ctx, pool=pool))

    streams, carry, first = [], (x, ctx.pool), 0
    for end in (*(stop + 1 for stop in stops), config.blocks.num_layers):
        carry = fold_layers(layers, first, end, run, carry)
        streams.append(carry[0])
        first = end
    return streams


def rotate_places(places: Int[Array, "N 2"], frequencies: Float[np.ndarray, "*axes F"]) -> Rotary:
    """Returns cosines and sines [N, 2 F]: angles by the row, then by the column.

    `frequencies` [2, F] are those of rows and of columns, or [F] of both.
    """
    angles = (places.astype(jnp.float32)[:, :, None] * frequencies).reshape(len(places), -1)
    return lax.optimization_barrier((jnp.cos(angles), jnp.sin(angles)))  # else XLA makes them anew for each head

"""The tower of Gemma 4: a transformer over patches with a norm on both sides of each block, whose vectors are pooled.

Parameters, beside those of the layers, whose products may have bounds (`linear`): `patches` [values of a patch, D];
`columns` and `rows` [positions, D]; where the tower standardizes, `standard` with `bias` and `scale` [D]; and
`projection` [D, size of the text model].
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxserve.core.layers.activations import ACTIVATIONS, LEARNED
from jaxserve.core.layers.attention import AttentionConfig
from jaxserve.core.layers.context import LayerContext
from jaxserve.core.layers.linear import linear
from jaxserve.core.layers.mlp import MLPConfig
from jaxserve.core.layers.norm import NormConfig, normalize_plainly
from jaxserve.core.models.base import CheckpointLayer, DecoderConfig, Leaves, Parameter, ParamSpec, Stream, Table
from jaxserve.core.models.blocks import sandwich_layer
from jaxserve.core.models.common import read_num_layers
from jaxserve.core.models.hf_config import REQUIRED, HFConfig, check_integer, check_mapping
from jaxserve.core.models.layouts import count_rows, fuse_qkv, order_quarters
from jaxserve.core.models.parameters import (
    attention_params,
    make_source,
    mlp_params,
    norm_params,
    projection_params,
)
from jaxserve.core.models.tower import Tower, TowerConfig
from jaxserve.core.models.tower_parts import (
    COLOURS,
    arrange_squares,
    describe_squares,
    embed_patches,
    make_blocks,
    read_axial_rope,
    rotate_places,
    run_blocks,
)
from jaxserve.core.sharding import Axes
from jaxserve.errors import ConfigError, WeightsError, shorten
from jaxserve.families.gemma2 import NORMS
from jaxserve.media.processors import ImageProcessor
from jaxserve.media.processors.gemma4 import Gemma4Shape
from jaxserve.media.prompt import ImageTokens

KEYS: dict[str, object] = {
    "hidden_size": REQUIRED,
    "hidden_activation": "gelu_pytorch_tanh",
    "intermediate_size": REQUIRED,
    "num_hidden_layers": REQUIRED,
    "num_attention_heads": REQUIRED,
    "num_key_value_heads": REQUIRED,
    "head_dim": REQUIRED,
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "rope_parameters": None,
    "patch_size": REQUIRED,
    "pooling_kernel_size": REQUIRED,
    "position_embedding_size": 10240,
    "use_clipped_linears": False,
    "standardize": False,
}
MODULES = ("model.vision_tower", "model.embed_vision")
_IGNORED = (
    *("dtype", "torch_dtype"),  # the tower has the dtype of the text model
    *("max_position_embeddings", "global_head_dim", "default_output_length", "chunk_size_feed_forward"),  # read nowhere
)
_TOWER, _PROJECTOR = MODULES
_ATTENTION = {part: f"self_attn.{part}_proj.linear" for part in "qkvo"}
_MLP = ("gate_proj.linear", "up_proj.linear", "down_proj.linear")
_THETA = 100.0
_MARK, _START, _END = "<|image|>", "<|image>", "<image|>"
_PLACEHOLDER_ID = 258880  # of published vocabularies


def parse(raw: Mapping[str, Any], text: DecoderConfig, processor: ImageProcessor) -> TowerConfig:
    """Returns the tower that `vision_config` describes; ConfigError names its key."""
    given = check_mapping("vision_config", raw.get("vision_config"))
    config = HFConfig(given, KEYS, _IGNORED, place="vision_config")
    config.require(attention_bias=False)
    shape = processor.shape
    assert isinstance(shape, Gemma4Shape)
    for key in ("patch_size", "pooling_kernel_size"):
        if config.integer(key) != getattr(shape, key):
            message = f"{config.get(key)} must be that of the image processor, {getattr(shape, key)}"
            raise ConfigError(message, field=key, value=config.get(key))
    side, longest = config.integer("position_embedding_size"), shape.pooling_kernel_size * shape.max_soft_tokens
    if side < longest:
        message = f"{side} positions are too few for an image of {longest} patches on one side"
        raise ConfigError(message, field="position_embedding_size", value=side)
    words = check_mapping("text_config", raw.get("text_config"))
    if text.layer_input_size is not None and (pads := words.get("pad_token_id")) not in (0, None):
        message = f"must be 0, got {shorten(pads)}: tokens of images have the layer inputs of padding, those of row 0"
        raise ConfigError(message, field="text_config.pad_token_id", value=pads)
    attention = _read_attention(config)
    mlp = MLPConfig(
        config.integer("intermediate_size"), config.choice("hidden_activation", ACTIVATIONS.keys() - LEARNED.keys())
    )
    norm = NormConfig(config.number("rms_norm_eps"), wide=True)
    return TowerConfig(
        blocks=make_blocks(text, config.integer("hidden_size"), read_num_layers(config), attention, mlp, norm),
        processor=processor,
        out_size=text.hidden_size,
        merge_size=shape.pooling_kernel_size,
        positions=side,
        rope=read_axial_rope(config, attention.head_dim // 2, _THETA),
        clips=config.flag("use_clipped_linears"),
        standardizes=config.flag("standardize"),
        mutual="windowed" if _shows_whole(raw) else None,
    )


def _shows_whole(raw: Mapping[str, Any]) -> bool:
    """Whether tokens of an image see each other, as in all but the smallest models."""
    return check_mapping("text_config", raw.get("text_config")).get("use_bidirectional_attention") is not None


def _read_attention(config: HFConfig) -> AttentionConfig:
    heads, kv_heads, head_dim = (
        config.integer(key) for key in ("num_attention_heads", "num_key_value_heads", "head_dim")
    )
    if heads % kv_heads:
        message = f"{kv_heads} does not divide num_attention_heads {heads}"
        raise ConfigError(message, field="num_key_value_heads", value=kv_heads)
    if head_dim % 4:
        raise ConfigError(f"{head_dim} must be a multiple of 4: halves rotate", field="head_dim", value=head_dim)
    return AttentionConfig(heads, kv_heads, head_dim, 1.0, qk_norm="shared", v_norm=True, causal=False)


def read_tokens(raw: Mapping[str, Any]) -> ImageTokens:
    """Returns the tokens of an image. The chat template writes the placeholder alone."""
    placeholder = check_integer("image_token_id", raw.get("image_token_id", _PLACEHOLDER_ID), minimum=0)
    return ImageTokens(
        mark=_MARK,
        placeholder=_MARK,
        placeholder_id=placeholder,
        before=_START,
        after=_END,
        apart=_shows_whole(raw),
    )


def list_params(config: TowerConfig) -> Table:
    """Returns all parameters by dotted path ("layers.0.qkv.weight")."""
    blocks, size, patch_size = config.blocks, config.blocks.hidden_size, config.processor.shape.patch_size
    embedder = f"{_TOWER}.patch_embedder"
    table = projection_params(blocks, "patches", f"{embedder}.input_proj", (COLOURS * patch_size**2, size))
    for index, name in enumerate(("columns", "rows")):
        spec = ParamSpec((config.positions, size), blocks.dtype, (None, None), "normal")
        source = make_source(
            (f"{embedder}.position_embedding_table",), ((2, *spec.shape),), lambda tensor, index=index: tensor[index]
        )
        table[f"{name}.weight"] = Parameter(spec, replace(source, part=True))
    for index in range(blocks.num_layers):
        layer = CheckpointLayer(blocks, index, f"{_TOWER}.encoder.layers.{index}")
        params = norm_params(layer, NORMS) | mlp_params(layer, names=_MLP)
        params |= attention_params(layer, modules=_ATTENTION, order=order_quarters(layer.kind.attention.head_dim))
        params |= _list_ranges(layer) if config.clips else {}
        table |= {f"layers.{index}.{name}": parameter for name, parameter in params.items()}
    if config.standardizes:
        spec = ParamSpec((size,), blocks.dtype, (None,), "ones")
        for name in ("bias", "scale"):
            source = make_source((f"{_TOWER}.std_{name}",), ((size,),), lambda tensor: tensor)
            table[f"standard.{name}"] = Parameter(spec, source)
    return table | projection_params(
        blocks, "projection", f"{_PROJECTOR}.embedding_projection", (size, config.out_size)
    )


def _list_ranges(layer: CheckpointLayer) -> Table:
    """Returns `in_range` and `out_range` of the products of a layer, whose bounds are single numbers in files."""
    attention = layer.kind.attention
    rows = count_rows(attention)

    def spread(*bounds: np.ndarray) -> np.ndarray:
        """Returns the bounds of q, k and v for each column of `qkv`."""
        columns = (np.repeat(bound, count) for bound, count in zip(bounds, rows.values(), strict=True))
        return np.asarray(fuse_qkv(attention, None, *columns))

    products: dict[str, tuple[tuple[str, ...], tuple[int, ...], Axes, Callable[..., np.ndarray]]] = {
        "qkv": (tuple(_ATTENTION[part] for part in rows), (attention.columns,), ("kv_heads",), spread),
        "o": ((_ATTENTION["o"],), (), (), _stack),
        "gate_up": (tuple(f"mlp.{name}" for name in _MLP[:2]), (2, 1, 1), (None,) * 3, _stack),
        "down": ((f"mlp.{_MLP[2]}",), (), (), _stack),
    }
    table: Table = {}
    for leaf, (modules, shape, axes, build) in products.items():
        names = [layer.tensor(module.removesuffix(".linear")) for module in modules]
        for side, form, form_axes, make in (
            ("in", (), (), partial(_take_equal, names)),
            ("out", shape, axes, build),
        ):
            spec = ParamSpec((2, *form), layer.config.dtype, (None, *form_axes), "bounds")
            tensors = tuple(f"{name}.{side}put_{bound}" for bound in ("min", "max") for name in names)
            source = make_source(tensors, ((),) * len(tensors), partial(_pair, make, spec.shape))
            table[f"{leaf}.{side}_range"] = Parameter(spec, source)
    return table


def _pair(make: Callable[..., np.ndarray], shape: tuple[int, ...], *bounds: np.ndarray) -> np.ndarray:
    """Returns what `make` makes of the lower bounds, which are the first half, and of the upper ones."""
    half = len(bounds) // 2
    return np.stack([make(*bounds[:half]), make(*bounds[half:])]).reshape(shape)


def _stack(*bounds: np.ndarray) -> np.ndarray:
    return np.stack(bounds)


def _take_equal(names: list[str], *bounds: np.ndarray) -> np.ndarray:
    """Returns the bound of the input that products share, which are one here; WeightsError if they have others."""
    if any(bound != bounds[0] for bound in bounds):
        message = f"bounds of what goes in must be equal, not {', '.join(map(str, bounds))}: they are one product"
        raise WeightsError(message, field=", ".join(names))
    return bounds[0]


def run(
    config: TowerConfig, params: Mapping[str, Any], arrays: Mapping[str, Array], ctx: LayerContext
) -> Float[Array, "M 1 D"]:
    """Returns the vectors of all squares of patches."""
    assert config.rope is not None
    middle = (0.5,) * COLOURS  # from -1 to 1. The colours of a pixel lie beside each other, which only this allows
    form = replace(config.processor.form, mean=middle, std=middle)
    x = embed_patches(config, params["patches"], arrays["patches"], ctx, form=form)
    across = arrays["places"][:, ::-1]  # the column, then the row
    columns, rows = (
        params[name]["weight"].at[across[:, axis]].get(mode="clip") for axis, name in enumerate(("columns", "rows"))
    )
    rotary = rotate_places(across, config.rope.inverse_frequencies(1))
    x += columns + rows
    (x,) = run_blocks(config, params["layers"], x, replace(ctx, rotary=rotary), layer=sandwich_layer)
    pooled = _pool(config, params.get("standard"), x)
    return linear(ctx, params["projection"], normalize_plainly(config.blocks.norm, pooled))[:, None]


def _pool(config: TowerConfig, standard: Leaves | None, x: Stream) -> Float[Array, "M D"]:
    """Returns the mean of each square times the root of D, standardized; float32 in between, as it can be large."""
    squares = x.reshape(-1, config.merge_size**2, x.shape[-1]).astype(jnp.float32)
    pooled = jnp.mean(squares, axis=1).astype(x.dtype).astype(jnp.float32) * math.sqrt(x.shape[-1])
    if standard is not None:
        pooled = (pooled - standard["bias"].astype(jnp.float32)) * standard["scale"].astype(jnp.float32)
    return pooled.astype(x.dtype)


TOWER = Tower(
    processor="gemma4",
    modules=MODULES,
    parse=parse,
    tokens=read_tokens,
    table=list_params,
    arrange=arrange_squares,
    inputs=describe_squares,
    run=run,
)

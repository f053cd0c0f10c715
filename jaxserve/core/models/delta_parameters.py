"""Config and parameters of Gated DeltaNet (core/layers/gated_delta.py), which several families share.

Checkpoints have the projections in three forms (`DeltaModules`): one matrix whose rows stand by key head, or two with
all heads of q, then of k, then of v, and those of z, or one for each of them. Channels of the convolution are all heads
of q, then of k, then of v. Here everything stands by key head, so tensor parallelism cuts between these.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import numpy as np

from jaxserve.core.layers.activations import ACTIVATIONS
from jaxserve.core.layers.gated_delta import GatedDeltaConfig
from jaxserve.core.models.base import CheckpointLayer, Parameter, ParamSpec, Table
from jaxserve.core.models.hf_config import HFConfig
from jaxserve.core.models.layouts import JoinedRows, RowBlock, Rows, transpose
from jaxserve.core.models.parameters import linear_params, make_source
from jaxserve.core.sharding import Axes
from jaxserve.errors import ConfigError

DELTA_KEYS: dict[str, object] = {
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "mamba_ssm_dtype": "float32",
}


def read_delta(config: HFConfig) -> GatedDeltaConfig:
    """Returns the block that the keys of `DELTA_KEYS` describe."""
    config.require(mamba_ssm_dtype="float32")
    keys, values = config.integer("linear_num_key_heads"), config.integer("linear_num_value_heads")
    if values % keys:
        message = f"must be a multiple of linear_num_key_heads, {keys}"
        raise ConfigError(message, field="linear_num_value_heads", value=values)
    return GatedDeltaConfig(
        num_key_heads=keys,
        num_value_heads=values,
        key_dim=config.integer("linear_key_head_dim"),
        value_dim=config.integer("linear_value_head_dim"),
        conv_size=config.integer("linear_conv_kernel_dim", minimum=2, maximum=64),
        activation=config.choice("hidden_act", ACTIVATIONS),
    )


class DeltaModules(NamedTuple):
    """The modules of one form; several for one parameter stand in the order of its parts."""

    qkvz: tuple[str, ...]
    ba: tuple[str, ...]
    conv: tuple[str, ...] = ("conv1d",)
    out: str = "out_proj"
    norm: str = "norm"


BY_KEY_HEAD = DeltaModules(("in_proj_qkvz",), ("in_proj_ba",))
JOINED = DeltaModules(("in_proj_qkv", "in_proj_z"), ("in_proj_b", "in_proj_a"))
APART = DeltaModules(
    ("q_proj", "k_proj", "v_proj", "g_proj"),
    ("b_proj", "a_proj"),
    ("q_conv1d", "k_conv1d", "v_conv1d"),
    "o_proj",
    "o_norm",
)


def delta_params(layer: CheckpointLayer, modules: DeltaModules) -> Table:
    """Returns the parameters of the block, whose tensors are in `linear_attn`."""
    config, delta = layer.config, layer.kind.mixer
    assert isinstance(delta, GatedDeltaConfig)
    keys, values = delta.num_key_heads * delta.key_dim, delta.num_value_heads * delta.value_dim
    prefix, hidden, heads = layer.tensor("linear_attn"), config.hidden_size, delta.num_value_heads
    project = partial(linear_params, config, axes=(None, "kv_heads"), bias=False)
    rows = {1: (2 * keys + 2 * values,), 2: (2 * keys + values, values), 4: (keys, keys, values, values)}
    table: Table = {}
    for leaf, parts, sizes, join in (
        ("qkvz", modules.qkvz, rows[len(modules.qkvz)], _join_by_head),
        ("ba", modules.ba, (2 * heads // len(modules.ba),) * len(modules.ba), _join_gates),
    ):
        names = {f"{prefix}.{part}": size for part, size in zip(parts, sizes, strict=True)}
        build = transpose if len(parts) == 1 else partial(join, delta)
        table |= project(leaf, names, (hidden, sum(sizes)), build=build)
    out = {f"{prefix}.{modules.out}": hidden}
    table |= linear_params(config, "o", out, (values, hidden), ("heads", None), transpose, bias=False)

    def plain(tensor: str, size: int, dtype: str, axes: Axes, init: str) -> Parameter:
        source = make_source((f"{prefix}.{tensor}",), ((size,),), lambda each: each)
        return Parameter(ParamSpec((size,), dtype, axes, init), source)

    channels = [2 * keys + values] if len(modules.conv) == 1 else [keys, keys, values]
    source = make_source(
        tuple(f"{prefix}.{part}.weight" for part in modules.conv),
        tuple((size, 1, delta.conv_size) for size in channels),
        partial(_order_channels, delta),
    )
    spec = ParamSpec((delta.conv_size, sum(channels)), config.dtype, (None, "kv_heads"), "normal")
    return table | {
        "conv": Parameter(spec, source),
        "decay": plain("A_log", heads, "float32", ("heads",), "zeros"),
        "decay_bias": plain("dt_bias", heads, "float32", ("heads",), "ones"),
        "out_norm": plain(f"{modules.norm}.weight", delta.value_dim, config.dtype, (None,), "ones"),
    }


def _list_channels(delta: GatedDeltaConfig) -> list[tuple[slice, slice, slice]]:
    """Returns, for each key head, its rows of q, of k and of v among all channels of the convolution."""
    size, group = delta.key_dim, delta.sizes.group * delta.value_dim
    keys, found = delta.num_key_heads * size, []
    for head in range(delta.num_key_heads):
        q, v = slice(head * size, (head + 1) * size), 2 * keys + head * group
        found.append((q, slice(keys + q.start, keys + q.stop), slice(v, v + group)))
    return found


def _join_by_head(delta: GatedDeltaConfig, *parts: Rows) -> JoinedRows:
    """Returns `qkvz` of the two or four matrices of the other forms."""
    *qkv, z = parts
    blocks, group, keys = [], delta.sizes.group * delta.value_dim, delta.num_key_heads * delta.key_dim
    for head, places in enumerate(_list_channels(delta)):
        if len(qkv) == 1:
            blocks += [RowBlock(qkv[0][place]) for place in places]
        else:
            starts = (0, keys, 2 * keys)
            blocks += [
                RowBlock(part[place.start - start : place.stop - start])
                for part, place, start in zip(qkv, places, starts, strict=True)
            ]
        blocks.append(RowBlock(z[head * group : (head + 1) * group]))
    return JoinedRows(blocks)


def _join_gates(delta: GatedDeltaConfig, b: Rows, a: Rows) -> JoinedRows:
    """Returns `ba` of the two matrices of the other forms."""
    group = delta.sizes.group
    places = (slice(head * group, (head + 1) * group) for head in range(delta.num_key_heads))
    return JoinedRows([RowBlock(part[place]) for place in places for part in (b, a)])


def _order_channels(delta: GatedDeltaConfig, *tensors: np.ndarray) -> np.ndarray:
    """Returns the convolution [W, C] of [C, 1, W], or of three such, of q, k and v."""
    rows = np.concatenate([tensor[:, 0] for tensor in tensors])
    return np.concatenate([rows[part] for parts in _list_channels(delta) for part in parts]).T

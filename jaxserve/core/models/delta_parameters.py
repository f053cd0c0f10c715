"""Config and parameters of Gated DeltaNet (core/layers/gated_delta.py), which several families share.

Checkpoints have the projections in two forms: `in_proj_qkvz` and `in_proj_ba`, whose rows stand by key head, or
`in_proj_qkv`, `in_proj_z`, `in_proj_b` and `in_proj_a`, each with all heads. In both, channels of the convolution are
all heads of q, then of k, then of v. Here everything stands by key head, so tensor parallelism cuts between these.
"""

from __future__ import annotations

from functools import partial

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

_MODULE = "linear_attn"


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


def delta_params(layer: CheckpointLayer, *, by_key_head: bool) -> Table:
    """Returns the parameters of the block; `by_key_head`: the projections have the first form."""
    config, delta = layer.config, layer.kind.mixer
    assert isinstance(delta, GatedDeltaConfig)
    keys, values = delta.num_key_heads * delta.key_dim, delta.num_value_heads * delta.value_dim
    module = layer.tensor(_MODULE)
    wide, narrow = (
        (config.hidden_size, delta.num_key_heads * delta.head_columns),
        (
            config.hidden_size,
            2 * delta.num_value_heads,
        ),
    )
    project = partial(linear_params, config, axes=(None, "kv_heads"), bias=False)
    if by_key_head:
        table = project("qkvz", {f"{module}.in_proj_qkvz": wide[1]}, wide, build=transpose)
        table |= project("ba", {f"{module}.in_proj_ba": narrow[1]}, narrow, build=transpose)
    else:
        parts = {f"{module}.in_proj_qkv": 2 * keys + values, f"{module}.in_proj_z": values}
        table = project("qkvz", parts, wide, build=partial(_join_by_head, delta))
        parts = {f"{module}.in_proj_{part}": delta.num_value_heads for part in "ba"}
        table |= project("ba", parts, narrow, build=partial(_join_gates, delta))
    shape = (values, config.hidden_size)
    table |= linear_params(config, "o", {f"{module}.out_proj": shape[1]}, shape, ("heads", None), transpose, bias=False)

    def plain(tensor: str, shape: tuple[int, ...], dtype: str, axes: Axes, init: str) -> Parameter:
        source = make_source((f"{module}.{tensor}",), (shape,), lambda each: each)
        return Parameter(ParamSpec(shape, dtype, axes, init), source)

    channels = 2 * keys + values
    source = make_source(
        (f"{module}.conv1d.weight",), ((channels, 1, delta.conv_size),), partial(_order_channels, delta)
    )
    return table | {
        "conv": Parameter(ParamSpec((delta.conv_size, channels), config.dtype, (None, "kv_heads"), "normal"), source),
        "decay": plain("A_log", (delta.num_value_heads,), "float32", ("heads",), "zeros"),
        "decay_bias": plain("dt_bias", (delta.num_value_heads,), "float32", ("heads",), "ones"),
        "out_norm": plain("norm.weight", (delta.value_dim,), config.dtype, (None,), "ones"),
    }


def _list_channels(delta: GatedDeltaConfig) -> list[tuple[slice, slice, slice]]:
    """Returns, for each key head, its rows of q, of k and of v among all channels of the convolution."""
    size, group = delta.key_dim, delta.sizes.group * delta.value_dim
    keys, found = delta.num_key_heads * size, []
    for head in range(delta.num_key_heads):
        q, v = slice(head * size, (head + 1) * size), 2 * keys + head * group
        found.append((q, slice(keys + q.start, keys + q.stop), slice(v, v + group)))
    return found


def _join_by_head(delta: GatedDeltaConfig, qkv: Rows, z: Rows) -> JoinedRows:
    """Returns `qkvz` of the second form."""
    blocks, group = [], delta.sizes.group * delta.value_dim
    for head, parts in enumerate(_list_channels(delta)):
        blocks += [RowBlock(qkv[part]) for part in parts]
        blocks.append(RowBlock(z[head * group : (head + 1) * group]))
    return JoinedRows(blocks)


def _join_gates(delta: GatedDeltaConfig, b: Rows, a: Rows) -> JoinedRows:
    """Returns `ba` of the second form."""
    group = delta.sizes.group
    places = (slice(head * group, (head + 1) * group) for head in range(delta.num_key_heads))
    return JoinedRows([RowBlock(part[place]) for place in places for part in (b, a)])


def _order_channels(delta: GatedDeltaConfig, tensor: np.ndarray) -> np.ndarray:
    """Returns the convolution [W, C] of [C, 1, W]."""
    rows = tensor[:, 0]
    return np.concatenate([rows[part] for parts in _list_channels(delta) for part in parts]).T

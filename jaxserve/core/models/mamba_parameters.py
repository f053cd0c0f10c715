"""Parameters of Mamba-2 (core/layers/mamba2.py), which several families share.

A checkpoint's `in_proj` has all gates, then all x, b, c, and the dt of all heads; channels of the convolution are x, b
and c. Here everything stands by group, so tensor parallelism cuts between groups.
"""

from __future__ import annotations

import math
from functools import partial

import numpy as np

from jaxserve.core.layers.mamba2 import Mamba2Config
from jaxserve.core.models.base import CheckpointLayer, HostArray, Parameter, ParamSpec, Table
from jaxserve.core.models.hf_config import HFConfig
from jaxserve.core.models.layouts import JoinedRows, RowBlock, Rows, transpose
from jaxserve.core.models.parameters import linear_params, make_source
from jaxserve.errors import ConfigError, shorten


def require_free_steps(config: HFConfig) -> None:
    """Raises ConfigError if `time_step_limit` bounds the steps dt, which published models do not."""
    limit = config.get("time_step_limit")
    low, high = limit if isinstance(limit, list) and len(limit) == 2 else (limit, None)
    is_free = low == 0 and high in (math.inf, "Infinity", {"__float__": "Infinity"})
    if limit is not None and not is_free:
        message = f"only 0 to infinity is supported, not {shorten(limit)}"
        raise ConfigError(message, field="time_step_limit", value=limit)


def check_groups(heads_key: str, mamba: Mamba2Config) -> Mamba2Config:
    """Returns the config; ConfigError, naming the key, if its heads do not divide by its groups."""
    if mamba.num_heads % mamba.num_groups:
        message = f"must be a multiple of the {mamba.num_groups} groups"
        raise ConfigError(message, field=heads_key, value=mamba.num_heads)
    return mamba


def mamba_params(layer: CheckpointLayer, module: str) -> Table:
    """Returns the parameters of the block, whose tensors are below `module`."""
    config, mamba = layer.config, layer.kind.mixer
    assert isinstance(mamba, Mamba2Config)
    module = layer.tensor(module)
    width, heads, axes = mamba.num_heads * mamba.head_dim, mamba.num_heads, mamba.axes
    stored = width + 2 * (mamba.num_groups // mamba.group_repeats) * mamba.state_size
    shape = (config.hidden_size, mamba.num_groups * mamba.group_columns)
    modules = {f"{module}.in_proj": width + stored + heads}
    build = partial(_join_groups, _list_columns(mamba))
    table = linear_params(config, "zxbcdt", modules, shape, (None, "groups"), build, bias=mamba.bias)
    shape = (width, config.hidden_size)
    modules = {f"{module}.out_proj": config.hidden_size}
    table |= linear_params(config, "o", modules, shape, ("heads", None), transpose, bias=mamba.bias)
    blocks, count = _list_channels(mamba, 0), mamba.num_groups * mamba.group_channels

    def order(tensor: np.ndarray) -> np.ndarray:
        return np.concatenate([tensor[part] for part in blocks])

    source = make_source(
        (f"{module}.conv1d.weight",), ((stored, 1, mamba.conv_size),), lambda tensor: order(tensor[:, 0]).T
    )
    spec = ParamSpec((mamba.conv_size, count), config.dtype, axes["conv"], "normal")
    table["conv"] = Parameter(spec, source)
    if mamba.conv_bias:
        source = make_source((f"{module}.conv1d.bias",), ((stored,),), order)
        table["conv_bias"] = Parameter(ParamSpec((count,), config.dtype, axes["conv_bias"], "zeros"), source)
    for name, tensor, size, dtype, init in (
        ("decay", "A_log", heads, "float32", "zeros"),
        ("decay_bias", "dt_bias", heads, "float32", "ones"),
        ("skip", "D", heads, "float32", "ones"),
        ("out_norm", "norm.weight", width, config.dtype, "ones"),
    ):
        source = make_source((f"{module}.{tensor}",), ((size,),), lambda each: each)
        table[name] = Parameter(ParamSpec((size,), dtype, axes[name], init), source)
    return table


def _list_channels(mamba: Mamba2Config, first: int) -> list[slice]:
    """Returns, for each group, its rows of x, of b and of c among rows that begin at `first`."""
    width, size = mamba.sizes.heads * mamba.head_dim, mamba.state_size
    b = first + mamba.num_groups * width
    c, found = b + mamba.num_groups // mamba.group_repeats * size, []
    for group in range(mamba.num_groups):
        x, shared = first + group * width, group // mamba.group_repeats * size
        found += [slice(x, x + width), slice(b + shared, b + shared + size), slice(c + shared, c + shared + size)]
    return found


def _list_columns(mamba: Mamba2Config) -> list[slice]:
    """Returns, for each group, its rows of `in_proj`: z, x, b, c and dt."""
    width, heads = mamba.sizes.heads * mamba.head_dim, mamba.sizes.heads
    channels = _list_channels(mamba, mamba.num_groups * width)
    first, found = channels[-1].stop, []
    for group in range(mamba.num_groups):
        steps = first + group * heads
        gates = slice(group * width, (group + 1) * width)
        found += [gates, *channels[3 * group : 3 * group + 3], slice(steps, steps + heads)]
    return found


def _join_groups(blocks: list[slice], tensor: Rows) -> HostArray:
    return JoinedRows([RowBlock(tensor[part]) for part in blocks])

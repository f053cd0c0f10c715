"""The parameters of a decoder: one table that says what each is and which tensors of a checkpoint make it.

Canonical names per layer: `attn_norm.weight` [D]; `qkv.weight` [D, K * (G + 2) * H] (per KV head its G query heads,
then K, then V, so that tensor parallelism cuts it between KV heads and keeps K and V together); `o.weight` [N * H, D];
`mlp_norm.weight` [D]; `gate_up.weight` [2, D, F] or, in a plain feed-forward block, `up.weight` [D, F]; `down.weight`
[F, D]; where the model has them `q_norm.weight` and `k_norm.weight`, `attn_out_norm.weight` and `mlp_out_norm.weight`
[D], a `bias` beside each weight and, always float32, the scales `k_scale` and `v_scale` [K] of 8-bit pages and the P
parameters `act` [P] of an activation that has its own.

Some checkpoints rotate neighbouring dimensions of a head, (0, 1), (2, 3), and so on. Their q and k are stored in the
order in which halves rotate, which changes no product of the two.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np

from jaxserve.errors import WeightsError
from jaxserve.layers.norm import NormConfig
from jaxserve.models.base import CheckpointLayer, DecoderConfig, Parameter, ParamSpec, Table, Trunk, WeightSource
from jaxserve.sharding import Axes

_TILE = 16  # rows per step of a transposed copy: 32 bytes of bfloat16, three times as fast as one whole copy

Split = Callable[[DecoderConfig, np.ndarray], tuple[np.ndarray, np.ndarray, np.ndarray]]


def trunk_params(config: DecoderConfig, trunk: Trunk) -> Table:
    """Everything around the layers: `embed`, `final_norm` and, unless it is tied, `lm_head`."""
    shape = (config.vocab_size, config.hidden_size)
    spec = ParamSpec(shape, config.dtype, ("vocab" if config.embedding.shard_vocab else None, None), "normal")
    table = {"embed.weight": Parameter(spec, plain_source(f"{trunk.embed}.weight", shape))}
    if not config.embedding.tied:
        table["lm_head.weight"] = Parameter(spec, plain_source(f"{trunk.head}.weight", shape))
    return table | norm_params(config, config.norm, {"final_norm": trunk.final_norm})


def plain_source(name: str, shape: tuple[int, ...]) -> WeightSource:
    """A tensor that is stored as it is used."""
    return _source((name,), (shape,), lambda tensor: tensor)


def norm_params(config: DecoderConfig, norm: NormConfig, names: Mapping[str, str]) -> Table:
    """Norms over D: canonical name -> what the checkpoint calls the module."""
    shape = (config.hidden_size,)
    return {
        f"{leaf}.{part}": Parameter(spec, plain_source(f"{name}.{part}", shape))
        for leaf, name in names.items()
        for part, spec in _norm_specs(config, norm, shape, (None,)).items()
    }


def pre_norm_params(layer: CheckpointLayer) -> Table:
    """The two norms of a layer that has one before each block, by the names that most families give them."""
    names = {"attn_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
    return layer_norm_params(layer, names)


def layer_norm_params(layer: CheckpointLayer, names: Mapping[str, str]) -> Table:
    """Norms over D of one layer: canonical name -> the module's name below the layer's."""
    return norm_params(layer.config, layer.config.norm, {leaf: layer.tensor(name) for leaf, name in names.items()})


def attention_params(
    layer: CheckpointLayer, block: str = "self_attn", *, out: str = "o_proj", interleaved: bool = False
) -> Table:
    """`qkv` and `o` from separate q_proj, k_proj and v_proj; and the q and k norms, where there are any.

    `interleaved`: neighbouring dimensions of a head rotate.
    """
    config, order = layer.config, _head_order(layer, interleaved)
    q_rows, kv_rows = _projection_rows(config)
    rows = {"q": q_rows, "k": kv_rows, "v": kv_rows}
    projections = [(layer.tensor(f"{block}.{part}_proj"), count) for part, count in rows.items()]
    table = _qkv_params(config, projections, partial(_fuse_qkv, config, order))
    table |= _output_params(config, layer.tensor(f"{block}.{out}"))
    if config.attention.qk_norm is not None:
        table |= _qk_norm_params(layer, block, order)
    return table


def fused_attention_params(layer: CheckpointLayer, block: str, *, qkv: str, split: Split, out: str) -> Table:
    """`qkv` and `o` where one tensor holds all three projections; `split` takes them apart (rows, then D if any)."""
    q_rows, kv_rows = _projection_rows(layer.config)

    def build(tensor: np.ndarray) -> np.ndarray:
        return _fuse_qkv(layer.config, None, *split(layer.config, tensor))

    table = _qkv_params(layer.config, [(layer.tensor(f"{block}.{qkv}"), q_rows + 2 * kv_rows)], build)
    return table | _output_params(layer.config, layer.tensor(f"{block}.{out}"))


def split_stacked(config: DecoderConfig, tensor: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """All q heads, then all k, then all v."""
    q_rows, kv_rows = _projection_rows(config)
    q, k, v = np.split(tensor, [q_rows, q_rows + kv_rows])
    return q, k, v


def split_by_head(config: DecoderConfig, tensor: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Each head's q, k and v together; as many KV heads as query heads."""
    heads = tensor.reshape(-1, 3, config.attention.head_dim, *tensor.shape[1:])
    q, k, v = (heads[:, part].reshape(-1, *tensor.shape[1:]) for part in range(3))
    return q, k, v


def kv_scale_params(layer: CheckpointLayer) -> Table:
    """`k_scale` and `v_scale` of the layer, if the checkpoint has them."""
    attention = layer.config.attention
    if attention.kv_scales is None:
        return {}

    def spread(tensor: np.ndarray) -> np.ndarray:
        heads = attention.num_kv_heads // attention.kv_repeats
        return np.repeat(np.broadcast_to(tensor, (heads,)), attention.kv_repeats)

    spec = ParamSpec((attention.num_kv_heads,), "float32", ("kv_heads",), "ones")
    names = {part: layer.tensor(attention.kv_scales.name.format(part=part)) for part in ("k", "v")}
    shapes = (attention.kv_scales.shape,)
    return {f"{part}_scale": Parameter(spec, _source((name,), shapes, spread)) for part, name in names.items()}


def mlp_params(layer: CheckpointLayer, block: str = "mlp") -> Table:
    """`gate_up` and `down` from separate gate_proj, up_proj and down_proj."""
    names = [layer.tensor(f"{block}.{part}_proj") for part in ("gate", "up")]
    table = _gate_up_params(layer.config, names, _fuse_gate_up)
    return table | _down_params(layer, f"{block}.down_proj", act=f"{block}.act_fn")


def fused_mlp_params(layer: CheckpointLayer, block: str = "mlp") -> Table:
    """`gate_up` and `down` from one gate_up_proj, whose rows are the gate's, then the up projection's."""
    name = layer.tensor(f"{block}.gate_up_proj")
    table = _gate_up_params(layer.config, [name], lambda tensor: _fuse_gate_up(*np.split(tensor, 2)))
    return table | _down_params(layer, f"{block}.down_proj", act=f"{block}.activation_fn")


def plain_mlp_params(layer: CheckpointLayer, *, up: str, down: str) -> Table:
    """`up` and `down` of a feed-forward block without a gate."""
    hidden, ffn = layer.config.hidden_size, layer.config.mlp.intermediate_size
    table = _linear_params(
        layer.config, "up", layer.tensor(up), (hidden, ffn), (None, "ffn"), bias=layer.config.mlp.bias
    )
    return table | _down_params(layer, down, act="mlp.act")


def _linear_params(
    config: DecoderConfig, leaf: str, name: str, shape: tuple[int, int], axes: Axes, *, bias: bool
) -> Table:
    """One projection [in, out] from one tensor [out, in]."""
    table = {
        f"{leaf}.weight": Parameter(
            ParamSpec(shape, config.dtype, axes, "normal"),
            _source((f"{name}.weight",), (shape[::-1],), _transpose),
        )
    }
    if bias:
        spec = ParamSpec(shape[1:], config.dtype, axes[1:], "zeros")
        table[f"{leaf}.bias"] = Parameter(spec, plain_source(f"{name}.bias", shape[1:]))
    return table


def _qkv_params(
    config: DecoderConfig, projections: Sequence[tuple[str, int]], build: Callable[..., np.ndarray]
) -> Table:
    """`projections`: the tensors that hold q, k and v, and how many rows each has."""
    attention, hidden = config.attention, config.hidden_size
    names, rows = zip(*projections, strict=True)
    columns = attention.num_kv_heads * (attention.group_size + 2) * attention.head_dim
    parts = {"weight": ((hidden, columns), (None, "kv_heads"), "normal", (hidden,))}
    if attention.qkv_bias:
        parts["bias"] = ((columns,), ("kv_heads",), "zeros", ())
    return {
        f"qkv.{part}": Parameter(
            ParamSpec(shape, config.dtype, axes, init),
            _source(tuple(f"{name}.{part}" for name in names), tuple((count, *inner) for count in rows), build),
        )
        for part, (shape, axes, init, inner) in parts.items()
    }


def _output_params(config: DecoderConfig, name: str) -> Table:
    shape = (config.attention.num_heads * config.attention.head_dim, config.hidden_size)
    return _linear_params(config, "o", name, shape, ("heads", None), bias=config.attention.out_bias)


def _qk_norm_params(layer: CheckpointLayer, block: str, order: np.ndarray | None) -> Table:
    config, attention = layer.config, layer.config.attention
    head_dim, table = attention.head_dim, {}
    for part, stored, axis in (("q", attention.num_heads, "heads"), ("k", attention.num_kv_heads, "kv_heads")):
        repeats = attention.kv_repeats if part == "k" else 1
        shape, axes, tensor_shape = {
            "shared": ((head_dim,), (None,), (head_dim,)),
            "per_head": ((stored, head_dim), (axis, None), (stored // repeats, head_dim)),
            "projection": ((stored * head_dim,), (axis,), (stored * head_dim // repeats,)),
        }[attention.qk_norm]
        times = math.prod(shape) // math.prod(tensor_shape)
        build = partial(_build_head_norm, head_dim, order, times, shape)
        for name, spec in _norm_specs(config, config.norm, shape, axes).items():
            source = _source((layer.tensor(f"{block}.{part}_norm.{name}"),), (tensor_shape,), build)
            table[f"{part}_norm.{name}"] = Parameter(spec, source)
    return table


def _gate_up_params(config: DecoderConfig, names: Sequence[str], build: Callable[..., np.ndarray]) -> Table:
    """`names`: two tensors of F rows, or one with the rows of both."""
    hidden, ffn = config.hidden_size, config.mlp.intermediate_size
    rows = 2 * ffn // len(names)
    parts = {"weight": ((2, hidden, ffn), (None, None, "ffn"), "normal", (hidden,))}
    if config.mlp.bias:
        parts["bias"] = ((2, ffn), (None, "ffn"), "zeros", ())
    return {
        f"gate_up.{part}": Parameter(
            ParamSpec(shape, config.dtype, axes, init),
            _source(tuple(f"{name}.{part}" for name in names), ((rows, *inner),) * len(names), build),
        )
        for part, (shape, axes, init, inner) in parts.items()
    }


def _down_params(layer: CheckpointLayer, name: str, *, act: str) -> Table:
    """`down`, and `act` from the scalars under the module `act`, if the activation has any."""
    config = layer.config
    shape = (config.mlp.intermediate_size, config.hidden_size)
    table = _linear_params(config, "down", layer.tensor(name), shape, ("ffn", None), bias=config.mlp.bias)
    learned = config.mlp.learned
    if learned:
        names = tuple(layer.tensor(f"{act}.{scalar}") for scalar in learned)
        source = _source(names, tuple(learned.values()), lambda *scalars: np.stack([s.reshape(()) for s in scalars]))
        table["act"] = Parameter(ParamSpec((len(learned),), "float32", (None,), "zeros"), source)
    return table


def _norm_specs(config: DecoderConfig, norm: NormConfig, shape: tuple[int, ...], axes: Axes) -> dict[str, ParamSpec]:
    specs = {"weight": ParamSpec(shape, config.dtype, axes, "zeros" if norm.unit_offset else "ones")}
    return specs | ({"bias": ParamSpec(shape, config.dtype, axes, "zeros")} if norm.bias else {})


def _projection_rows(config: DecoderConfig) -> tuple[int, int]:
    """Rows of the checkpoint's q projection, and of its k and v projections."""
    attention = config.attention
    kv_heads = attention.num_kv_heads // attention.kv_repeats
    return attention.num_heads * attention.head_dim, kv_heads * attention.head_dim


def _source(
    names: tuple[str, ...], shapes: tuple[tuple[int, ...], ...], build: Callable[..., np.ndarray]
) -> WeightSource:
    return WeightSource(names, shapes, partial(_build_checked, names, shapes, build))


def _build_checked(
    names: tuple[str, ...],
    shapes: tuple[tuple[int, ...], ...],
    build: Callable[..., np.ndarray],
    *tensors: np.ndarray,
) -> np.ndarray:
    for name, shape, tensor in zip(names, shapes, tensors, strict=True):
        if tensor.shape != shape:
            raise WeightsError(f"has shape {tensor.shape}, the model's config needs {shape}", field=name)
    return build(*tensors)


def _head_order(layer: CheckpointLayer, interleaved: bool) -> np.ndarray | None:
    """Which dimension of the checkpoint's head stands at each place of ours; None for the same."""
    rope, head_dim = layer.kind.rope, layer.config.attention.head_dim
    if not interleaved or rope is None:
        return None
    turned = np.arange(rope.rotary_dim)
    return np.concatenate([turned[0::2], turned[1::2], np.arange(rope.rotary_dim, head_dim)])


def _fuse_qkv(
    config: DecoderConfig, order: np.ndarray | None, q: np.ndarray, k: np.ndarray, v: np.ndarray
) -> np.ndarray:
    """[N*H, D], [K*H, D], [K*H, D] -> [D, K * (G + 2) * H]; biases without D."""
    attention = config.attention
    group, head_dim = attention.group_size, attention.head_dim
    q, k = (_reorder(part, head_dim, order) for part in (q, k))
    parts = []
    for head in range(attention.num_kv_heads):
        source = head // attention.kv_repeats
        parts.append(q[head * group * head_dim : (head + 1) * group * head_dim])
        parts += [tensor[source * head_dim : (source + 1) * head_dim] for tensor in (k, v)]
    return _join_rows(parts)


def _build_head_norm(
    head_dim: int, order: np.ndarray | None, times: int, shape: tuple[int, ...], tensor: np.ndarray
) -> np.ndarray:
    """The weights of q's or k's norm, each head's `times` times."""
    return np.repeat(_reorder(tensor.reshape(-1), head_dim, order).reshape(-1, head_dim), times, axis=0).reshape(shape)


def _reorder(rows: np.ndarray, head_dim: int, order: np.ndarray | None) -> np.ndarray:
    """Returns the rows of heads [n * H, ...] with each head's in another order."""
    if order is None:
        return rows
    return rows.reshape(-1, head_dim, *rows.shape[1:])[:, order].reshape(rows.shape)


def _fuse_gate_up(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    """Two [F, D] -> [2, D, F]; two biases [F] -> [2, F]."""
    if gate.ndim == 1:
        return np.stack([gate, up])
    out = np.empty((2, *gate.T.shape), gate.dtype)
    for part, place in zip((gate, up), out, strict=True):
        _join_rows([part], place)
    return out


def _transpose(matrix: np.ndarray) -> np.ndarray:
    return _join_rows([matrix])


def _join_rows(parts: Sequence[np.ndarray], out: np.ndarray | None = None) -> np.ndarray:
    """Returns the transpose of the parts laid one below the other, in `out` if given; parts of one axis are joined.

    Copies in tiles of plain integers: numpy moves bfloat16 one call per element, and whole transposes miss the cache.
    """
    dtype = parts[0].dtype
    words = [np.ascontiguousarray(part).view(f"u{dtype.itemsize}") for part in parts]
    if parts[0].ndim == 1:
        return np.concatenate(words).view(dtype)
    if out is None:
        out = np.empty((parts[0].shape[1], sum(len(part) for part in parts)), dtype)
    written, column = out.view(words[0].dtype), 0
    for part in words:
        for start in range(0, len(part), _TILE):
            tile = part[start : start + _TILE]
            written[:, column : column + len(tile)] = tile.T
            column += len(tile)
    return out

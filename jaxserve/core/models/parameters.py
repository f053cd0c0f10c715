"""The parameters of a decoder: one table of their specs and of the checkpoint's tensors that make them.

Canonical names per layer: `attn_norm.weight` [D]; `qkv.weight` [D, K * (G + 2) * H] (per KV head its G query heads,
then K, then V, so that tensor parallelism cuts it between KV heads and keeps K and V together); `o.weight` [N * H, D];
`mlp_norm.weight` [D]; `gate_up.weight` [2, D, F] or, in a plain feed-forward block, `up.weight` [D, F]; `down.weight`
[F, D]. Where the model has them: `q_norm.weight` and `k_norm.weight`, `attn_out_norm.weight` and `mlp_out_norm.weight`
[D], a `bias` beside any weight and, always float32, the attention's `sinks` [N], the scales `k_scale` and `v_scale` [K]
of 8-bit pages and the P parameters `act` [P] of an activation that has its own. The parameters of experts are in
expert_parameters.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial

import numpy as np

from jaxserve.core.layers.attention import AttentionConfig
from jaxserve.core.layers.embedding import AddedEmbeddings
from jaxserve.core.layers.mlp import MLPConfig
from jaxserve.core.layers.pooling import TORCH_NORM, LayerNormConfig
from jaxserve.core.models.base import (
    CheckpointLayer,
    DecoderConfig,
    HostArray,
    Parameter,
    ParamSpec,
    Table,
    WeightSource,
)
from jaxserve.core.models.layouts import (
    JoinedRows,
    count_rows,
    fuse_gate_up,
    fuse_qkv,
    fuse_stacked,
    order_halves,
    spread_heads,
    transpose,
)
from jaxserve.core.models.trunk import Trunk
from jaxserve.core.sharding import Axes

_OLD_NAMES = {"weight": "gamma", "bias": "beta"}
_SELF_ATTENTION = {part: f"self_attn.{part}_proj" for part in "qkvo"}


def trunk_params(config: DecoderConfig, trunk: Trunk) -> Table:
    """Returns `embed` and, where the model has them, `final_norm`, `lm_head` and the other embeddings."""
    shape = (config.vocab_size, config.hidden_size)
    spec = ParamSpec(shape, config.dtype, ("vocab" if config.embedding.shard_vocab else None, None), "normal")
    head = f"{trunk.head}.weight"
    source = _plain_source(f"{trunk.embed}.weight", shape)
    has_copy = config.embedding.tied and config.generates
    table = {"embed.weight": Parameter(spec, dataclasses.replace(source, copy=head) if has_copy else source)}
    if config.layer_input_size is not None:
        table |= _layer_input_params(config, trunk, config.layer_input_size)
    if not config.embedding.tied and config.generates:
        table["lm_head.weight"] = Parameter(spec, _plain_source(head, shape))
    if config.embedding.added is not None:
        table |= _added_params(config, config.embedding.added, trunk)
    return table | _norm_params(config, "final_norm", trunk.final_norm) if config.final_norm else table


def dense_params(config: DecoderConfig) -> Table:
    """Returns what follows the pooling. Its tensors are in folders, whose names are in front of theirs."""
    table: Table = {}
    wide = dataclasses.replace(config, dtype="float32", norm=TORCH_NORM)
    for index, dense in enumerate(config.pooler.denses):
        leaf = f"dense_{index}"
        if isinstance(dense, LayerNormConfig):
            table |= wide_norm_params(wide, leaf, dense.module, dense.size)
            continue
        build, num_rows = transpose, dense.out_size
        if dense.rows is not None:  # of the embedding, or of a head that is not kept
            build, num_rows = partial(transpose, order=np.array(dense.rows)), config.vocab_size
        shape, axes, modules = (dense.in_size, dense.out_size), (None, None), {dense.module: num_rows}
        found = linear_params(wide, leaf, modules, shape, axes, build, bias=dense.bias)
        for name, each in found.items():
            source = dataclasses.replace(each.source, part=dense.rows is not None)
            table[name] = Parameter(each.spec, source)
        if dense.projects_residual:
            modules = {f"{dense.module.rpartition('/')[0]}/residual": dense.out_size}
            table |= linear_params(wide, f"{leaf}_residual", modules, shape, axes, transpose, bias=False)
    return table


def _added_params(config: DecoderConfig, added: AddedEmbeddings, trunk: Trunk) -> Table:
    """Returns the embeddings of positions and types, and the norm of the sum."""
    parent = trunk.embed.rpartition(".")[0]
    table = _norm_params(config, "embed_norm", trunk.embed_norm or f"{parent}.LayerNorm")
    for name, rows in (("position", added.num_positions), ("type", added.num_types)):
        if rows:
            module = f"{parent}.{'token_' * (name == 'type')}{name}_embeddings"
            table |= vocab_params(config, f"embed_{name}s", module, (rows, config.hidden_size), shard_vocab=False)
    return table


def _layer_input_params(config: DecoderConfig, trunk: Trunk, size: int) -> Table:
    """Returns the table, the projection and the norm of `core/layers/layer_inputs.py`."""
    parent, columns = trunk.embed.removesuffix("embed_tokens"), config.num_layers * size
    shape = (config.vocab_size, columns)
    table = vocab_params(
        config,
        "layer_inputs.embed",
        f"{trunk.embed}_per_layer",
        shape,
        shard_vocab=config.embedding.shard_vocab,
    )
    shape = (config.hidden_size, columns)
    table |= projection_params(config, "layer_inputs.projection", f"{parent}per_layer_model_projection", shape)
    return table | wide_norm_params(config, "layer_inputs.norm", f"{parent}per_layer_projection_norm", size)


def vocab_params(config: DecoderConfig, leaf: str, module: str, shape: tuple[int, int], *, shard_vocab: bool) -> Table:
    """Returns an embedding or a head [V, D] with a size of its own."""
    spec = ParamSpec(shape, config.dtype, ("vocab" if shard_vocab else None, None), "normal")
    return {f"{leaf}.weight": Parameter(spec, _plain_source(f"{module}.weight", shape))}


def wide_norm_params(config: DecoderConfig, leaf: str, module: str, size: int) -> Table:
    """Returns a norm over `size` numbers. Old files call the weight of a LayerNorm gamma, and its bias beta."""
    table: Table = {}
    for part, spec in _norm_specs(config, (size,), (None,)).items():
        source = _plain_source(f"{module}.{part}", (size,))
        if module.endswith("LayerNorm"):
            old = _plain_source(f"{module}.{_OLD_NAMES[part]}", (size,))
            source = dataclasses.replace(source, otherwise=old)
        table[f"{leaf}.{part}"] = Parameter(spec, source)
    return table


def projection_params(config: DecoderConfig, leaf: str, module: str, shape: tuple[int, int]) -> Table:
    """Returns a projection [in, out] without a bias, whole on every device."""
    return linear_params(config, leaf, {module: shape[1]}, shape, (None, None), transpose, bias=False)


def norm_params(layer: CheckpointLayer, names: Mapping[str, str]) -> Table:
    """Returns norms over D; `names` maps canonical names to the checkpoint's modules."""
    tables = (_norm_params(layer.config, leaf, layer.tensor(name)) for leaf, name in names.items())
    return {name: parameter for table in tables for name, parameter in table.items()}


def pre_norm_params(layer: CheckpointLayer) -> Table:
    """Returns the norms before both blocks of a layer, whose tensors have the names that most families use."""
    return norm_params(layer, {"attn_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"})


def attention_params(
    layer: CheckpointLayer,
    *,
    interleaved: bool = False,
    order: np.ndarray | None = None,
    input_size: int | None = None,
    modules: Mapping[str, str] = _SELF_ATTENTION,
    qk_norm: str = "self_attn.{part}_norm",
) -> Table:
    """Returns `qkv` and `o` from the `modules` of q, k, v and o, and the norms of q and k if there are any (`qk_norm`).

    `interleaved`: the checkpoint's heads rotate interleaved pairs of dimensions. `order`: for each dimension of a head,
    its index in the checkpoint's heads of q and k. `input_size`: what q, k and v are projected from, if not D.
    """
    attention, rope = layer.kind.attention, layer.kind.rope
    if interleaved and rope is not None:
        order = order_halves(rope.rotary_dim, attention.head_dim)
    rows = {layer.tensor(modules[part]): count for part, count in count_rows(attention).items()}
    table = _qkv_params(layer, rows, partial(fuse_qkv, attention, order), input_size)
    table |= _output_params(layer, modules["o"])
    return table | _qk_norm_params(layer, order, qk_norm) if attention.qk_norm is not None else table


def fused_attention_params(
    layer: CheckpointLayer,
    *,
    qkv: str = "self_attn.qkv_proj",
    out: str = "self_attn.o_proj",
    fuse: Callable[[AttentionConfig, np.ndarray], JoinedRows] = fuse_stacked,
) -> Table:
    """Returns `qkv` and `o` where one module holds q, k and v; `fuse` says in which order."""
    attention = layer.kind.attention
    modules = {layer.tensor(qkv): sum(count_rows(attention).values())}
    return _qkv_params(layer, modules, partial(fuse, attention)) | _output_params(layer, out)


def mlp_params(
    layer: CheckpointLayer,
    mlp: MLPConfig | None = None,
    module: str = "mlp",
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
) -> Table:
    """Returns `gate_up` and `down` from the modules `names` of gate, up and down; `mlp` is the layer's by default."""
    mlp = layer.dense_mlp if mlp is None else mlp
    *halves, down = (f"{module}.{name}" for name in names)
    table = _gate_up_params(
        layer.config, mlp, {layer.tensor(name): mlp.intermediate_size for name in halves}, fuse_gate_up
    )
    return table | _down_params(layer, mlp, down, f"{module}.act_fn")


def fused_mlp_params(
    layer: CheckpointLayer,
    *,
    gate_up: str = "mlp.gate_up_proj",
    down: str = "mlp.down_proj",
    up_first: bool = False,
    mlp: MLPConfig | None = None,
) -> Table:
    """Returns `gate_up` and `down` where one module holds all rows of gate, then of up; or, `up_first`, of up first.

    `mlp` is the layer's by default.
    """
    mlp = layer.dense_mlp if mlp is None else mlp
    modules = {layer.tensor(gate_up): 2 * mlp.intermediate_size}
    order = -1 if up_first else 1
    table = _gate_up_params(layer.config, mlp, modules, lambda tensor: fuse_gate_up(*np.split(tensor, 2)[::order]))
    return table | _down_params(layer, mlp, down, "mlp.activation_fn")


def plain_mlp_params(layer: CheckpointLayer, *, up: str, down: str, mlp: MLPConfig | None = None) -> Table:
    """Returns `up` and `down` of a feed-forward block without a gate; `mlp` is the layer's by default."""
    config, mlp = layer.config, layer.dense_mlp if mlp is None else mlp
    shape = (config.hidden_size, mlp.intermediate_size)
    modules = {layer.tensor(up): shape[1]}
    table = linear_params(config, "up", modules, shape, (None, "ffn"), transpose, bias=mlp.bias)
    return table | _down_params(layer, mlp, down, "mlp.act")


def sink_params(layer: CheckpointLayer) -> Table:
    """Returns `sinks` [N] of the attention."""
    shape = (layer.kind.attention.num_heads,)
    spec = ParamSpec(shape, "float32", ("heads",), "normal")
    return {"sinks": Parameter(spec, _plain_source(layer.tensor("self_attn.sinks"), shape))}


def kv_scale_params(layer: CheckpointLayer) -> Table:
    """Returns `k_scale` and `v_scale`, if the checkpoint has them; of latents `k_scale` only."""
    attention = layer.kind.mixer
    if not isinstance(attention, AttentionConfig) or attention.kv_scales is None:
        return {}

    def spread(tensor: np.ndarray) -> np.ndarray:
        heads = attention.num_kv_heads // attention.kv_repeats
        return np.repeat(np.broadcast_to(tensor, (heads,)), attention.kv_repeats)

    spec = ParamSpec((attention.num_kv_heads,), "float32", ("kv_heads",), "ones")
    parts = ("k", "v") if attention.latent is None else ("k",)
    owner, shapes = layer.page_owner, (attention.kv_scales.shape,)
    names = {part: owner.tensor(attention.kv_scales.name.format(part=part)) for part in parts}
    sources = {part: make_source((name,), shapes, spread) for part, name in names.items()}
    if owner != layer:
        sources = {part: dataclasses.replace(source, part=True) for part, source in sources.items()}
    return {f"{part}_scale": Parameter(spec, source) for part, source in sources.items()}


def linear_params(
    config: DecoderConfig,
    leaf: str,
    modules: Mapping[str, int],
    shape: tuple[int, ...],
    axes: Axes,
    build: Callable[..., HostArray],
    *,
    bias: bool,
) -> Table:
    """Returns a projection of `shape` [..., in, out] and its bias [..., out]; `modules` maps their names to rows.

    `build` makes weight and bias of the modules' tensors.
    """
    forms = {"weight": (shape, axes, "normal", shape[-2:-1])}
    if bias:
        forms["bias"] = ((*shape[:-2], shape[-1]), (*axes[:-2], axes[-1]), "zeros", ())
    table: Table = {}
    for part, (form, form_axes, init, columns) in forms.items():
        names = tuple(f"{module}.{part}" for module in modules)
        source = make_source(names, tuple((rows, *columns) for rows in modules.values()), build)
        table[f"{leaf}.{part}"] = Parameter(ParamSpec(form, config.dtype, form_axes, init), source)
    return table


def _qkv_params(
    layer: CheckpointLayer,
    modules: Mapping[str, int],
    build: Callable[..., HostArray],
    input_size: int | None = None,
) -> Table:
    config, attention = layer.config, layer.kind.attention
    shape, axes = (input_size or config.hidden_size, attention.columns), (None, "kv_heads")
    return linear_params(config, "qkv", modules, shape, axes, build, bias=attention.qkv_bias)


def _output_params(layer: CheckpointLayer, module: str) -> Table:
    config, attention = layer.config, layer.kind.attention
    shape = (attention.num_heads * attention.head_dim, config.hidden_size)
    modules = {layer.tensor(module): shape[1]}
    return linear_params(config, "o", modules, shape, ("heads", None), transpose, bias=attention.out_bias)


def _gate_up_params(
    config: DecoderConfig, mlp: MLPConfig, modules: Mapping[str, int], build: Callable[..., HostArray]
) -> Table:
    shape = (2, config.hidden_size, mlp.intermediate_size)
    return linear_params(config, "gate_up", modules, shape, (None, None, "ffn"), build, bias=mlp.bias)


def _down_params(layer: CheckpointLayer, mlp: MLPConfig, module: str, activation: str) -> Table:
    """Returns `down`, and `act` from the scalars of the module `activation`, if it has any."""
    config, learned = layer.config, mlp.learned
    shape = (mlp.intermediate_size, config.hidden_size)
    modules = {layer.tensor(module): config.hidden_size}
    bias = mlp.bias if mlp.down_bias is None else mlp.down_bias
    table = linear_params(config, "down", modules, shape, ("ffn", None), transpose, bias=bias)
    if learned:
        names = tuple(layer.tensor(f"{activation}.{scalar}") for scalar in learned)
        source = make_source(names, tuple(learned.values()), _join_scalars)
        table["act"] = Parameter(ParamSpec((len(learned),), "float32", (None,), "zeros"), source)
    return table


def _join_scalars(*tensors: np.ndarray) -> np.ndarray:
    return np.stack([tensor.reshape(()) for tensor in tensors])


def _norm_params(config: DecoderConfig, leaf: str, module: str) -> Table:
    return wide_norm_params(config, leaf, module, config.hidden_size)


def _qk_norm_params(layer: CheckpointLayer, order: np.ndarray | None, module: str) -> Table:
    config, attention = layer.config, layer.kind.attention
    head_dim, repeats = attention.head_dim, attention.kv_repeats
    table: Table = {}
    for part, heads, stored, axis in (
        ("q", attention.num_heads, attention.num_heads, "heads"),
        ("k", attention.num_kv_heads // repeats, attention.num_kv_heads, "kv_heads"),
    ):
        if part not in attention.projections:
            continue
        tensor_shape, shape, axes = {
            "shared": ((head_dim,), (head_dim,), (None,)),
            "per_head": ((heads, head_dim), (stored, head_dim), (axis, None)),
            "projection": ((heads * head_dim,), (stored * head_dim,), (axis,)),
        }[attention.qk_norm]
        build = partial(spread_heads, head_dim, order, shape)
        for name, spec in _norm_specs(config, shape, axes).items():
            source = make_source((layer.tensor(f"{module.format(part=part)}.{name}"),), (tensor_shape,), build)
            table[f"{part}_norm.{name}"] = Parameter(spec, source)
    return table


def _norm_specs(config: DecoderConfig, shape: tuple[int, ...], axes: Axes) -> dict[str, ParamSpec]:
    norm = config.norm
    if not norm.weight:
        return {}
    specs = {"weight": ParamSpec(shape, config.dtype, axes, "zeros" if norm.unit_offset else "ones")}
    return specs | ({"bias": ParamSpec(shape, config.dtype, axes, "zeros")} if norm.bias else {})


def _plain_source(name: str, shape: tuple[int, ...]) -> WeightSource:
    """Returns the source of a parameter that is one tensor, unchanged."""
    return make_source((name,), (shape,), lambda tensor: tensor)


def make_source(
    names: tuple[str, ...], shapes: tuple[tuple[int, ...], ...], build: Callable[..., HostArray]
) -> WeightSource:
    """Returns the source of a parameter that `build` makes of tensors with these names and shapes."""
    return WeightSource(names, shapes, build)

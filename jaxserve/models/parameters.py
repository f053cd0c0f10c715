"""The parameters of a decoder: their specs, and how checkpoint tensors become them.

Canonical names per layer: `attn_norm` [D], `qkv` [D, K * (G + 2) * H] (per KV head its G query heads, then K, then V,
so that tensor parallelism cuts it between KV heads and keeps K and V together), `o` [N * H, D], `mlp_norm` [D],
`gate_up` [2, D, F], `down` [F, D]; where the model has them `q_norm` and `k_norm` [H], `attn_out_norm` and
`mlp_out_norm` [D], and the biases `qkv_bias` [K * (G + 2) * H], `o_bias` [D], `gate_up_bias` [2, F], `down_bias` [D],
and, always float32, the scales `k_scale` and `v_scale` [K] of 8-bit pages and the P parameters `act` [P] of an
activation that has its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from jaxserve.errors import WeightsError
from jaxserve.models.base import DecoderConfig, ParamSpec, WeightSource
from jaxserve.sharding import Axes

_TILE = 16  # rows per step of a transposed copy: 32 bytes of bfloat16, three times as fast as one whole copy


def decoder_specs(config: DecoderConfig) -> dict[str, object]:
    """Returns the canonical tree of ParamSpec: `embed`, `layers` (one dict per layer), `final_norm`, and `lm_head`."""
    vocab: Axes = ("vocab" if config.embedding.shard_vocab else None, None)
    table = ParamSpec((config.vocab_size, config.hidden_size), config.dtype, vocab, "normal")
    specs: dict[str, object] = {
        "embed": table,
        "layers": [_layer_specs(config) for _ in config.layers],
        "final_norm": _norm_spec(config, config.hidden_size),
    }
    if not config.embedding.tied:
        specs["lm_head"] = table
    return specs


def _layer_specs(config: DecoderConfig) -> dict[str, ParamSpec]:
    hidden, attention, mlp = config.hidden_size, config.attention, config.mlp
    ffn, heads, kv_heads, head_dim = (
        mlp.intermediate_size,
        attention.num_heads,
        attention.num_kv_heads,
        attention.head_dim,
    )
    slots = attention.group_size + 2

    def spec(shape: tuple[int, ...], axes: Axes, init: str = "normal") -> ParamSpec:
        return ParamSpec(shape, config.dtype, axes, init)

    specs = {
        "attn_norm": _norm_spec(config, hidden),
        "qkv": spec((hidden, kv_heads * slots * head_dim), (None, "kv_heads")),
        "o": spec((heads * head_dim, hidden), ("heads", None)),
        "mlp_norm": _norm_spec(config, hidden),
        "gate_up": spec((2, hidden, ffn), (None, None, "ffn")),
        "down": spec((ffn, hidden), ("ffn", None)),
    }
    if attention.qk_norm:
        specs["q_norm"] = specs["k_norm"] = _norm_spec(config, head_dim)
    if attention.qkv_bias:
        specs["qkv_bias"] = spec((kv_heads * slots * head_dim,), ("kv_heads",), "zeros")
    if attention.out_bias:
        specs["o_bias"] = spec((hidden,), (None,), "zeros")
    if attention.kv_scales is not None:
        specs["k_scale"] = specs["v_scale"] = ParamSpec((kv_heads,), "float32", ("kv_heads",), "ones")
    if mlp.bias:
        specs["gate_up_bias"] = spec((2, ffn), (None, "ffn"), "zeros")
        specs["down_bias"] = spec((hidden,), (None,), "zeros")
    if mlp.learned:
        specs["act"] = ParamSpec((len(mlp.learned),), "float32", (None,), "zeros")
    if config.norm.block_outputs:
        specs["attn_out_norm"] = specs["mlp_out_norm"] = _norm_spec(config, hidden)
    return specs


def _norm_spec(config: DecoderConfig, size: int) -> ParamSpec:
    return ParamSpec((size,), config.dtype, (None,), "zeros" if config.norm.unit_offset else "ones")


def plain_source(name: str, shape: tuple[int, ...]) -> WeightSource:
    """A tensor that is stored as it is used."""
    return _source((name,), (shape,), lambda tensor: tensor)


def attention_sources(config: DecoderConfig, prefix: str) -> dict[str, WeightSource]:
    """`qkv`, `o` and their biases from separate q_proj, k_proj, v_proj and o_proj under `prefix`."""
    attention, hidden = config.attention, config.hidden_size
    q_rows, kv_rows = _projection_rows(config)
    projections = [(f"{prefix}.{part}_proj", rows) for part, rows in (("q", q_rows), ("k", kv_rows), ("v", kv_rows))]
    sources = {
        "qkv": _source(
            tuple(f"{name}.weight" for name, _ in projections),
            tuple((rows, hidden) for _, rows in projections),
            partial(_fuse_qkv, config),
        ),
        "o": _output_source(config, f"{prefix}.o_proj.weight"),
    }
    if attention.qkv_bias:
        sources["qkv_bias"] = _source(
            tuple(f"{name}.bias" for name, _ in projections),
            tuple((rows,) for _, rows in projections),
            partial(_fuse_qkv, config),
        )
    if attention.out_bias:
        sources["o_bias"] = plain_source(f"{prefix}.o_proj.bias", (hidden,))
    return sources


def fused_attention_sources(config: DecoderConfig, prefix: str) -> dict[str, WeightSource]:
    """`qkv` and `o` from one qkv_proj, whose rows are all q heads, then all k, then all v."""
    q_rows, kv_rows = _projection_rows(config)

    def split_and_fuse(tensor: np.ndarray) -> np.ndarray:
        return _fuse_qkv(config, *np.split(tensor, [q_rows, q_rows + kv_rows]))

    shape = (q_rows + 2 * kv_rows, config.hidden_size)
    return {
        "qkv": _source((f"{prefix}.qkv_proj.weight",), (shape,), split_and_fuse),
        "o": _output_source(config, f"{prefix}.o_proj.weight"),
    }


def kv_scale_sources(config: DecoderConfig, prefix: str) -> dict[str, WeightSource]:
    """`k_scale` and `v_scale` of the layer under `prefix`, if the checkpoint has them."""
    attention = config.attention
    if attention.kv_scales is None:
        return {}

    def spread(tensor: np.ndarray) -> np.ndarray:
        heads = attention.num_kv_heads // attention.kv_repeats
        return np.repeat(np.broadcast_to(tensor, (heads,)), attention.kv_repeats)

    return {
        f"{part}_scale": _source(
            (f"{prefix}.{attention.kv_scales.name.format(part=part)}",), (attention.kv_scales.shape,), spread
        )
        for part in ("k", "v")
    }


def mlp_sources(config: DecoderConfig, prefix: str) -> dict[str, WeightSource]:
    """`gate_up`, `down` and their biases from separate gate_proj, up_proj and down_proj under `prefix`."""
    hidden, ffn = config.hidden_size, config.mlp.intermediate_size
    gate, up, down = (f"{prefix}.{part}_proj" for part in ("gate", "up", "down"))
    sources = {
        "gate_up": _source((f"{gate}.weight", f"{up}.weight"), ((ffn, hidden), (ffn, hidden)), _fuse_gate_up),
        "down": _source((f"{down}.weight",), ((hidden, ffn),), _transpose),
    }
    if config.mlp.bias:
        sources["gate_up_bias"] = _source((f"{gate}.bias", f"{up}.bias"), ((ffn,), (ffn,)), _fuse_gate_up)
        sources["down_bias"] = plain_source(f"{down}.bias", (hidden,))
    return sources | _activation_sources(config, f"{prefix}.act_fn")


def fused_mlp_sources(config: DecoderConfig, prefix: str) -> dict[str, WeightSource]:
    """`gate_up` and `down` from one gate_up_proj, whose rows are the gate's, then the up projection's."""
    hidden, ffn = config.hidden_size, config.mlp.intermediate_size
    return {
        "gate_up": _source(
            (f"{prefix}.gate_up_proj.weight",),
            ((2 * ffn, hidden),),
            lambda tensor: _fuse_gate_up(*np.split(tensor, 2)),
        ),
        "down": _source((f"{prefix}.down_proj.weight",), ((hidden, ffn),), _transpose),
    } | _activation_sources(config, f"{prefix}.activation_fn")


def _activation_sources(config: DecoderConfig, prefix: str) -> dict[str, WeightSource]:
    """`act` from the scalars under `prefix`, if the activation has any."""
    learned = config.mlp.learned
    if not learned:
        return {}
    names = tuple(f"{prefix}.{name}" for name in learned)
    return {"act": _source(names, tuple(learned.values()), lambda *scalars: np.stack([s.reshape(()) for s in scalars]))}


def norm_sources(config: DecoderConfig, names: dict[str, str]) -> dict[str, WeightSource]:
    """Norm weights by canonical leaf name; `q_norm` and `k_norm` span a head, all others D."""
    sizes = {"q_norm": config.attention.head_dim, "k_norm": config.attention.head_dim}
    return {leaf: plain_source(name, (sizes.get(leaf, config.hidden_size),)) for leaf, name in names.items()}


def pre_norm_sources(config: DecoderConfig, prefix: str) -> dict[str, WeightSource]:
    """The two norms of a layer that has one before each block, by the names that most families give them."""
    names = {"attn_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
    return norm_sources(config, {leaf: f"{prefix}.{name}.weight" for leaf, name in names.items()})


def _projection_rows(config: DecoderConfig) -> tuple[int, int]:
    """Rows of the checkpoint's q projection, and of its k and v projections."""
    attention = config.attention
    kv_heads = attention.num_kv_heads // attention.kv_repeats
    return attention.num_heads * attention.head_dim, kv_heads * attention.head_dim


def _output_source(config: DecoderConfig, name: str) -> WeightSource:
    attention = config.attention
    return _source((name,), ((config.hidden_size, attention.num_heads * attention.head_dim),), _transpose)


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


def _fuse_qkv(config: DecoderConfig, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """[N*H, D], [K*H, D], [K*H, D] -> [D, K * (G + 2) * H]; biases without D."""
    attention = config.attention
    kv_heads, group, head_dim = attention.num_kv_heads, attention.group_size, attention.head_dim
    parts = []
    for head in range(kv_heads):
        source = head // attention.kv_repeats
        parts.append(q[head * group * head_dim : (head + 1) * group * head_dim])
        parts += [tensor[source * head_dim : (source + 1) * head_dim] for tensor in (k, v)]
    return _join_rows(parts)


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

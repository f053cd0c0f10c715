"""LFM2: gated short convolutions with some layers of attention between them, dense or with experts."""

from __future__ import annotations

from jaxserve.core.layers.attention import AttentionConfig
from jaxserve.core.layers.mlp import MLPConfig
from jaxserve.core.layers.short_conv import ShortConvConfig
from jaxserve.core.models.base import (
    CheckpointLayer,
    DecoderConfig,
    Family,
    LayerKind,
    Parameter,
    ParamSpec,
    Table,
)
from jaxserve.core.models.blocks import hybrid_layer
from jaxserve.core.models.common import (
    DECODER_KEYS,
    build_config,
    omit,
    read_attention,
    read_layer_types,
    read_mlp,
    read_norm,
    read_num_layers,
    read_rope,
)
from jaxserve.core.models.expert_parameters import moe_params
from jaxserve.core.models.hf_config import HFConfig
from jaxserve.core.models.layouts import Rows, StackedParts, transpose
from jaxserve.core.models.moe_config import MAX_EXPERTS, TRAINING_KEYS, give_experts, read_experts
from jaxserve.core.models.parameters import attention_params, linear_params, make_source, mlp_params, norm_params
from jaxserve.core.models.trunk import Trunk
from jaxserve.errors import ConfigError, shorten

_SHARED_KEYS = omit(DECODER_KEYS, "rms_norm_eps") | {
    "num_key_value_heads": 8,
    "max_position_embeddings": 128000,
    "original_max_position_embeddings": None,
    "norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "tie_embedding": None,
    "rope_theta": 1000000.0,
    "hidden_act": "silu",
    "conv_L_cache": 3,
    "conv_bias": False,
    "layer_types": None,
}
KEYS = _SHARED_KEYS | {
    "intermediate_size": 12288,
    "block_ff_dim": None,
    "block_auto_adjust_ff_dim": True,
    "block_ffn_dim_multiplier": 1.0,
    "block_multiple_of": 256,
    "full_attn_idxs": None,
}
MOE_KEYS = _SHARED_KEYS | {
    "num_dense_layers": 2,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 1792,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
    "use_expert_bias": True,
}
# Keys of published files that say again what others say, or how weights were drawn.
_IGNORED_KEYS = (
    *("block_dim", "block_norm_eps", "block_use_swiglu", "block_mlp_init_scale", "block_out_init_scale"),
    *("block_use_xavier_init", "conv_dim", "conv_dim_out", "conv_use_xavier_init", "num_heads", "theta"),
    "use_pos_enc",
)

_CONV = "conv"
_PROJECTIONS = ("w1", "w3", "w2")
_ATTENTION = {part: f"self_attn.{part}_proj" for part in "qkv"} | {"o": "self_attn.out_proj"}


def parse(config: HFConfig) -> DecoderConfig:
    """Reads an LFM2 config.json."""
    num_layers = read_num_layers(config)
    attending = config.get("full_attn_idxs")
    attending = list(range(num_layers)) if attending is None else attending
    if not isinstance(attending, list) or any(type(index) is not int for index in attending):
        message = f"must be a list of layers, not {shorten(attending)}"
        raise ConfigError(message, field="full_attn_idxs", value=attending)
    default = ["full_attention" if index in attending else _CONV for index in range(num_layers)]
    mlp = MLPConfig(_read_columns(config), "silu")
    return _build(config, "lfm2", _read_layers(config, default, mlp))


def parse_moe(config: HFConfig) -> DecoderConfig:
    """Reads the config.json of an LFM2 with experts behind its first layers."""
    num_layers = read_num_layers(config)
    layers = _read_layers(config, ["full_attention"] * num_layers, read_mlp(config))
    moe = read_experts(
        config,
        config.integer("num_experts", maximum=MAX_EXPERTS),
        scoring="sigmoid",
        correction=config.flag("use_expert_bias"),
        normalize=config.flag("norm_topk_prob"),
        scale=config.number("routed_scaling_factor"),
    )
    dense = config.integer("num_dense_layers", minimum=0)
    return _build(config, "lfm2_moe", give_experts(layers, [index >= dense for index in range(num_layers)], moe))


def _read_layers(config: HFConfig, default: list[str], mlp: MLPConfig) -> tuple[LayerKind, ...]:
    config.require(hidden_act="silu")
    attention = read_attention(config, qk_norm="shared")
    rope = read_rope(config, attention.head_dim)
    size = config.integer("conv_L_cache", minimum=2, maximum=64)
    conv = ShortConvConfig(config.integer("hidden_size"), size, config.flag("conv_bias"))
    kinds = {"full_attention": LayerKind(attention, None, rope, mlp), _CONV: LayerKind(conv, None, None, mlp)}
    return tuple(kinds[kind] for kind in read_layer_types(config, default, _CONV))


def _read_columns(config: HFConfig) -> int:
    """Returns the columns of a feed-forward block: two thirds of what the file says, rounded up, as in Llama 1."""
    key = "intermediate_size" if config.get("block_ff_dim") is None else "block_ff_dim"
    size = config.integer(key)
    if not config.flag("block_auto_adjust_ff_dim"):
        return size
    size, unit = int(2 * size / 3), config.integer("block_multiple_of")
    factor = config.optional_number("block_ffn_dim_multiplier")
    return size if factor is None else -(-int(factor * size) // unit) * unit


def _build(config: HFConfig, family: str, layers: tuple[LayerKind, ...]) -> DecoderConfig:
    names = {"tie_word_embeddings": "tie_embedding"} if config.get("tie_embedding") is not None else {}
    return build_config(config.rename(names), family, layers=layers, norm=read_norm(config, "norm_eps"))


def list_layer_params(layer: CheckpointLayer) -> Table:
    """A norm before each block, whose second is dense or has experts."""
    table = norm_params(layer, {"attn_norm": "operator_norm", "mlp_norm": "ffn_norm"})
    if isinstance(layer.kind.mixer, AttentionConfig):
        table |= attention_params(layer, modules=_ATTENTION, qk_norm="self_attn.{part}_layernorm")
    else:
        table |= _conv_params(layer)
    if not layer.has_experts:
        return table | mlp_params(layer, module="feed_forward", names=_PROJECTIONS)
    return table | moe_params(
        layer,
        module="feed_forward",
        packed_module="feed_forward",
        projections=_PROJECTIONS,
        correction="expert_bias",
    )


def _conv_params(layer: CheckpointLayer) -> Table:
    """Returns the parameters of core/layers/short_conv.py."""
    config, conv = layer.config, layer.kind.mixer
    assert isinstance(conv, ShortConvConfig)
    hidden, count, size = config.hidden_size, conv.num_channels, conv.conv_size
    wide, out = (3, hidden, count), (count, hidden)
    modules = {layer.tensor("conv.in_proj"): 3 * count}
    table = linear_params(config, "bcx", modules, wide, (None, None, "channels"), _split_parts, bias=conv.bias)
    modules = {layer.tensor("conv.out_proj"): hidden}
    table |= linear_params(config, "o", modules, out, ("channels", None), transpose, bias=conv.bias)
    source = make_source((layer.tensor("conv.conv.weight"),), ((count, 1, size),), lambda tensor: tensor[:, 0].T)
    table["conv"] = Parameter(ParamSpec((size, count), config.dtype, conv.axes["conv"], "normal"), source)
    if conv.bias:
        source = make_source((layer.tensor("conv.conv.bias"),), ((count,),), lambda tensor: tensor)
        table["conv_bias"] = Parameter(ParamSpec((count,), config.dtype, conv.axes["conv_bias"], "zeros"), source)
    return table


def _split_parts(tensor: Rows) -> StackedParts:
    """Returns [3, D, C] of b, c and x [3C, D]; of a bias [3, C]."""
    count = len(tensor) // 3
    return StackedParts([transpose(tensor[part * count : (part + 1) * count]) for part in range(3)])


_TRUNK = Trunk(final_norm="model.embedding_norm")

FAMILY = Family(
    "lfm2",
    "Lfm2ForCausalLM",
    KEYS,
    parse,
    hybrid_layer,
    list_layer_params,
    ignored_keys=_IGNORED_KEYS,
    trunk=_TRUNK,
)
MOE_FAMILY = Family(
    "lfm2_moe",
    "Lfm2MoeForCausalLM",
    MOE_KEYS,
    parse_moe,
    hybrid_layer,
    list_layer_params,
    ignored_keys=(*_IGNORED_KEYS, *TRAINING_KEYS),
    trunk=_TRUNK,
)

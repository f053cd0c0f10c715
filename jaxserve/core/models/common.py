"""Functions that the families' config readers share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from jaxserve.core.layers.activations import ACTIVATIONS
from jaxserve.core.layers.attention import AttentionConfig, QKNorm
from jaxserve.core.layers.embedding import AddedEmbeddings, EmbeddingConfig
from jaxserve.core.layers.mlp import MLPConfig
from jaxserve.core.layers.norm import NormConfig
from jaxserve.core.layers.pooling import PoolerConfig
from jaxserve.core.layers.rope import RopeConfig
from jaxserve.core.models.base import DecoderConfig, LayerKind
from jaxserve.core.models.hf_config import REQUIRED, HFConfig, check_integer, check_mapping
from jaxserve.core.models.rope_config import parse_rope, rope_parameters
from jaxserve.errors import ConfigError, shorten
from jaxserve.pooling_options import PoolingType

# Keys that every family knows. Sizes have no default, because files state them; families with a default override the
# entry.
DECODER_KEYS: dict[str, object] = {
    "vocab_size": REQUIRED,
    "hidden_size": REQUIRED,
    "intermediate_size": REQUIRED,
    "num_hidden_layers": REQUIRED,
    "num_attention_heads": REQUIRED,
    "num_key_value_heads": None,
    "head_dim": None,
    "max_position_embeddings": REQUIRED,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "eos_token_id": None,
    "dtype": None,
    "torch_dtype": None,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "rope_parameters": None,
    "partial_rotary_factor": None,
}


def omit(keys: dict[str, object], *names: str) -> dict[str, object]:
    """Returns `keys` without `names`."""
    return {key: value for key, value in keys.items() if key not in names}


PREDICTION_LAYER = (r"model\.layers\.{num_layers}\..*",)
"""`Family.ignored_weights` of families whose files have one more layer, which predicts several tokens."""

THREE_PREDICTION_LAYERS = tuple(rf"model\.layers\.{{num_layers+{index}}}\..*" for index in range(3))
"""The same with three more layers."""

_MAX_LAYERS = 1024
_LEAST_EPS = 2.0**-126  # float32's smallest normal number, negligible beside any mean square above 1e-31

_FULL, _SLIDING = "full_attention", "sliding_attention"


def read_num_layers(config: HFConfig) -> int:
    """Returns L, bounded so that a mistyped number cannot exhaust memory."""
    return config.integer("num_hidden_layers", maximum=_MAX_LAYERS)


def read_norm(config: HFConfig, key: str = "rms_norm_eps", **form: bool) -> NormConfig:
    """Returns the norm; `form` are fields of NormConfig.

    An epsilon of 0 becomes the smallest one that keeps a row of zeros zero. The reference turns such a row into NaN; a
    padded row can be one, and must not write NaN to pages.
    """
    eps = max(config.number(key, minimum=0.0), _LEAST_EPS)
    return NormConfig(eps=eps, **form)


def read_rope(config: HFConfig, head_dim: int, *, partial: bool = False, share: float | None = None) -> RopeConfig:
    """Returns the one rotary embedding of a model whose layers share it; `partial` as for `parse_rope`.

    `share` is the part of a head that rotates where no `partial_rotary_factor` says so. A top-level
    `original_max_position_embeddings` overrides the one inside the rope object, as in the reference.
    """
    parameters = rope_parameters(config)
    if parameters.get("partial_rotary_factor") is None:
        parameters["partial_rotary_factor"] = share
    original = config.optional_integer("original_max_position_embeddings")
    scaled = (parameters.get("rope_type") or parameters.get("type")) in ("llama3", "yarn", "longrope")
    if original is not None and scaled:
        parameters["original_max_position_embeddings"] = original
    trained_length = config.integer("max_position_embeddings")
    return parse_rope(parameters, head_dim=head_dim, max_position_embeddings=trained_length, partial=partial)


def read_typed_ropes(config: HFConfig, head_dim: int, *, sliding_theta: str) -> tuple[RopeConfig, RopeConfig]:
    """Returns the rotary embeddings of full and of sliding layers.

    Files hold one object per layer type or, in the older form, a `rope_scaling` for full layers only. `sliding_theta`
    is the key of the sliding layers' base in the older form.
    """
    by_type = config.mapping("rope_parameters")
    for key in by_type:
        if key not in (_FULL, _SLIDING):
            raise ConfigError(
                f"must hold one object for {_FULL} and one for {_SLIDING}", field="rope_parameters", value=key
            )
    new_full, new_sliding = (check_mapping(f"rope_parameters.{key}", by_type.get(key)) for key in (_FULL, _SLIDING))
    shared = {"partial_rotary_factor": config.get("partial_rotary_factor")}
    full = shared | {"rope_theta": config.get("rope_theta")} | new_full | config.mapping("rope_scaling")
    sliding = shared | {"rope_theta": config.get(sliding_theta)} | new_sliding
    length = config.integer("max_position_embeddings")
    rope, sliding_rope = (
        parse_rope(parameters, head_dim=head_dim, max_position_embeddings=length) for parameters in (full, sliding)
    )
    return rope, sliding_rope


def read_attention(
    config: HFConfig,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    qkv_bias: bool = False,
    out_bias: bool = False,
    qk_norm: QKNorm | None = None,
    gated: bool = False,
) -> AttentionConfig:
    """Returns the attention config; `scale` defaults to 1 / sqrt(head_dim).

    Without `head_dim` in the file it is hidden_size // num_attention_heads: heads need not fill the hidden size.
    """
    num_heads = config.integer("num_attention_heads")
    num_kv_heads = config.optional_integer("num_key_value_heads") or num_heads
    if num_heads % num_kv_heads:
        raise ConfigError(
            f"{num_kv_heads} does not divide num_attention_heads {num_heads}", field="num_key_value_heads"
        )
    head_dim = config.optional_integer("head_dim")
    if head_dim is None:
        head_dim = check_integer("head_dim", config.integer("hidden_size") // num_heads)
    return AttentionConfig(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        scale=head_dim**-0.5 if scale is None else scale,
        softcap=softcap,
        qkv_bias=qkv_bias,
        out_bias=out_bias,
        qk_norm=qk_norm,
        gated=gated,
    )


def read_mlp(
    config: HFConfig,
    *,
    size_key: str = "intermediate_size",
    activation_key: str = "hidden_act",
    bias: bool = False,
    gated: bool = True,
) -> MLPConfig:
    """Returns the feed-forward block."""
    return MLPConfig(config.integer(size_key), config.choice(activation_key, ACTIVATIONS), bias, gated=gated)


def read_layer_types(
    config: HFConfig, default: list[str], other: str = _SLIDING, older: Mapping[str, str] | None = None
) -> list[str]:
    """Returns "full_attention" or `other` per layer: the file's `layer_types`, else `default`.

    `older` are names that other files have for these.
    """
    types, num_layers = config.get("layer_types"), read_num_layers(config)
    if types is None:
        return default
    if older is not None and isinstance(types, list):
        types = [older.get(kind, kind) if isinstance(kind, str) else kind for kind in types]
    if not isinstance(types, list) or len(types) != num_layers or any(kind not in (_FULL, other) for kind in types):
        raise ConfigError(
            f"must be {num_layers} entries of {_FULL} or {other}, not {shorten(types)}",
            field="layer_types",
            value=types,
        )
    return types


def window_layers(
    attention: AttentionConfig,
    types: list[str],
    window: int | None,
    mlp: MLPConfig,
    rope: RopeConfig | None,
    sliding_rope: RopeConfig | None = None,
) -> tuple[LayerKind, ...]:
    """Returns the layers; those of type "sliding_attention" have the window, and `sliding_rope` if given."""
    if window is None and _SLIDING in types:
        raise ConfigError("must be an integer when layer_types has sliding_attention", field="sliding_window")
    kinds = {
        _FULL: LayerKind(attention, None, rope, mlp),
        _SLIDING: LayerKind(attention, window, sliding_rope or rope, mlp),
    }
    return tuple(kinds[kind] for kind in types)


def make_encoder(
    model: DecoderConfig,
    *,
    added: AddedEmbeddings | None = None,
    final_norm: bool = True,
    pooling_type: PoolingType = "CLS",
) -> DecoderConfig:
    """Returns the encoder with a decoder's layers: no causal masks, and windows are radii.

    Each text is computed whole, so layers of equal windows write the same pages, one after another. `pooling_type` is
    that of a model without modules.json.
    """
    layers, owners = [], dict[int | None, int]()
    for index, kind in enumerate(model.layers):
        owner = owners.setdefault(kind.window, index)
        mixer = replace(kind.attention, causal=False)
        layers.append(replace(kind, mixer=mixer, page_owner=None if owner == index else owner))
    return replace(
        model,
        layers=tuple(layers),
        embedding=replace(model.embedding, added=added),
        final_norm=final_norm,
        pooler=PoolerConfig(pooling_type),
    )


def alternate_layer_types(num_layers: int, period: int, other: str = _SLIDING) -> list[str]:
    """Returns layer types: full attention for every `period`-th layer, `other` for the others."""
    return [other if (index + 1) % period else _FULL for index in range(num_layers)]


def build_config(
    config: HFConfig,
    family: str,
    *,
    layers: tuple[LayerKind, ...],
    norm: NormConfig | None = None,
    embed_scale: float | None = None,
    logit_scale: float | None = None,
    final_softcap: float | None = None,
) -> DecoderConfig:
    """Returns the decoder; reads the numbers that all families have in common."""
    trained_length = config.integer("max_position_embeddings")
    return DecoderConfig(
        family=family,
        hidden_size=config.integer("hidden_size"),
        layers=layers,
        norm=norm or read_norm(config),
        embedding=EmbeddingConfig(
            vocab_size=config.integer("vocab_size"),
            tied=config.flag("tie_word_embeddings"),
            scale=embed_scale,
            logit_scale=logit_scale,
            softcap=final_softcap,
        ),
        max_position_embeddings=trained_length,
        max_model_len=trained_length,
        eos_token_ids=config.eos_token_ids(),
        dtype=config.dtype(),
    )

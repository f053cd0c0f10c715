"""Reads the config.json of an EAGLE-3 head, in the forms of its authors, SpecForge, ModelOpt and speculators."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping

from jaxserve.core.layers.attention import AttentionConfig
from jaxserve.core.layers.rope import RopeConfig
from jaxserve.core.models.base import DecoderConfig, LayerKind
from jaxserve.core.models.common import build_config, read_attention, read_mlp, read_num_layers, read_rope
from jaxserve.core.models.hf_config import HFConfig, check_integer, check_mapping
from jaxserve.errors import ConfigError, shorten
from jaxserve.families import llama
from jaxserve.features.quantization.config import refuse_quantized
from jaxserve.features.speculation.drafters.base import AuxNorm, DrafterModel
from jaxserve.features.speculation.drafters.eagle3 import D2T, EMBED, FC, HEAD

_log = logging.getLogger(__name__)

_IDS = "eagle_aux_hidden_state_layer_ids"
# `LlamaForCausalLM` is the name in the first files; their tensors say the rest.
_ARCHITECTURES = (
    *("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Eagle3Speculator", "Eagle3DraftModel"),
    "LlamaForCausalLM",
)
KEYS = llama.KEYS | {
    "draft_vocab_size": None,
    "target_hidden_size": None,
    "norm_before_residual": False,
    "norm_before_fc": False,
    "fc_norm": False,
    "norm_output": False,
    "eagle_config": None,
    _IDS: None,
    "layer_types": None,
    "use_sliding_window": None,
}
IGNORED_KEYS = (
    *llama.IGNORED_KEYS,
    *("sliding_window", "max_window_layers"),  # without use_sliding_window
    *("speculators_model_type", "speculators_version", "speculators_config", "embed_requires_grad"),
    *("has_no_defaults_at_init", "num_lookahead_tokens", "ttt_steps", "target_model_type"),
)
# What ModelOpt writes into `eagle_config` beside what is read here, and the one value that is the layer of eagle3.py.
_FIXED = {
    "use_aux_hidden_state": True,
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "use_mtp_layernorm": False,
    "parallel_draft_step": 1,
    "parallel_draft_heads_num_layers": None,
    "next_layer_regular": True,
}
_NORMS = ("norm_before_fc", "fc_norm", "norm_output", "norm_before_residual")


def parse_eagle3(
    raw: Mapping[str, object], shape_of: Mapping[str, tuple[int, ...]], target: DecoderConfig
) -> DrafterModel:
    """Returns the head that a config.json and its tensors' shapes describe, for a target with its `max_model_len`.

    Its own `max_position_embeddings` sets no bound: heads state the length of their training texts (2048), and rotary
    embeddings encode distances. Raises ConfigError naming the key that cannot work.
    """
    flat = _flatten(raw)
    _check_kind(flat, shape_of)
    config = HFConfig(flat, KEYS, IGNORED_KEYS)
    eagle = _read_eagle_config(config)
    bias = config.flag("attention_bias")
    attention = read_attention(config, qkv_bias=bias, out_bias=bias)
    decoder = _build_layers(config, attention, target)
    sizes = _check_sizes(config, shape_of, target)
    aux_layers = read_aux_layers(config, eagle, target.num_layers)
    _check_fc(shape_of, aux_layers, target)
    switches = {name: bool(eagle.get(name) or config.flag(name)) for name in _NORMS}
    return DrafterModel(
        method="eagle3",
        config=decoder,
        aux_layers=aux_layers,
        takes_next=True,
        draft_vocab_size=sizes,
        target_hidden_size=target.hidden_size,
        first_layer=_first_layer(shape_of),
        has_embed=f"{EMBED}.weight" in shape_of,
        has_head=f"{HEAD}.weight" in shape_of,
        maps_vocab=D2T in shape_of,
        norm_before_residual=switches["norm_before_residual"],
        aux_norm=_read_aux_norm(switches),
        norm_output=switches["norm_output"],
    )


def read_aux_layers(config: HFConfig, eagle: Mapping[str, object], num_layers: int) -> tuple[int, ...]:
    """Returns the layers of the target whose inputs the head reads.

    Files count in two ways, which differ by one (SGLang #25454: acceptance 0 with the wrong one). vLLM and speculators
    mean the input of layer i, as the default 2, n // 2, n - 3 does. SpecForge, ModelOpt and SGLang's first heads mean
    its output: they write the ids in `eagle_config`, from 1 on, and their default is the other's less one. So ids are
    outputs if they begin with 1 in `eagle_config`, or are that default anywhere (converted heads); else inputs.
    """
    top, nested = config.get(_IDS) or None, eagle.get(_IDS) or None
    if top is not None and nested is not None and top != nested:
        raise ConfigError(f"{shorten(top)} contradicts {shorten(nested)} in eagle_config", field=_IDS, value=top)
    default = [2, num_layers // 2, num_layers - 3]
    ids = top or nested or default
    if not isinstance(ids, list):
        raise ConfigError(f"must be a list of layers, not {shorten(ids)}", field=_IDS, value=ids)
    layers = [check_integer(_IDS, layer, minimum=0) for layer in ids] if ids is not default else default
    if layers == [layer - 1 for layer in default] or (top is None and nested is not None and layers[0] == 1):
        layers = [layer + 1 for layer in layers]
    if layers != sorted(set(layers)) or layers[0] < 0 or layers[-1] > num_layers:
        given = "the default for heads without the key is" if ids is default else "the file says"
        raise ConfigError(
            f"must be growing layers from 0 to {num_layers} (the target's); {given} {shorten(ids)}",
            field=_IDS,
            value=ids,
        )
    return tuple(layers)


def _flatten(raw: Mapping[str, object]) -> dict[str, object]:
    """Returns the keys of speculators' form, whose layer is an object of its own, in one object."""
    kind = raw.get("speculators_model_type")
    if kind is None and "transformer_layer_config" not in raw:
        return dict(raw)
    if kind != "eagle3":
        raise ConfigError(
            f"{shorten(kind)} is not supported; of speculators' heads only eagle3 is",
            field="speculators_model_type",
            value=kind,
        )
    layer = check_mapping("transformer_layer_config", raw.get("transformer_layer_config"))
    if layer.get("model_type", "llama") != "llama":
        raise ConfigError(
            f"only layers of llama are supported, not {shorten(layer['model_type'])}",
            field="transformer_layer_config.model_type",
            value=layer["model_type"],
        )
    own = {key: value for key, value in raw.items() if key != "transformer_layer_config"}
    return {"norm_before_residual": True, **layer, **own}


def _check_kind(raw: Mapping[str, object], shape_of: Mapping[str, tuple[int, ...]]) -> None:
    """Refuses what is no EAGLE-3 head: by its architecture, then by its tensors."""
    refuse_quantized(raw)
    names = raw.get("architectures")
    name = names[0] if isinstance(names, list) and len(names) == 1 else names
    first = _first_layer(shape_of)
    fc = shape_of.get(f"{FC}.weight")
    is_older = f"{first}.hidden_norm.weight" not in shape_of and fc is not None and fc[-1:] == (2 * fc[0],)
    if is_older or name in ("EAGLEModel", "EagleLlamaForCausalLM", "LlamaForCausalLMEagle"):
        raise ConfigError(
            "this is a head of EAGLE-1 or 2, which reads one state of the target, not of EAGLE-3",
            field="architectures",
            value=names,
        )
    if name is not None and name not in _ARCHITECTURES:
        raise ConfigError(
            f"{shorten(name)} is not an EAGLE-3 head of the form of Llama; known are {', '.join(_ARCHITECTURES)}",
            field="architectures",
            value=names,
        )
    if fc is None or f"{first}.hidden_norm.weight" not in shape_of:
        raise ConfigError(
            f"no EAGLE-3 head: it has no tensors {FC}.weight and midlayer.hidden_norm.weight; for a whole model give "
            'method "draft_model"',
            field="architectures",
            value=names,
        )


def _first_layer(shape_of: Mapping[str, tuple[int, ...]]) -> str:
    return "midlayer" if any(name.startswith("midlayer.") for name in shape_of) else "layers.0"


def _read_eagle_config(config: HFConfig) -> dict[str, object]:
    eagle = config.mapping("eagle_config")
    for key, value in eagle.items():
        if value is None or key == _IDS or (key in _NORMS and isinstance(value, bool)):
            continue
        if key not in _FIXED or value != _FIXED[key]:
            known = f"only {_FIXED[key]} is supported" if key in _FIXED else f"known are {_IDS}, {', '.join(_NORMS)}"
            raise ConfigError(f"{shorten(value)}: {known}", field=f"eagle_config.{key}", value=value)
    return eagle


def _read_aux_norm(switches: Mapping[str, bool]) -> AuxNorm | None:
    if switches["norm_before_fc"] and switches["fc_norm"]:
        raise ConfigError("excludes fc_norm: states are normalised together or each", field="norm_before_fc")
    return "joint" if switches["norm_before_fc"] else "each" if switches["fc_norm"] else None


def _build_layers(config: HFConfig, attention: AttentionConfig, target: DecoderConfig) -> DecoderConfig:
    config.require_off("use_sliding_window")
    num_layers = read_num_layers(config)
    types = config.get("layer_types")
    if types is not None and types != ["full_attention"] * num_layers:
        raise ConfigError(f"only full_attention is supported, not {shorten(types)}", field="layer_types", value=types)
    mlp = read_mlp(config, bias=config.flag("mlp_bias"))
    kind = LayerKind(attention, window=None, rope=_read_rope(config, attention.head_dim, target), mlp=mlp)
    decoder = build_config(config, "llama", layers=(kind,) * num_layers)
    return dataclasses.replace(
        decoder,
        dtype=target.dtype,
        max_model_len=target.max_model_len,
        max_position_embeddings=max(decoder.max_position_embeddings, target.max_model_len),
        embedding=dataclasses.replace(decoder.embedding, tied=False, shard_vocab=target.embedding.shard_vocab),
        eos_token_ids=target.eos_token_ids,
    )


def _read_rope(config: HFConfig, head_dim: int, target: DecoderConfig) -> RopeConfig:
    """Returns the head's rotary embedding, with the target's scaling if the file has none.

    A head without it accepts next to nothing on long texts (speculators #684: length 2.3 at 2k tokens, 1.09 at 16k).
    """
    rope = read_rope(config, head_dim)
    ropes = [kind.rope for kind in target.layers if kind.window is None and kind.rope is not None]
    if rope.scaling is not None or not ropes or ropes[0].scaling is None:
        return rope
    if ropes[0].rotary_dim != rope.rotary_dim:
        _log.warning("the EAGLE-3 head has no rope_scaling, and the target's does not fit it: expect short drafts")
        return rope
    _log.warning("the EAGLE-3 head has no rope_scaling; it gets the target's (%s)", type(ropes[0].scaling).__name__)
    return dataclasses.replace(rope, scaling=ropes[0].scaling)


def _check_sizes(config: HFConfig, shape_of: Mapping[str, tuple[int, ...]], target: DecoderConfig) -> int:
    """Returns the size of the draft vocabulary; refuses a head that was made for another target."""
    vocab_size, hidden_size = config.integer("vocab_size"), config.integer("hidden_size")
    if vocab_size != target.vocab_size:
        raise ConfigError(
            f"{vocab_size} is not the target's, {target.vocab_size}; give a head made for this model",
            field="vocab_size",
            value=vocab_size,
        )
    reads = config.optional_integer("target_hidden_size") or hidden_size
    if reads != target.hidden_size:
        raise ConfigError(
            f"the head reads states of {reads} numbers, the target's have {target.hidden_size}; give one made for it",
            field="hidden_size",
            value=reads,
        )
    draft_vocab_size = config.optional_integer("draft_vocab_size") or vocab_size
    if draft_vocab_size > vocab_size:
        raise ConfigError(f"exceeds vocab_size {vocab_size}", field="draft_vocab_size", value=draft_vocab_size)
    if draft_vocab_size < vocab_size and D2T not in shape_of:
        raise ConfigError(
            f"{draft_vocab_size} of {vocab_size} tokens, but the checkpoint has no tensor {D2T} that says which",
            field="draft_vocab_size",
            value=draft_vocab_size,
        )
    lacks = [name for name in (EMBED, HEAD) if f"{name}.weight" not in shape_of]
    if hidden_size != target.hidden_size and lacks:
        raise ConfigError(
            f"{hidden_size} is not the target's, {target.hidden_size}, so the head needs its own {lacks[0]}",
            field="hidden_size",
            value=hidden_size,
        )
    if draft_vocab_size < vocab_size and HEAD in lacks:
        raise ConfigError(f"the checkpoint has no {HEAD}.weight of this size", field="draft_vocab_size")
    return draft_vocab_size


def _check_fc(shape_of: Mapping[str, tuple[int, ...]], aux_layers: tuple[int, ...], target: DecoderConfig) -> None:
    columns = shape_of[f"{FC}.weight"][-1]
    if columns != len(aux_layers) * target.hidden_size:
        raise ConfigError(
            f"{list(aux_layers)} are {len(aux_layers)} layers of {target.hidden_size} numbers, but {FC}.weight reads "
            f"{columns}",
            field=_IDS,
            value=list(aux_layers),
        )

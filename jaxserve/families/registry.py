"""The model families, and the functions that depend on a model's family."""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Mapping
from typing import Any

from jaxserve.core.layers.attention import KVScales
from jaxserve.core.models.base import (
    CheckpointLayer,
    DecoderConfig,
    Family,
    Parameter,
    ParamSpec,
    Table,
    WeightSource,
)
from jaxserve.core.models.hf_config import QUANTIZATION_KEY, HFConfig
from jaxserve.core.models.matrix_formats import MatrixFormat
from jaxserve.core.models.packing import is_head, pack_table
from jaxserve.core.models.parameters import dense_params, kv_scale_params, trunk_params
from jaxserve.errors import ConfigError, shorten
from jaxserve.families import (
    bert,
    classification,
    cohere,
    cohere2,
    deepseek_v2,
    deepseek_v3,
    distilbert,
    eurobert,
    gemma2,
    gemma3,
    gemma4,
    glm4,
    glm4_moe,
    glm4_moe_lite,
    gpt_neox,
    gpt_oss,
    granite,
    granite_hybrid,
    gte,
    lfm2,
    llama,
    llama_bidirectional,
    mimo,
    minimax_m2,
    mistral,
    mistral4,
    mixtral,
    modernbert,
    nemotron_h,
    nomic_bert,
    olmo,
    olmo2,
    olmo3,
    olmo_hybrid,
    olmoe,
    phi3,
    qwen2,
    qwen2_moe,
    qwen3,
    qwen3_5,
    qwen3_moe,
    qwen3_next,
    qwen3_vl,
    roberta,
    smollm3,
    starcoder2,
)
from jaxserve.families.classification import HEADS
from jaxserve.families.unsupported import describe_kind
from jaxserve.features.quantization.config import read_quantization
from jaxserve.features.quantization.table import EMPTY_BIASES, UNREAD, find_scheme, quantize_table

FAMILIES: dict[str, Family] = {
    family.model_type: family
    for family in (
        llama.FAMILY,
        mistral.FAMILY,
        mistral.MULTIMODAL_FAMILY,
        mistral.PIXTRAL_FAMILY,
        qwen2.FAMILY,
        qwen3.FAMILY,
        gemma2.FAMILY,
        gemma3.FAMILY,
        gemma3.MULTIMODAL_FAMILY,
        gemma4.FAMILY,
        gemma4.MULTIMODAL_FAMILY,
        phi3.FAMILY,
        olmo.FAMILY,
        olmo2.FAMILY,
        olmo3.FAMILY,
        smollm3.FAMILY,
        glm4.FAMILY,
        granite.FAMILY,
        cohere.FAMILY,
        cohere2.FAMILY,
        starcoder2.FAMILY,
        gpt_neox.FAMILY,
        mimo.FAMILY,
        mixtral.FAMILY,
        qwen2_moe.FAMILY,
        qwen3_moe.FAMILY,
        qwen3_next.FAMILY,
        qwen3_5.FAMILY,
        qwen3_5.MULTIMODAL_FAMILY,
        qwen3_5.MOE_FAMILY,
        qwen3_5.MULTIMODAL_MOE_FAMILY,
        qwen3_vl.FAMILY,
        qwen3_vl.MOE_FAMILY,
        lfm2.FAMILY,
        lfm2.MOE_FAMILY,
        granite_hybrid.FAMILY,
        nemotron_h.FAMILY,
        olmo_hybrid.FAMILY,
        olmoe.FAMILY,
        gpt_oss.FAMILY,
        glm4_moe.FAMILY,
        minimax_m2.FAMILY,
        deepseek_v2.FAMILY,
        deepseek_v3.FAMILY,
        deepseek_v3.KIMI_FAMILY,
        glm4_moe_lite.FAMILY,
        mistral4.FAMILY,
        bert.FAMILY,
        roberta.FAMILY,
        roberta.XLM_FAMILY,
        distilbert.FAMILY,
        modernbert.FAMILY,
        nomic_bert.FAMILY,
        gte.FAMILY,
        gte.NEW_FAMILY,
        eurobert.FAMILY,
        llama_bidirectional.FAMILY,
    )
}


# A checkpoint's names for the scales of 8-bit keys and values, below a layer's own.
KV_SCALE_NAMES = ("self_attn.{part}_scale", "self_attn.{part}_proj.{part}_scale")


def find_kv_scales(config: DecoderConfig, shape_of: Mapping[str, tuple[int, ...]]) -> KVScales | None:
    """Returns the scales of 8-bit keys and values in a checkpoint with these tensor shapes, None if it has none."""
    prefix = f"{FAMILIES[config.family].trunk.layers}.{next((group.layers[0] for group in config.kv_groups), 0)}"
    for name in KV_SCALE_NAMES:
        shape = shape_of.get(f"{prefix}.{name.format(part='k')}")
        if shape is not None:
            return KVScales(name, shape)
    return None


def parse_config(hf_config: Mapping[str, object]) -> DecoderConfig:
    """Returns the model that a config.json describes, for sequences up to its trained length.

    Raises ConfigError, naming the key, for an unknown architecture, a key that is neither known nor harmless, and a
    value that is malformed or not supported.
    """
    family, architectures = find_family(hf_config), hf_config.get("architectures")
    heads = HEADS.get(family.model_type, ())
    head = next((head for head in heads if architectures == [head.architecture]), None)
    ignored = (*family.ignored_keys, QUANTIZATION_KEY, *(classification.KEYS if head else ()))
    config = family.parse(HFConfig(hf_config, family.keys, ignored))
    is_headless = architectures in [[name] for name in family.headless] or head is not None
    config = dataclasses.replace(
        config,
        quantization=read_quantization(hf_config, own=family.quantizations),
        only_pools=config.only_pools or is_headless,
    )
    return dataclasses.replace(config, pooler=classification.read_pooler(hf_config, config, head)) if head else config


def find_family(hf_config: Mapping[str, object]) -> Family:
    """Returns the family of a config.json, by its model type and architecture alone.

    Raises ConfigError for an architecture that is not served, and for a quantization that is not read.
    """
    if not isinstance(hf_config, Mapping):
        raise ConfigError(f"must be a JSON object, not {shorten(hf_config)}", field="config.json", value=hf_config)
    model_type, architectures = hf_config.get("model_type"), hf_config.get("architectures")
    if model_type is None:
        found = [family for family in FAMILIES.values() if architectures in _list_architectures(family)]
        known = {family.architecture: family.model_type for family in FAMILIES.values()}
    else:
        found = [family for family in FAMILIES.values() if family.model_type == model_type]
        known = {family.model_type: family.model_type for family in FAMILIES.values()}
    if not found:
        field, value = ("architectures", architectures) if model_type is None else ("model_type", model_type)
        raise _unsupported(hf_config, field, value, known)
    if architectures and architectures not in _list_architectures(found[0]):
        of_type = {name: name for (name,) in _list_architectures(found[0])}
        raise _unsupported(hf_config, "architectures", architectures, of_type)
    read_quantization(hf_config, own=found[0].quantizations)
    return found[0]


def _list_architectures(family: Family) -> list[list[str]]:
    """Returns the values of `architectures` that are read as a family."""
    classifiers = (head.architecture for head in HEADS.get(family.model_type, ()))
    return [[name] for name in (family.architecture, *family.headless, *classifiers)]


def _unsupported(hf_config: Mapping[str, object], field: str, value: object, known: dict[str, str]) -> ConfigError:
    """Returns the error for a value beside the `known` ones, each with the short name that the message lists."""
    kind = describe_kind(hf_config)
    name = value[0] if isinstance(value, list) and value else value
    nearest = difflib.get_close_matches(str(name)[:100], known, n=1) if len(known) > 1 else []
    message = f"{shorten(value)} is not supported{f' ({kind})' if kind else ''}; known are {', '.join(known.values())}"
    message += f", of which {known[nearest[0]]} is the nearest" if nearest else ""
    message += "; the code that its auto_map names is never run" if hf_config.get("auto_map") else ""
    return ConfigError(message, field=field, value=value)


def list_params(config: DecoderConfig) -> Table:
    """Returns all parameters of a model by dotted path ("layers.0.qkv.weight")."""
    family = FAMILIES[config.family]
    table = trunk_params(config, family.trunk)
    for index in range(config.num_layers):
        layer = CheckpointLayer(config, index, f"{family.trunk.layers}.{index}")
        params = family.table(layer) | kv_scale_params(layer)
        table |= {f"layers.{index}.{name}": parameter for name, parameter in params.items()}
    table = table if config.quantization is None else quantize_table(table, config.quantization)
    table = pack_table(config, table) if config.packed else table
    table |= dense_params(config)
    if family.headless:
        around = f"{family.trunk.embed.partition('.')[0]}."
        table = {name: _allow_bare(parameter, around) for name, parameter in table.items()}
    return table


def _allow_bare(parameter: Parameter, around: str) -> Parameter:
    """Returns a parameter whose tensors may have names without the module around all."""
    source = parameter.source
    return dataclasses.replace(parameter, source=_add_form(source, _strip(source, around)))


def _strip(source: WeightSource, around: str) -> WeightSource:
    other = None if source.otherwise is None else _strip(source.otherwise, around)
    names = tuple(name.removeprefix(around) for name in source.names)
    return dataclasses.replace(source, names=names, otherwise=other)


def _add_form(source: WeightSource, form: WeightSource) -> WeightSource:
    other = form if source.otherwise is None else _add_form(source.otherwise, form)
    return dataclasses.replace(source, otherwise=other)


def list_schemes(config: DecoderConfig) -> dict[str, tuple[ParamSpec, MatrixFormat]]:
    """Returns the matrices that are quantized while they are read, as files have them, and their formats."""
    quantization = config.quantization
    if quantization is None or not quantization.while_loading:
        return {}
    table = list_params(describe_files(config))
    found = ((name, each.spec, find_scheme(name, each, quantization)) for name, each in table.items())
    return {name: (spec, form) for name, spec, form in found if form is not None}


def list_packed(config: DecoderConfig) -> dict[str, tuple[ParamSpec, bool]]:
    """Returns the matrices that are packed while they are read, as files have them, and whether each is [out, in]."""
    if not config.packed:
        return {}
    table, packed = list_params(dataclasses.replace(config, packed=False)), list_params(config)
    found = {name: parameter.spec for name, parameter in table.items() if name not in packed}
    return {name: (spec, is_head(config, name)) for name, spec in found.items()}


def describe_files(config: DecoderConfig) -> DecoderConfig:
    """Returns the config whose parameters are those of the model's files."""
    config = dataclasses.replace(config, packed=False)
    made = config.quantization is not None and config.quantization.while_loading
    return dataclasses.replace(config, quantization=None) if made else config


def param_specs(config: DecoderConfig) -> dict[str, Any]:
    """Returns the canonical tree of ParamSpec: `embed`, `layers` (one dict per layer), `final_norm`, and `lm_head`."""
    return spec_tree(list_params(config), config.num_layers)


def spec_tree(table: Table, num_layers: int) -> dict[str, Any]:
    """Returns the canonical tree of ParamSpec of a table of parameters by dotted path."""
    tree: dict[str, Any] = {"layers": [{} for _ in range(num_layers)]}
    for name, parameter in table.items():
        *path, last = name.split(".")
        node = tree
        for key in path:
            node = node[int(key)] if isinstance(node, list) else node.setdefault(key, {})
        node[last] = parameter.spec
    return tree


def weight_sources(config: DecoderConfig) -> dict[str, WeightSource]:
    """Returns the checkpoint's source of each parameter, by its dotted path in `param_specs`."""
    return {name: parameter.source for name, parameter in list_params(config).items()}


def ignored_weights(config: DecoderConfig) -> tuple[str, ...]:
    """Returns patterns, to be matched in full, of tensors that a checkpoint may hold and the model does not need.

    These are rotary frequencies (old files), the parts of a multimodal model around its decoder, a stored copy of a
    tied head, and the scales of 8-bit keys and values if pages have more bits; those of values if these are latents.
    Biases are among them where GPTQ's files may have some of zeros: loading tells them from others, as it does a head
    that is no copy (`WeightSource.copy`).
    """
    family = FAMILIES[config.family]
    own = (
        re.sub(r"\{num_layers\+?(\d*)\}", lambda more: str(config.num_layers + int(more[1] or 0)), pattern)
        for pattern in family.ignored_weights
    )
    patterns = (r".*\.rotary_emb\.inv_freq", *own)
    if config.quantization is not None:
        patterns += UNREAD + (EMPTY_BIASES if config.quantization.has_empty_biases else ())
    attention = config.attentions[0]
    unread = "kv" if attention.kv_scales is None else "" if attention.latent is None else "v"
    if unread:
        patterns += tuple(rf".*\.{re.escape(name).replace(r'\{part\}', f'[{unread}]')}" for name in KV_SCALE_NAMES)
    if not config.pooler.denses:
        patterns += (r".*/.*",)  # of a pooler that is not used
    has_own_head = config.generates and not config.embedding.tied
    return patterns if has_own_head else (*patterns, rf"{re.escape(family.trunk.head)}\.weight")

"""Qwen 3.5, 3.6 and 3.8, dense and with experts: Qwen3-Next's layers with projections that are stored one by one.

Of checkpoints that read images ("qwen3_5", "qwen3_5_moe") this is the language model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from jaxserve.core.models.base import DecoderConfig, Family
from jaxserve.core.models.blocks import hybrid_layer
from jaxserve.core.models.common import omit, read_mlp
from jaxserve.core.models.delta_parameters import JOINED
from jaxserve.core.models.hf_config import HFConfig
from jaxserve.core.models.moe_config import COUNT_KEYS, TRAINING_KEYS, read_count, read_experts
from jaxserve.families import qwen3_next, qwen3_vl
from jaxserve.families.multimodal import serve_as_text
from jaxserve.families.qwen3_next import HYBRID_KEYS, build_hybrid, read_hybrid_layers

KEYS = HYBRID_KEYS | {"num_key_value_heads": 4}
MOE_KEYS = (
    omit(HYBRID_KEYS, "intermediate_size")
    | COUNT_KEYS
    | {"num_experts_per_tok": 8, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512}
)

_PREDICTION_KEYS = ("mtp_num_hidden_layers", "mtp_use_dedicated_embeddings")
_IGNORED_KEYS = (*_PREDICTION_KEYS, *TRAINING_KEYS)
_MOE_IGNORED_KEYS = (*_IGNORED_KEYS, "intermediate_size", "mlp_only_layers", "decoder_sparse_step", "norm_topk_prob")


def parse(config: HFConfig) -> DecoderConfig:
    """Reads the config.json of a dense text model."""
    return build_hybrid(config, "qwen3_5_text", read_hybrid_layers(config, read_mlp(config)))


def parse_moe(config: HFConfig) -> DecoderConfig:
    """Reads the config.json of a text model with experts, which every layer has."""
    moe = read_experts(
        config,
        read_count(config, 256),
        normalize=True,
        shared_size=config.integer("shared_expert_intermediate_size"),
        gated_shared=True,
    )
    return build_hybrid(config, "qwen3_5_moe_text", read_hybrid_layers(config, moe))


def _make_families(
    name: str,
    architecture: str,
    keys: Mapping[str, object],
    ignored_keys: tuple[str, ...],
    parse: Callable[[HFConfig], DecoderConfig],
) -> tuple[Family, Family]:
    """Returns the families of text checkpoints and of multimodal ones."""
    text = Family(
        f"{name}_text",
        f"{architecture}ForCausalLM",
        keys,
        parse,
        hybrid_layer,
        partial(qwen3_next.list_layer_params, modules=JOINED),
        ignored_keys=ignored_keys,
        ignored_weights=(r"mtp\..*",),
    )
    return text, serve_as_text(
        text,
        name,
        f"{architecture}ForConditionalGeneration",
        ignored_keys=qwen3_vl.VISION_KEYS,
        towers=qwen3_vl.TOWERS,
    )


FAMILY, MULTIMODAL_FAMILY = _make_families("qwen3_5", "Qwen3_5", KEYS, _IGNORED_KEYS, parse)
MOE_FAMILY, MULTIMODAL_MOE_FAMILY = _make_families("qwen3_5_moe", "Qwen3_5Moe", MOE_KEYS, _MOE_IGNORED_KEYS, parse_moe)

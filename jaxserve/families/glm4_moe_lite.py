"""GLM-4.7-Flash: DeepSeek-V3's layers, with `mlp_layer_types` to say which have experts."""

from __future__ import annotations

from jaxserve.core.models.base import DecoderConfig, Family
from jaxserve.core.models.blocks import latent_layer
from jaxserve.core.models.common import read_num_layers
from jaxserve.core.models.hf_config import HFConfig
from jaxserve.core.models.moe_config import read_dense_first
from jaxserve.errors import ConfigError, shorten
from jaxserve.families import deepseek_v3

_KINDS = ("dense", "sparse")

KEYS = deepseek_v3.KEYS | {
    "max_position_embeddings": 202752,
    "rms_norm_eps": 1e-5,
    "q_lora_rank": 768,
    "qk_nope_head_dim": 192,
    "v_head_dim": 256,
    "n_routed_experts": 64,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 1536,
    "routed_scaling_factor": 1.8,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "mlp_layer_types": None,
}


def parse(config: HFConfig) -> DecoderConfig:
    """Reads a GLM-4.7-Flash config.json."""
    mixture = deepseek_v3.read_mixture(config)
    return deepseek_v3.build_decoder(config, "glm4_moe_lite", _read_sparse(config), mixture)


def _read_sparse(config: HFConfig) -> list[bool]:
    """Returns whether each layer has experts, by `mlp_layer_types` if the file has it."""
    types, num_layers = config.get("mlp_layer_types"), read_num_layers(config)
    if types is None:
        return read_dense_first(config, num_layers)
    if not isinstance(types, list) or len(types) != num_layers or not all(kind in _KINDS for kind in types):
        message = f"must be {num_layers} entries of dense or sparse, not {shorten(types)}"
        raise ConfigError(message, field="mlp_layer_types", value=types)
    return [kind == "sparse" for kind in types]


FAMILY = Family(
    "glm4_moe_lite",
    "Glm4MoeLiteForCausalLM",
    KEYS,
    parse,
    latent_layer,
    deepseek_v3.list_layer_params,
    ignored_keys=deepseek_v3.FAMILY.ignored_keys,
    ignored_weights=deepseek_v3.FAMILY.ignored_weights,
)

"""Reads what config.json says about a mixture of experts."""

from __future__ import annotations

import dataclasses
from typing import Any

from jaxserve.core.layers.moe import MoEConfig
from jaxserve.core.layers.router import ExpertGroups, RouterConfig
from jaxserve.core.models.base import LayerKind
from jaxserve.core.models.common import read_mlp
from jaxserve.core.models.hf_config import HFConfig
from jaxserve.errors import ConfigError, shorten

MAX_EXPERTS = 4096  # bounds the table of a mistyped number

COUNT_KEYS: dict[str, object] = {"num_experts": None, "num_local_experts": None}
"""Two names for the number of experts: transformers 5 writes another than it reads."""

ROUTED_KEYS: dict[str, object] = {
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
}
"""Keys of DeepSeek-V3's mixture, which other families share; its sizes are `n_routed_experts` and so on."""

# Keys that matter in training only.
TRAINING_KEYS = (
    "aux_loss_alpha",
    "ep_size",
    "num_mtp_layers",
    "output_router_logits",
    "router_aux_loss_coef",
    "router_jitter_noise",
    "seq_aux",
)


def read_experts(
    config: HFConfig,
    count: int,
    *,
    size_key: str = "moe_intermediate_size",
    shared_size: int = 0,
    gated_shared: bool = False,
    gated: bool = True,
    **router: Any,
) -> MoEConfig:
    """Returns the mixture of experts.

    Args:
        count: the number of experts.
        size_key: the key of an expert's columns.
        shared_size: columns of the block that every token goes through, 0 for none.
        gated_shared: whether that block has a gate.
        gated: whether experts and that block have gates inside.
        router: fields of RouterConfig.
    """
    top_k = config.integer("num_experts_per_tok")
    if top_k > count:
        raise ConfigError(f"{top_k} of {count} experts is not possible", field="num_experts_per_tok", value=top_k)
    expert = read_mlp(config, size_key=size_key, gated=gated)
    if expert.learned:
        message = "has parameters of its own, which experts do not have"
        raise ConfigError(message, field="hidden_act", value=expert.activation)
    return MoEConfig(
        router=RouterConfig(count, top_k, **router),
        expert=expert,
        shared=dataclasses.replace(expert, intermediate_size=shared_size) if shared_size else None,
        gated_shared=gated_shared,
    )


def read_routed_experts(config: HFConfig, *, judges: int = 2, **router: Any) -> MoEConfig:
    """Returns DeepSeek's mixture, in groups if there are several; as in V3 unless `router` has other fields.

    Args:
        judges: the best scores whose sum judges a group; 0 where there are no groups, whatever the file says.
    """
    count = config.integer("n_routed_experts", maximum=MAX_EXPERTS)
    fields = {"scoring": "sigmoid", "correction": True, "normalize": config.flag("norm_topk_prob")} | router
    return read_experts(
        config,
        count,
        shared_size=config.integer("n_shared_experts", minimum=0) * config.integer("moe_intermediate_size"),
        scale=config.number("routed_scaling_factor"),
        groups=_read_groups(config, count, judges) if judges else None,
        **fields,
    )


def read_dense_first(config: HFConfig, num_layers: int) -> list[bool]:
    """Returns whether each layer has experts: all behind the first `first_k_dense_replace`."""
    num_dense = config.integer("first_k_dense_replace", minimum=0)
    return [index >= num_dense for index in range(num_layers)]


def _read_groups(config: HFConfig, num_experts: int, judges: int) -> ExpertGroups | None:
    count, chosen = config.integer("n_group"), config.integer("topk_group")
    if chosen > count:
        raise ConfigError(f"{chosen} of {count} groups is not possible", field="topk_group", value=chosen)
    if num_experts % count or num_experts // count < judges:
        message = f"{num_experts} experts cannot be in {count} equal groups of at least {judges}"
        raise ConfigError(message, field="n_group", value=count)
    room = chosen * (num_experts // count)
    if config.integer("num_experts_per_tok") > room:
        message = f"{chosen} groups have only {room} experts"
        raise ConfigError(message, field="num_experts_per_tok", value=config.integer("num_experts_per_tok"))
    return ExpertGroups(count, chosen, judges) if chosen < count else None


def read_count(config: HFConfig, default: int) -> int:
    """Returns the number of experts, `default` where the file states none."""
    given = {key: config.integer(key, maximum=MAX_EXPERTS) for key in COUNT_KEYS if config.get(key) is not None}
    if len(set(given.values())) > 1:
        raise ConfigError(
            f"is not num_experts, {given['num_experts']}", field="num_local_experts", value=given["num_local_experts"]
        )
    return next(iter(given.values()), default)


def read_sparse_layers(config: HFConfig, num_layers: int) -> list[bool]:
    """Returns whether each layer has experts, by `decoder_sparse_step` and `mlp_only_layers`."""
    step, dense = config.integer("decoder_sparse_step"), config.get("mlp_only_layers") or []
    if not isinstance(dense, list) or any(type(index) is not int for index in dense):
        raise ConfigError(f"must be a list of layers, not {shorten(dense)}", field="mlp_only_layers", value=dense)
    return [(index + 1) % step == 0 and index not in dense for index in range(num_layers)]


def give_experts(layers: tuple[LayerKind, ...], sparse: list[bool], moe: MoEConfig) -> tuple[LayerKind, ...]:
    """Returns the layers, where those that `sparse` names have experts."""
    return tuple(
        dataclasses.replace(kind, mlp=moe) if has_experts else kind
        for kind, has_experts in zip(layers, sparse, strict=True)
    )

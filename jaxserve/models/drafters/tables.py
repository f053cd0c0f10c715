"""The parameters of a drafter, as `registry.py` has those of a model."""

from __future__ import annotations

import re
from typing import Any

from jaxserve.models import registry
from jaxserve.models.base import ParamSpec, Table, WeightSource
from jaxserve.models.drafters.base import DrafterModel
from jaxserve.models.drafters.eagle3 import D2T, T2D, list_head_params
from jaxserve.models.drafters.mtp import list_mtp_params

# Tensors that speculators stores for training: the target's own norm and head.
_TRAINING = (r"verifier_norm\..*", r"verifier_lm_head\..*", r".*\.rotary_emb\.inv_freq")


def list_drafter_params(model: DrafterModel) -> Table:
    """Returns all parameters that are read as they are by dotted path; `d2t` is not among them."""
    if model.method == "draft_model":
        return registry.list_params(model.config)
    return list_head_params(model) if model.method == "eagle3" else list_mtp_params(model)


def drafter_param_specs(model: DrafterModel) -> dict[str, Any]:
    """Returns the canonical tree of ParamSpec, with `d2t.weight` int32 [Vd] if the head maps its vocabulary."""
    tree = registry.spec_tree(list_drafter_params(model), model.config.num_layers)
    if model.maps_vocab:
        tree["d2t"] = {"weight": ParamSpec((model.draft_vocab_size,), "int32", (None,), "zeros")}
    return tree


def drafter_weight_sources(model: DrafterModel) -> dict[str, WeightSource]:
    """Returns the source of each parameter but `d2t` by its dotted path."""
    return {name: parameter.source for name, parameter in list_drafter_params(model).items()}


def ignored_drafter_weights(model: DrafterModel) -> tuple[str, ...]:
    """Returns patterns of tensors that a checkpoint of the drafter may hold and that are not parameters.

    Of MiMo's checkpoint these are all tensors outside the layer; of a head `d2t` and `t2d`, which are read apart.
    """
    if model.method == "draft_model":
        return registry.ignored_weights(model.config)
    if model.method == "mtp":
        return (rf"(?!{re.escape(model.first_layer)}\.).*",)
    return (*_TRAINING, D2T, T2D)

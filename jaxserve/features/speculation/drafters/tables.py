"""The parameters of a drafter, as `registry.py` has those of a model."""

from __future__ import annotations

from typing import Any

from jaxserve.core.models.base import ParamSpec, Table, WeightSource
from jaxserve.families import registry
from jaxserve.features.speculation.drafters.base import DrafterModel
from jaxserve.features.speculation.drafters.kinds import KINDS


def list_drafter_params(model: DrafterModel) -> Table:
    """Returns all parameters that are read as they are by dotted path; `d2t` is not among them."""
    kind = KINDS.get(model.method)
    return registry.list_params(model.config) if kind is None else kind.list_params(model)


def drafter_param_specs(model: DrafterModel) -> dict[str, Any]:
    """Returns the canonical tree of ParamSpec, with `d2t.weight` int32 [Vd] if the drafter maps its vocabulary."""
    tree = registry.spec_tree(list_drafter_params(model), model.config.num_layers)
    if model.maps_vocab:
        tree["d2t"] = {"weight": ParamSpec((model.draft_vocab_size,), "int32", (None,), "zeros")}
    return tree


def drafter_weight_sources(model: DrafterModel) -> dict[str, WeightSource]:
    """Returns the source of each parameter but `d2t` by its dotted path."""
    return {name: parameter.source for name, parameter in list_drafter_params(model).items()}


def ignored_drafter_weights(model: DrafterModel) -> tuple[str, ...]:
    """Returns patterns of tensors that a checkpoint of the drafter may hold and that are not parameters."""
    kind = KINDS.get(model.method)
    return registry.ignored_weights(model.config) if kind is None else kind.ignored(model)

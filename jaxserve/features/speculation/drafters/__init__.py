"""Drafters with weights: their descriptions, parameters and passes."""

from jaxserve.features.speculation.drafters.base import DrafterModel, expand_drafter_heads, match_groups
from jaxserve.features.speculation.drafters.tables import drafter_param_specs

__all__ = [
    "DrafterModel",
    "drafter_param_specs",
    "expand_drafter_heads",
    "match_groups",
]

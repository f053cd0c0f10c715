"""Drafters with weights: what they are, what they compute, and their parameters."""

from jaxserve.features.speculation.drafters.base import DrafterModel, expand_drafter_heads, match_groups
from jaxserve.features.speculation.drafters.passes import (
    draft_logits,
    expand_logits,
    map_drafts,
    read_target,
    run_pass,
)
from jaxserve.features.speculation.drafters.tables import drafter_param_specs

__all__ = [
    "DrafterModel",
    "draft_logits",
    "drafter_param_specs",
    "expand_drafter_heads",
    "expand_logits",
    "map_drafts",
    "match_groups",
    "read_target",
    "run_pass",
]

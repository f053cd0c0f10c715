"""The kinds of drafters that read the target's states, and what each adds to the passes and parameters of all."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
from jaxtyping import Array, Float

from jaxserve.core.layers.context import LayerContext
from jaxserve.core.models.base import Leaves, Stream, Table
from jaxserve.features.speculation.drafters.base import DrafterModel
from jaxserve.features.speculation.drafters.eagle3 import (
    D2T,
    T2D,
    combine_states,
    finish_states,
    list_head_params,
    normalize_states,
    run_head_layer,
)
from jaxserve.features.speculation.drafters.mtp import list_mtp_params, run_mtp_layer

# A function of a drafter's own parameters and of states [T, D] before a pass, after it, or before the logits.
MapStates = Callable[[DrafterModel, Mapping[str, Any], Float[Array, "T D"]], Float[Array, "T E"]]

# Tensors that speculators stores for training: the target's own norm and head.
_TRAINING = (r"verifier_norm\..*", r"verifier_lm_head\..*", r".*\.rotary_emb\.inv_freq")


def _keep(model: DrafterModel, params: Mapping[str, Any], states: Float[Array, "T D"]) -> Float[Array, "T D"]:
    del model, params
    return states


@dataclass(frozen=True)
class DrafterKind:
    """One kind of drafter. A draft model is none: it is a decoder of its own, which reads nothing of the target.

    `run_layer` takes the layer's index and leaves, the embeddings [T, D] and the states [T, D], and returns the states
    after it, and the pool. `ignored` are patterns of tensors beside the parameters in a checkpoint.
    """

    run_layer: Callable[[DrafterModel, int, Leaves, Stream, Stream, LayerContext], tuple[Stream, jax.Array]]
    list_params: Callable[[DrafterModel], Table]
    ignored: Callable[[DrafterModel], tuple[str, ...]]
    read_target: MapStates = _keep  # what the target's layers have captured -> the first states
    finish: MapStates = _keep  # a pass's states -> those that the next pass reads
    normalize: MapStates = _keep  # those -> what the LM head is applied to


KINDS: Mapping[str, DrafterKind] = {
    "eagle3": DrafterKind(
        run_head_layer,
        list_head_params,
        lambda model: (*_TRAINING, D2T, T2D),  # the last two are read apart
        read_target=combine_states,
        finish=finish_states,
        normalize=normalize_states,
    ),
    "mtp": DrafterKind(
        run_mtp_layer,
        list_mtp_params,
        lambda model: (rf"(?!{re.escape(model.first_layer)}\.).*",),  # all of the target's
    ),
}

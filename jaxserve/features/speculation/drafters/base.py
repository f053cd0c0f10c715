"""A drafter with weights, as data."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal

from jaxserve.core.models.base import DecoderConfig
from jaxserve.core.models.decoder import fit_devices
from jaxserve.errors import ConfigError

Method = Literal["eagle3", "mtp", "draft_model"]
AuxNorm = Literal["joint", "each"]

FIELD = "speculative_config.model"  # what errors about a drafter's files name


@dataclass(frozen=True)
class DrafterModel:
    """What drafts: static and hashable, like the DecoderConfig of the target.

    `config` has the drafter's own layers. `aux_layers` are layers of the target whose inputs the drafter reads, in
    ascending order (the number of layers means the output of the last); none for a draft model. With `takes_next` the
    token that goes with position p is the one at p + 1, and the output predicts the one at p + 2; without, the token
    is the one at p and the output predicts the one at p + 1. `first_layer` is a head's first layer in a checkpoint.

    The rest concerns EAGLE-3 heads alone. Their logits have `draft_vocab_size` entries, those of the target's
    vocabulary unless `maps_vocab`. Beside the published form (Li et al. 2025, arXiv 2503.01840) there are those of vLLM
    and speculators: the residual of the first layer is its normalised input (`norm_before_residual`); the target's
    states are normalised together or each before `fc` (`aux_norm`); states are fed back after the final norm
    (`norm_output`, EAGLE-3.1).
    """

    method: Method
    config: DecoderConfig
    aux_layers: tuple[int, ...]
    takes_next: bool
    draft_vocab_size: int
    target_hidden_size: int
    first_layer: str = ""
    has_embed: bool = False  # an embedding of its own; else the target's
    has_head: bool = False  # a head of its own; else the target's
    maps_vocab: bool = False
    norm_before_residual: bool = False
    aux_norm: AuxNorm | None = None
    norm_output: bool = False
    shard_draft_vocab: bool = True  # off if the draft vocabulary does not divide by the mesh

    @property
    def hidden_size(self) -> int:
        """D, of the drafter's states."""
        return self.config.hidden_size

    def count_ahead(self, num_drafts: int) -> int:
        """Returns the positions behind a row's computed tokens at which `num_drafts` drafts are computed.

        A head begins at the last computed token, a draft model at the token that was sampled after it.
        """
        return max(num_drafts - 1, 0) if self.takes_next else num_drafts


def expand_drafter_heads(model: DrafterModel, tensor_parallel_size: int) -> DrafterModel:
    """Returns the drafter for a mesh of this size, as `fit_devices` does for a model.

    Raises ConfigError (field "speculative_config.model") if its heads or feed-forward columns do not divide.
    """
    try:
        config = fit_devices(model.config, tensor_parallel_size)
    except ConfigError as error:
        raise ConfigError(f"the drafter and {error}", field=FIELD, value=tensor_parallel_size) from error
    divides = model.draft_vocab_size % tensor_parallel_size == 0
    return dataclasses.replace(model, config=config, shard_draft_vocab=divides)


def match_groups(model: DrafterModel, target: DecoderConfig) -> tuple[int, ...]:
    """Returns, per KV group of the drafter, the target's KV group with the same window, whose page table it reads.

    Both configs have their `max_model_len`. Raises ConfigError (field "speculative_config.model") if a layer of the
    drafter sees more or less than every group of the target: pages would be given back that it still reads.
    """
    windows = [group.window for group in target.kv_groups]
    for group in model.config.kv_groups:
        if group.window not in windows:
            raise ConfigError(
                f"layer {group.layers[0]} of the drafter sees {_describe(group.window)}, but the pages of this model "
                f"are kept for layers that see {' or '.join(map(_describe, windows))}; give a drafter whose layers "
                "see the same, or a max_model_len within the windows",
                field=FIELD,
                value=group.window,
            )
    return tuple(windows.index(group.window) for group in model.config.kv_groups)


def _describe(window: int | None) -> str:
    return "all tokens" if window is None else f"the last {window} tokens"

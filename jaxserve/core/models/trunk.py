"""The names of the modules around a model's layers in its checkpoint."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass


@dataclass(frozen=True)
class Trunk:
    """A checkpoint's names of the modules around the layers; layer i is `{layers}.{i}`."""

    embed: str = "model.embed_tokens"
    layers: str = "model.layers"
    final_norm: str = "model.norm"
    head: str = "lm_head"
    embed_norm: str | None = None  # of encoders; None: LayerNorm beside the table of tokens

    def below(self, module: str) -> Trunk:
        """Returns the same names below another module."""
        return Trunk(*(name and f"{module}.{name}" for name in dataclasses.astuple(self)))


DEFAULT_TRUNK = Trunk()

"""The static arguments that the programs of a step share."""

from __future__ import annotations

from dataclasses import dataclass

from jax.sharding import Mesh

from jaxserve.core.models.base import DecoderConfig
from jaxserve.core.models.decoder import CacheLayout
from jaxserve.core.runtime.feature import StepFeature
from jaxserve.logits_processor import LogitsProcessor
from pallas_kernels.spec import AttnShape


@dataclass(frozen=True)
class StepModel:
    """The static arguments of a step: the model, where its pages lie, the devices, the kernels, and the features."""

    config: DecoderConfig
    layout: CacheLayout
    shapes: tuple[AttnShape, ...]  # per KV group, on one device
    mesh: Mesh | None  # None on a single device
    impl: str
    processor: LogitsProcessor | None = None
    features: tuple[StepFeature, ...] = ()
    generates: bool = True  # see `Sizes.generates`

    @property
    def pools_rows(self) -> bool:
        """Whether `forward` hands on what the rows were pooled to, and not hidden states."""
        return not (self.generates or self.config.pooler.by_token)

    @property
    def aux_layers(self) -> tuple[int, ...]:
        """The layers whose inputs a feature reads."""
        return tuple(layer for feature in self.features for layer in feature.aux_layers)

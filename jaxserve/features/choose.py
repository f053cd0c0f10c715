"""The choice of an engine's features, by its options."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from jaxserve.config import EngineConfig
from jaxserve.core.models.base import DecoderConfig, LayerKind
from jaxserve.core.models.tower import MutualLayers, TowerConfig
from jaxserve.core.runtime.feature import StepFeature
from jaxserve.core.runtime.shapes import Shapes
from jaxserve.core.runtime.sizes import Sizes, make_sizes
from jaxserve.errors import ConfigError
from jaxserve.features.host_tier.feature import HostTier
from jaxserve.features.images.feature import make_images
from jaxserve.features.lora.feature import Lora, choose_counts, make_lora
from jaxserve.features.lora.store import AdapterStore
from jaxserve.features.speculation import LOOKUP_METHODS, make_lookup_drafter
from jaxserve.features.speculation.drafter import Drafter
from jaxserve.features.speculation.drafters import DrafterModel
from jaxserve.features.speculation.lookups import Lookups


def make_shapes(
    config: EngineConfig,
    model: DecoderConfig,
    platform: str,
    device_kind: str,
    drafter: DrafterModel | None = None,
    tower: TowerConfig | None = None,
) -> Shapes:
    """Returns all static sizes of an engine, with its features.

    Args:
        model: expanded for the devices, with its final `max_model_len`.
        drafter: expanded, too, if speculative_config names one with weights.
        tower: fitted to the devices, if the model reads images.

    Raises:
        ConfigError: the options do not fit together or the attention implementation cannot run here.
    """
    sizes = make_sizes(config, model, platform, device_kind)
    if config.lora.enable_lora:
        lora, deterministic = config.lora, config.scheduler.deterministic
        counts = choose_counts(lora.max_loras, lora.max_lora_rank, deterministic=deterministic)
        sizes = replace(sizes, buckets=sizes.buckets.with_adapters(counts))
    if tower is not None:
        has_positions = any(kind.rope is not None and kind.rope.sections is not None for kind in model.layers)
        sizes = replace(sizes, state=replace(sizes.state, has_image_positions=has_positions))
        sizes = replace(sizes, model=_join_images(sizes.model, tower.mutual))
    return Shapes.join(sizes, tuple(_list_features(sizes, drafter, tower)))


def _join_images(model: DecoderConfig, mutual: MutualLayers | None) -> DecoderConfig:
    """Returns the model in whose `mutual` layers the tokens of an image see each other."""
    if mutual is None:
        return model

    def join(kind: LayerKind) -> LayerKind:
        if mutual == "windowed" and kind.window is None:
            return kind
        return replace(kind, mixer=replace(kind.attention, mutual_images=True))

    return replace(model, layers=tuple(map(join, model.layers)))


def find_adapters(shapes: Shapes) -> AdapterStore | None:
    """Returns the adapters of an engine on the host; None without `enable_lora`."""
    return next((feature.store for feature in shapes.features if isinstance(feature, Lora)), None)


def _list_features(sizes: Sizes, drafter: DrafterModel | None, tower: TowerConfig | None) -> Iterator[StepFeature]:
    chosen, size = sizes.config.speculation.speculative_config, sizes.config.cache.kv_offloading_size
    most_rows = max((rows for rows, _ in sizes.buckets.verify_sizes), default=1)
    if chosen is not None and chosen.method in LOOKUP_METHODS:
        yield Lookups(make_lookup_drafter(chosen, in_library=sizes.calls_library), most_rows)
    elif chosen is not None and drafter is not None:
        if size is not None:
            message = "the host tier keeps no pages of a drafter with weights; leave one of the two out"
            raise ConfigError(message, field="kv_offloading_size", value=size)
        hidden = sizes.model.hidden_size, sizes.model.dtype
        draws = chosen.draft_sample_method == "probabilistic"
        yield Drafter(drafter, draws, sizes.state.max_drafts, most_rows, hidden)
    if size is not None:
        yield HostTier(size, len(sizes.model.kv_groups))
    if sizes.config.lora.enable_lora:
        yield make_lora(sizes)
    if tower is not None:
        yield make_images(sizes, tower)

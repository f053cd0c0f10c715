"""The static sizes, choices and features of an engine."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from jaxserve.core.pages.manager import CHUNK_EDGE
from jaxserve.core.runtime.feature import StepFeature
from jaxserve.core.runtime.memory import AttachedPages
from jaxserve.core.runtime.sizes import Sizes
from jaxserve.core.scheduler import SchedulerLimits


@dataclass(frozen=True)
class Shapes(Sizes):
    """The static sizes and choices of one engine, before memory is planned."""

    features: tuple[StepFeature, ...] = ()

    @classmethod
    def join(cls, sizes: Sizes, features: tuple[StepFeature, ...]) -> Shapes:
        """Returns the shapes of an engine of these sizes."""
        return cls(**{each.name: getattr(sizes, each.name) for each in fields(sizes)}, features=features)

    @property
    def attached_pages(self) -> tuple[AttachedPages, ...]:
        """The pages of features' layers."""
        pages = (feature.pages(self) for feature in self.features)
        return tuple(each for each in pages if each is not None)

    @property
    def page_options(self) -> dict[str, int]:
        """The arguments of `PageManager` that features and the model set."""
        options = {name: value for feature in self.features for name, value in feature.page_options(self).items()}
        return options | {"hit_grid": self.snapshot_grid or CHUNK_EDGE}

    @property
    def limits(self) -> SchedulerLimits:
        scheduler, updates = self.config.scheduler, self.state.groups * self.state.pages_per_row
        assert scheduler.max_num_seqs is not None and scheduler.max_num_batched_tokens is not None
        speculative, of_features = self.config.speculation.speculative_config, dict[str, Any]()
        for feature in self.features:
            of_features |= feature.limits
        return SchedulerLimits(
            max_num_seqs=scheduler.max_num_seqs,
            max_num_batched_tokens=scheduler.max_num_batched_tokens,
            max_model_len=self.model.max_model_len,
            max_prefix_updates=updates,
            row_sizes=self.buckets.row_counts,
            loop_rows=self.buckets.loop_rows,
            token_sizes=self.buckets.token_counts,
            verify_widths=self.buckets.verify_sizes,
            max_drafts=self.state.max_drafts,
            fixed_drafts=None if speculative is None else speculative.num_speculative_tokens_per_batch_size,
            **of_features,
            # On accelerators small steps take as long as reading the weights, whatever their padding.
            pads_cheaply=self.platform != "cpu",
            reads_whole=self.model.reads_whole,
            generates=self.generates,
            keeps_states=bool(self.model.states),
            chunk_edges=self.chunk_edges,
            snapshot_grid=self.snapshot_grid,
            options=scheduler,
        )

"""Counts of the steps run on the device since the start, for tables and metrics."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, field, fields

from jaxserve.core.runtime.buckets import Bucket

STEP_TOKEN_BOUNDS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)  # inclusive; one more bin above


@dataclass(slots=True)
class StepCounts:
    """The runner alone writes these counts; any thread may read them."""

    steps: Counter[Bucket] = field(default_factory=Counter)
    useful_tokens: int = 0
    padded_tokens: int = 0  # useful tokens included
    bytes_saved: int = 0  # KV copied to the host tier
    bytes_loaded: int = 0  # and from it
    tower_images: int = 0  # computed by the tower of a model that reads images
    tower_patches: int = 0  # of these
    num_by_tokens: list[int] = field(default_factory=lambda: [0] * (len(STEP_TOKEN_BOUNDS) + 1))  # steps per bin

    def count(self, bucket: Bucket, num_tokens: int, width: int = 1) -> None:
        """Counts a step that was started, with `width` tokens for each decoding row."""
        self.steps[bucket] += 1
        self.useful_tokens += num_tokens
        self.padded_tokens += bucket.tokens * width
        self.num_by_tokens[bisect_left(STEP_TOKEN_BOUNDS, num_tokens)] += 1

    def clear(self) -> None:
        """Forgets what was counted, for steps before the engine serves anybody."""
        fresh = StepCounts()
        for each in fields(self):
            setattr(self, each.name, getattr(fresh, each.name))

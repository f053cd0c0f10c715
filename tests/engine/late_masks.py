"""Masks that come late, without grammars or threads."""

from __future__ import annotations

import random

import numpy as np

from jaxserve.core.scheduler import Batch, StepPlan
from jaxserve.engine.grammars import GrammarRows, StepMasks
from jaxserve.request import Task


class LateMasks(GrammarRows):
    """Masks that allow every token; those of some steps, rows and positions are late."""

    def __init__(self, seed: int) -> None:
        super().__init__(32, None)
        self._random = random.Random(seed)

    def is_needed(self, plan: StepPlan, batch: Batch) -> bool:
        return self._random.random() < 0.5

    def make_masks(self, plan: StepPlan, batch: Batch) -> StepMasks:
        lines = np.full((plan.num_rows, plan.width, 1), 2**32 - 1, np.uint32)
        found = StepMasks(lines.reshape(-1, 1))
        samples = [*[True] * len(plan.decode_rows), *(chunk.is_last for chunk in plan.chunks)]
        for index, ticket in enumerate(plan.tickets):
            sequence = batch.by_ticket.get(ticket)
            if (
                sequence is None
                or sequence.request.task is Task.POOL
                or not samples[index]
                or self._random.random() < 0.5
            ):
                continue
            place = self._random.randrange(plan.width)
            lines[index, place:] = 0
            if place == 0:
                found.late.append(sequence)
        return found

"""The choices of the scheduler that are policy, as functions of sequences."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jaxserve.pages.manager import CHUNK_EDGE
from jaxserve.scheduler.sequence import Sequence

if TYPE_CHECKING:
    from jaxserve.scheduler.batch import Batch


def age(sequence: Sequence) -> int:
    """Sort key of the running sequences: the oldest first, so that it always progresses."""
    return sequence.order


def choose_victim(batch: Batch) -> Sequence:
    """Returns whom to preempt when pages run out: the youngest, so that the oldest always progresses."""
    return max((*batch.decoding[-1:], *batch.prefilling[-1:]), key=age)


def chunk_length(start: int, work: int, budget: int) -> int:
    """Returns how many of `work` tokens from position `start` to compute now; 0 when none make sense.

    A chunk that does not finish its work ends on an edge: kernels then write whole tiles, and cached prefixes align.
    """
    if work <= budget:
        return work
    return max(0, (start + budget) // CHUNK_EDGE * CHUNK_EDGE - start)

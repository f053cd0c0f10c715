"""The states that a step keeps as snapshots."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from jaxserve.core.pages.states import PendingSnapshot, Snapshots
from jaxserve.core.scheduler.limits import SchedulerLimits
from jaxserve.core.scheduler.plan_builder import PlanBuilder
from jaxserve.core.scheduler.policy import find_prompt_points, wants_snapshot
from jaxserve.core.scheduler.sequence import Sequence
from jaxserve.core.scheduler.step_plan import StateSave, Ticket


def list_saves(
    limits: SchedulerLimits, snapshots: Snapshots, builder: PlanBuilder, by_ticket: Mapping[Ticket, Sequence]
) -> Iterator[StateSave]:
    """Yields (row, snapshot, tokens) for each sequence whose state is to be kept behind so many tokens.

    That is where its part of the step ends. Where rows verify drafts, it is where that may end, or pass.
    """
    if not limits.snapshot_grid:
        return
    for sequence in builder.decoding:
        snapshot = _find_snapshot(limits, snapshots, sequence, sequence.num_computed_tokens - builder.width)
        if snapshot is not None:
            yield sequence.row, snapshot.slot, snapshot.num_tokens
    for chunk in builder.chunks.values():
        snapshot = _save(limits, snapshots, by_ticket[chunk.ticket], chunk.end)
        if snapshot is not None:
            yield chunk.row, snapshot.slot, snapshot.num_tokens


def _find_snapshot(
    limits: SchedulerLimits, snapshots: Snapshots, sequence: Sequence, start: int
) -> PendingSnapshot | None:
    """Returns the snapshot that a decoding sequence's step may pass, which begins behind `start` tokens or fewer.

    While nobody knows whether a verify step has passed a snapshot's point, each step gets it, and the device writes it
    in the one that does.
    """
    end = sequence.num_computed_tokens
    if not limits.verify_widths:
        return _save(limits, snapshots, sequence, end)
    snapshot = sequence.pages.states.find_pending(sequence.num_settled_tokens)
    if snapshot is not None:
        return snapshot
    point = end // limits.snapshot_grid * limits.snapshot_grid
    return _save(limits, snapshots, sequence, point) if point > start else None


def _save(limits: SchedulerLimits, snapshots: Snapshots, sequence: Sequence, point: int) -> PendingSnapshot | None:
    """Returns a new snapshot behind so many tokens; None if none is wanted there, or no slot is left."""
    if not wants_snapshot(limits, sequence, point):
        return None
    rolls = point > max(find_prompt_points(limits, sequence)[1], sequence.pages.states.junction)
    return snapshots.save(sequence.pages.states, point, rolls=rolls)

"""Chains of drafts: what became of a step's, and which come next."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Ids

from jaxserve.core.scheduler.scheduler_counts import SchedulerCounts
from jaxserve.core.scheduler.sequence import Sequence
from jaxserve.core.scheduler.step_plan import StepOutputs, StepPlan, Ticket
from jaxserve.core.scheduler.widths import WidthChooser


def take_drafts(
    plan: StepPlan,
    outputs: StepOutputs,
    by_ticket: Mapping[Ticket, Sequence],
    widths: WidthChooser,
    counts: SchedulerCounts,
) -> list[Ids[int]]:
    """Compares a verify step's drafts with its runs, then gives each sequence its next drafts; returns the runs.

    Call it before the runs are appended: what a stop cuts off was accepted nevertheless.
    """
    runs = outputs.split_runs()
    if plan.width > 1:
        _count_verified(plan, runs, by_ticket, widths, counts)
    if plan.width == 1 and outputs.drafts is None:
        return runs
    rows: Iterable[Ids[int]] = ((),) * len(runs) if outputs.drafts is None else outputs.drafts
    sampling = [True] * len(plan.decode_rows) + [chunk.is_last for chunk in plan.chunks]
    for ticket, run, ids, samples in zip(plan.tickets, runs, rows, sampling, strict=True):
        sequence = by_ticket.get(ticket)
        if sequence is not None and samples:
            sequence.drafts = () if run[0] < 0 else _trim(ids)
    return runs


def _count_verified(
    plan: StepPlan,
    runs: list[Ids[int]],
    by_ticket: Mapping[Ticket, Sequence],
    widths: WidthChooser,
    counts: SchedulerCounts,
) -> None:
    """Counts what a verify step, which has no chunks, accepted, and what its sequences gain."""
    chains: Counter[tuple[int, int]] = Counter()
    gains: Counter[int] = Counter()
    for ticket, run in zip(plan.decode_tickets, runs, strict=True):
        sequence = by_ticket.get(ticket)
        if sequence is None or run[0] < 0:
            continue
        left = sequence.max_num_tokens - len(sequence.token_ids) - 1  # drafts that it can still gain
        chain = _compare(sequence.drafts[: plan.width - 1], run, left)
        chains[chain] += 1
        if chain[0]:
            sequence.verified.append(chain)
        gains[min(left, _count_kept(run, sequence) - 1)] += 1
    _add_chains(counts, chains)
    widths.note_gains(gains, plan.width - 1)
    widths.check_head(counts.num_draft_tokens, counts.num_accepted_tokens)


def _compare(drafts: Ids[int], run: Ids[int], left: int) -> tuple[int, int]:
    """Returns how many drafts counted and how many of them were right. Those behind the last token do not count."""
    length, accepted = len(drafts), len(run) - 1
    if accepted >= length:
        return accepted, accepted
    length = min(length, max(accepted, left))
    if accepted < length and run[accepted] == drafts[accepted]:
        accepted += 1  # no mask came for the position after it, so there is no token of the row's own
    return length, accepted


def _count_kept(run: Ids[int], sequence: Sequence) -> int:
    """Returns how many ids of a run the sequence keeps: up to the first that ends it."""
    if sequence.stop_ids.isdisjoint(run):
        return len(run)
    return next(place for place, token_id in enumerate(run, 1) if token_id in sequence.stop_ids)


def _trim(ids: Ids[int]) -> Ids[int]:
    """Returns the drafts in front of the first that is none."""
    if not ids or ids[-1] >= 0:
        return ids
    return ids[: next(place for place, token_id in enumerate(ids) if token_id < 0)]


def _add_chains(counts: SchedulerCounts, chains: Counter[tuple[int, int]]) -> None:
    by_position = counts.num_accepted_by_position
    for (length, accepted), count in chains.items():
        if not length:
            continue
        counts.num_drafts += count
        counts.num_draft_tokens += length * count
        counts.num_accepted_tokens += accepted * count
        by_position.extend([0] * (length - len(by_position)))
        for position in range(accepted):
            by_position[position] += count

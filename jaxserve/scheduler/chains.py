"""What became of a step's drafts, and which come next."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Set
from collections.abc import Sequence as Ids
from itertools import islice

from jaxserve.scheduler.counts import SchedulerCounts
from jaxserve.scheduler.plan import StepOutputs, StepPlan, Ticket
from jaxserve.scheduler.sequence import MASK_LATE, Sequence
from jaxserve.scheduler.widths import WidthChooser


def take_drafts(
    plan: StepPlan,
    outputs: StepOutputs,
    by_ticket: Mapping[Ticket, Sequence],
    widths: WidthChooser,
    counts: SchedulerCounts,
) -> list[Ids[int]]:
    """Compares a step's drafts with its runs, then gives each sequence the drafts of its next step; returns the runs.

    Call it before the runs are appended: what a stop cuts off was accepted nevertheless. A row of a step of width 1 has
    verified nothing, but its token shows whether the first draft was right.
    """
    runs = outputs.split_runs()
    verifies, first = plan.width > 1, len(plan.decode_rows)
    if outputs.drafts is None and not (verifies or widths.awaits_drafts):  # there is nothing to compare
        widths.note_step(first, 1, plan.num_drafts, first)
        return runs
    rows: Iterable[Ids[int]] = ((),) * len(runs) if outputs.drafts is None else outputs.drafts
    compare = _compare_verified if verifies else _compare_plain
    chains, lengths, num_tokens = compare(plan, runs, rows, by_ticket)
    for chunk, run, ids in zip(plan.chunks, runs[first:], islice(rows, first, None), strict=True):
        sequence = by_ticket.get(chunk.ticket)
        if chunk.samples and sequence is not None:
            sequence.drafts = () if run[-1] < 0 else _trim(ids)
            lengths.append(len(sequence.drafts))
    counted = Counter(chains)
    widths.note_chains(counted, len(chains) if verifies else 0)
    widths.note_drafts(None if outputs.drafts is None else lengths)
    widths.note_step(len(chains), plan.width, plan.num_drafts, num_tokens)
    if verifies:
        _count(counts, counted)
        widths.check_head(counts.num_draft_tokens, counts.num_accepted_tokens)
    return runs


# (drafts, right ones), drafts of the next step, and tokens that sequences keep, but for what their length limit cuts
_Compared = tuple[list[tuple[int, int]], list[int], int]


def _compare_verified(
    plan: StepPlan, runs: list[Ids[int]], rows: Iterable[Ids[int]], by_ticket: Mapping[Ticket, Sequence]
) -> _Compared:
    """Counts what a verify step accepted. It has no chunks. This runs for each row of each step, so it is not short."""
    chains: list[tuple[int, int]] = []
    lengths: list[int] = []
    most, num_tokens = plan.width - 1, 0
    for ticket, run, ids in zip(plan.decode_tickets, runs, rows, strict=True):
        sequence = by_ticket.get(ticket)
        if sequence is None:
            continue
        drafts, count = sequence.drafts, len(run)
        length, accepted = len(drafts), count - 1
        if length > most:  # noqa: PLR1730  `min` takes ten times as long
            length = most
        if accepted < length:
            if run[0] == MASK_LATE:
                sequence.drafts = ()
                continue
            left = sequence.max_num_tokens - len(sequence.token_ids) - 1
            if length > left:
                length = max(accepted, left)  # drafts behind the sequence's last token count for nothing
            if accepted < length and run[accepted] == drafts[accepted]:
                accepted += 1  # no mask came for the position after it, so there is no token of the row's own
        elif accepted > length:
            length = accepted
        num_tokens += count if sequence.stop_ids.isdisjoint(run) else _count_kept(run, sequence.stop_ids)
        chain = length, accepted
        chains.append(chain)
        if length:
            sequence.verified.append(chain)
        if not ids or ids[-1] < 0:
            ids = _trim(ids)  # noqa: PLW2901
        sequence.drafts = ids
        lengths.append(len(ids))
    return chains, lengths, num_tokens


def _compare_plain(
    plan: StepPlan, runs: list[Ids[int]], rows: Iterable[Ids[int]], by_ticket: Mapping[Ticket, Sequence]
) -> _Compared:
    """Compares the first draft of each decoding row with its token."""
    chains: list[tuple[int, int]] = []
    lengths: list[int] = []
    for ticket, run, ids in zip(plan.decode_tickets, runs, rows):  # noqa: B905  rows of chunks may follow
        sequence = by_ticket.get(ticket)
        if sequence is None:
            continue
        before = sequence.drafts
        if run[0] == MASK_LATE:
            sequence.drafts = ()
            continue
        chains.append((1, int(before[0] == run[0])) if before else (0, 0))
        sequence.drafts = _trim(ids)
        lengths.append(len(sequence.drafts))
    return chains, lengths, len(chains)


def _count_kept(run: Ids[int], stop_ids: Set[int]) -> int:
    """Returns how many ids of a run the sequence keeps: up to the first that ends it."""
    return next(place for place, token_id in enumerate(run, 1) if token_id in stop_ids)


def _trim(ids: Ids[int]) -> Ids[int]:
    """Returns the drafts in front of the first that is none."""
    if not ids or ids[-1] >= 0:
        return ids
    return ids[: next(place for place, token_id in enumerate(ids) if token_id < 0)]


def _count(counts: SchedulerCounts, chains: Counter[tuple[int, int]]) -> None:
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

"""What became of a step's drafts, and which come next."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Ids
from itertools import islice

from jaxserve.scheduler.counts import SchedulerCounts
from jaxserve.scheduler.plan import StepPlan, Ticket
from jaxserve.scheduler.sequence import MASK_LATE, Sequence
from jaxserve.scheduler.widths import WidthChooser


def take_drafts(
    plan: StepPlan,
    runs: list[Ids[int]],
    drafts: list[list[int]] | None,
    by_ticket: Mapping[Ticket, Sequence],
    widths: WidthChooser,
    counts: SchedulerCounts,
) -> list[Ids[int]]:
    """Compares a step's drafts with its runs, then gives each sequence the drafts of its next step; returns the runs.

    Call it before the runs are appended: what a stop cuts off was accepted nevertheless. A row of a step of width 1 has
    verified nothing, but its token shows whether the first draft was right.

    Args:
        runs: one of each row.
        drafts: those of each row's next step; None: there are none.
    """
    verifies, num_tokens = plan.width > 1, 0
    chains: list[tuple[int, int]] = []  # (drafts, how many of them were right)
    lengths: list[int] = []
    most = plan.width - 1 if verifies else 1
    rows: Iterable[Ids[int]] = ((),) * len(runs) if drafts is None else drafts
    for ticket, run, ids in zip(plan.decode_tickets, runs, rows):  # noqa: B905  rows of chunks may follow
        sequence = by_ticket.get(ticket)
        if sequence is None:
            continue
        before = sequence.drafts
        if run[0] == MASK_LATE:
            sequence.drafts = ()
            continue
        # Drafts behind the sequence's last token count for nothing.
        room = sequence.max_num_tokens - len(sequence.token_ids) - 1
        length, accepted = min(len(before), most, room), len(run) - 1
        num_tokens += accepted + 1
        if verifies:
            length = max(length, accepted)
            sequence.num_draft_tokens += length
            sequence.num_accepted_tokens += accepted
        else:
            accepted = 1 if length and before[0] == run[0] else 0
        chains.append((length, accepted))
        kept = ids if ids and ids[-1] >= 0 else _trim(ids)
        sequence.drafts = kept
        lengths.append(len(kept))
    num_decodes = len(chains)
    first = len(plan.decode_rows)
    for chunk, run, ids in zip(plan.chunks, runs[first:], islice(rows, first, None), strict=True):
        sequence = by_ticket.get(chunk.ticket)
        if chunk.samples and sequence is not None:
            sequence.drafts = () if run[-1] < 0 else _trim(ids)
            lengths.append(len(sequence.drafts))
    counted = Counter(chains)
    widths.note_chains(counted, num_decodes if verifies else 0)
    widths.note_drafts(lengths)
    widths.note_step(num_decodes, plan.width, plan.num_drafts, num_tokens)
    if verifies:
        _count(counts, counted)
        widths.check_head(counts.num_draft_tokens, counts.num_accepted_tokens)
    return runs


def _trim(ids: Ids[int]) -> Ids[int]:
    """Returns the drafts in front of the first that is none."""
    return ids[: next((place for place, token_id in enumerate(ids) if token_id < 0), len(ids))]


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

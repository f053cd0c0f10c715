"""The planner's policy choices. Each function gets the limits and may read `limits.options` by name."""

from __future__ import annotations

from itertools import islice

from jaxserve.pages.manager import CHUNK_EDGE
from jaxserve.scheduler.limits import SchedulerLimits
from jaxserve.scheduler.running import Batch
from jaxserve.scheduler.sequence import Sequence, age
from jaxserve.scheduler.waiting import WaitingQueue


def choose_victim(limits: SchedulerLimits, batch: Batch) -> Sequence:
    """Returns the sequence to preempt when pages run out: the youngest, so that the oldest always progresses."""
    return max((*batch.decoding[-1:], *batch.prefilling[-1:]), key=age)


def choose_budget(limits: SchedulerLimits, batch: Batch, waiting: WaitingQueue) -> int:
    """Returns the token budget of the next step: `max_num_batched_tokens` where padding is cheap.

    Otherwise it is the padded size just above or just below the wanted tokens, whichever is nearer: the smaller defers
    tokens, the larger pads them.
    """
    sizes, most = limits.token_sizes, limits.max_num_batched_tokens
    if not sizes:
        return most
    wanted = len(batch.decoding)
    for sequence in batch.prefilling:
        wanted += len(sequence.token_ids) - sequence.num_computed_tokens
    for sequence in islice(waiting, limits.max_num_seqs - len(batch)):
        if wanted >= most:
            break
        wanted += len(sequence.token_ids)  # too many if its prefix is cached, which only makes the size suboptimal
    larger = next((size for size in sizes if size >= wanted), sizes[-1])
    smaller = max((size for size in sizes if size < wanted), default=larger)
    return min(most, smaller if larger - wanted > wanted - smaller else larger)


def choose_chunk(limits: SchedulerLimits, start: int, work: int, budget: int) -> int:
    """Returns how many of the `work` tokens from position `start` to compute now; 0: the budget reaches no edge.

    An unfinished chunk ends on a multiple of CHUNK_EDGE: kernels then write whole tiles, and cached prefixes align.
    """
    if work <= budget:
        return work
    return max(0, (start + budget) // CHUNK_EDGE * CHUNK_EDGE - start)

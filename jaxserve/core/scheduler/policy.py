"""The planner's policy choices. Each function gets the limits and may read `limits.options` by name."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from collections.abc import Sequence as Ids
from itertools import islice

from jaxserve.core.scheduler.limits import SchedulerLimits
from jaxserve.core.scheduler.plan_builder import ANY_STEP, PlanBuilder, StepKind
from jaxserve.core.scheduler.running import Batch
from jaxserve.core.scheduler.sequence import Sequence, age
from jaxserve.core.scheduler.step_times import StepTimes
from jaxserve.core.scheduler.waiting import WaitingQueue
from jaxserve.request import ServiceTier

# Decoding rows and prompts in steps of their own. In the steps of decoding rows every row has one token.
_SEPARATE_KINDS = StepKind(0, range(2, sys.maxsize)), StepKind(None, range(1, 2))

# The most tokens that a template puts at a prompt's end for this answer alone, and not into the next turn's prompt, as
# "<think>\n" (two tokens) or an empty thought (four).
_ANSWER_OPENING = 8


def list_kinds(limits: SchedulerLimits) -> tuple[StepKind, ...]:
    """Returns the kinds of steps, which take turns."""
    return _SEPARATE_KINDS if limits.options.deterministic else (ANY_STEP,)


def count_work(limits: SchedulerLimits, sequence: Sequence, start: int) -> int:
    """Returns how many tokens from position `start` may be one chunk: all that are known.

    Where bits count, a token's kind of step must depend on its position alone: tokens of the answer are computed one by
    one, even if they are known, and so is a prompt's last token if it begins a cell of the grid of chunks. Where the
    recurrent state is wanted a chunk ends.
    """
    end = len(sequence.token_ids)
    if limits.options.deterministic:
        end = min(end, sequence.num_prompt_tokens)
        if start < end - 1 and (end - 1) % limits.chunk_edges[0] == 0:
            end -= 1
        end = max(end, start + 1)
    points = list_points(limits, sequence) if limits.snapshot_grid else ()
    return min([end, *(point for point in points if point > start)]) - start


def list_points(limits: SchedulerLimits, sequence: Sequence) -> tuple[int, ...]:
    """Returns the numbers of tokens behind which a snapshot of the recurrent state is wanted while they are computed.

    One lies where others have left pages and no snapshot, so that the next text with this beginning finds both. The
    others are those of the prompt, and the last that all known tokens have in front of their last token.
    """
    if not sequence.pages.is_cached:
        return ()
    points = sequence.pages.states.junction, *find_prompt_points(limits, sequence), _floor(limits, sequence.token_ids)
    return tuple([point for point in points if 0 < point <= sequence.pages.num_sharable])


def find_prompt_points(limits: SchedulerLimits, sequence: Sequence) -> tuple[int, int]:
    """Returns the numbers of tokens of a prompt's last snapshots, which mostly are one.

    The first lies in front of the answer's opening, which the next turn's prompt may lack, the second in front of the
    last token.
    """
    ids = sequence.request.prompt_token_ids
    return _floor(limits, ids, _ANSWER_OPENING), _floor(limits, ids)


def _floor(limits: SchedulerLimits, token_ids: Ids[int], end: int = 0) -> int:
    """Returns the last point of a text without `end` tokens and one more at its end."""
    return max(len(token_ids) - 1 - end, 0) // limits.snapshot_grid * limits.snapshot_grid


def wants_snapshot(limits: SchedulerLimits, sequence: Sequence, point: int) -> bool:
    """Returns whether the state behind `point` tokens is to be kept, if a step ends there: also in answers."""
    pages = sequence.pages
    if point % limits.snapshot_grid or not pages.is_cached or not point <= pages.num_sharable:
        return False
    if point >= sequence.max_num_tokens:
        return False  # a loop of steps stops in front of the last token
    return point == pages.states.junction or point >= max(1, find_prompt_points(limits, sequence)[0])


def count_need(limits: SchedulerLimits, sequence: Sequence) -> int:
    """Returns how many tokens must have room in the pool before a sequence is admitted."""
    if limits.options.deterministic:
        return sequence.max_num_tokens
    return count_slots(limits, sequence, len(sequence.token_ids))


def count_slots(limits: SchedulerLimits, sequence: Sequence, end: int) -> int:
    """Returns how many tokens must have room for a step that computes those before `end` and samples.

    A drafter writes behind them, but never past the last token that is computed.
    """
    return end + max(0, min(limits.num_lookahead_tokens, sequence.max_num_tokens - 1 - end))


def list_promised(limits: SchedulerLimits, batch: Batch) -> Iterable[Sequence]:
    """Returns the running sequences that may still lack pages for what `count_need` counts."""
    return (*batch.decoding, *batch.prefilling) if limits.options.deterministic else batch.prefilling


def choose_victim(limits: SchedulerLimits, batch: Batch) -> Sequence:
    """Returns the sequence to preempt when pages run out: the youngest, so that the oldest always progresses."""
    return max((*batch.decoding[-1:], *batch.prefilling[-1:]), key=age)


def choose_drained(limits: SchedulerLimits, batch: Batch, waiting: Sequence, drained: int = 0) -> int:
    """Returns the running adapter whose slot a waiting sequence gets once its rows have ended.

    Every slot is in use when this is asked. Rows that must yield give it up at once. An adapter with rows of a better
    rank is the last choice, as others of that rank may go on to join it. Among equals it is `drained`, then the one of
    the fewest rows.
    """
    stays, outranks = set[int](), set[int]()
    for sequence in (*batch.decoding, *batch.prefilling):
        generation = sequence.request.generation
        if not (can_yield(limits, sequence) and must_yield(limits, sequence, waiting)):
            stays.add(generation)
        if sequence.request.rank < waiting.request.rank:
            outranks.add(generation)

    def count(generation: int) -> tuple[bool, bool, bool, int]:
        rows = batch.num_by_adapter[generation]
        return generation in outranks, generation in stays, generation != drained, rows

    return min(batch.num_by_adapter, key=count)


def can_yield(limits: SchedulerLimits, running: Sequence) -> bool:
    """Returns whether there can be anyone to whom a running sequence must yield."""
    if limits.options.deterministic:
        return False  # its answer would be computed again, token by token
    may_differ = limits.options.priority_scheduling_preemption_threshold is not None
    return may_differ or running.request.service_tier == ServiceTier.FLEX


def must_yield(limits: SchedulerLimits, running: Sequence, waiting: Sequence) -> bool:
    """Returns whether a running sequence loses its row when a waiting one needs it.

    The tier flex yields to the others. Within a tier, `priority_scheduling_preemption_threshold` decides.
    """
    (tier, priority), (waiting_tier, waiting_priority) = running.request.rank, waiting.request.rank
    if tier != waiting_tier:
        return tier == ServiceTier.FLEX and waiting_tier < tier
    threshold = limits.options.priority_scheduling_preemption_threshold
    return threshold is not None and priority - waiting_priority >= threshold


def find_step_limit(limits: SchedulerLimits, batch: Batch) -> float | None:
    """Returns the seconds that the next step may take; None: any time, as no row of the tier priority decodes."""
    limit = limits.options.priority_itl_ms
    if limit is None or not batch.decoding or batch.decoding[0].request.service_tier != ServiceTier.PRIORITY:
        return None
    return limit / 1000


def choose_budget(limits: SchedulerLimits, batch: Batch, waiting: WaitingQueue, times: StepTimes) -> int:
    """Returns the token budget of the next step: `max_num_batched_tokens` where padding is cheap or texts are whole.

    Otherwise it is the padded size just above or just below the wanted tokens, whichever is nearer: the smaller defers
    tokens, the larger pads them. While steps have a limit of time, larger ones than it allows do not count. Nor do
    those without room for an image that must be whole beside all decoding rows: its prompt could wait forever.
    """
    most, sizes = limits.max_num_batched_tokens, limits.token_sizes
    if limits.whole_image_tokens:
        sizes = tuple(size for size in sizes if size >= limits.max_num_seqs + limits.whole_image_tokens)
    step_limit = find_step_limit(limits, batch)
    if step_limit is not None and sizes:
        sizes = sizes[: _count_fitting(sizes, times, step_limit, bool(batch.num_by_adapter))]
        most = min(most, sizes[-1])
    if not sizes or limits.pads_cheaply or limits.reads_whole:
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


def _count_fitting(sizes: tuple[int, ...], times: StepTimes, step_limit: float, has_adapters: bool) -> int:
    """Returns how many sizes to choose from: those within the limit and one untried; at least the smallest."""
    for count, size in enumerate(sizes):
        seconds = times.estimate(size, has_adapters=has_adapters)
        if seconds > step_limit:
            return max(count, 1)
        if seconds == 0:
            return count + 1
    return len(sizes)


def choose_width(limits: SchedulerLimits, batch: Batch, waiting: WaitingQueue) -> int:
    """Returns how many tokens each decoding row computes in the next step.

    Several, if `max_decode_steps` says so, while few rows decode, no prompt is computed or waits, nothing limits the
    time of a step, and no row needs the host after each token or would miss a snapshot of its state.
    """
    width, num_rows = limits.options.max_decode_steps, len(batch.decoding)
    if width == 1 or waiting or batch.prefilling or num_rows > limits.loop_rows:
        return 1
    if num_rows * width > limits.max_num_batched_tokens or find_step_limit(limits, batch) is not None:
        return 1
    if any(sequence.needs_each_step or _jumps_over_point(limits, sequence, width) for sequence in batch.decoding):
        return 1
    return width


def _jumps_over_point(limits: SchedulerLimits, sequence: Sequence, width: int) -> bool:
    """Returns whether `width` tokens of an answer end behind the last point where a snapshot of its state is wanted."""
    if not limits.snapshot_grid or not sequence.pages.is_cached:
        return False
    start, most = sequence.num_computed_tokens, min(sequence.max_num_tokens - 1, sequence.pages.num_sharable)
    end = start + width
    point = end // limits.snapshot_grid * limits.snapshot_grid
    return start < point < end and point <= most


def may_admit(limits: SchedulerLimits, batch: Batch, sequence: Sequence, times: StepTimes) -> bool:
    """Returns whether one more row keeps to the limit of a step's time; those of the tier priority always may."""
    step_limit = find_step_limit(limits, batch)
    if step_limit is None or sequence.request.service_tier == ServiceTier.PRIORITY:
        return True
    has_adapters = bool(batch.num_by_adapter) or sequence.request.adapter is not None
    least = times.estimate(limits.token_sizes[0], has_adapters=has_adapters) if limits.token_sizes else 0
    return max(least, times.estimate_decode(len(batch) + 1, has_adapters=has_adapters)) <= step_limit


def choose_share(limits: SchedulerLimits, builder: PlanBuilder, sequence: Sequence) -> int:
    """Returns how many of a prompt's next tokens to compute before others had their share; 0: none now."""
    start = sequence.num_computed_tokens
    work, left = count_work(limits, sequence, start), len(sequence.token_ids) - start  # of one chunk, and of all
    options, most = limits.options, limits.long_prefill_tokens
    most_long, most_partial = options.max_long_partial_prefills, options.max_num_partial_prefills
    if most_long is not None and left > most and builder.count_partial(most) >= most_long:
        return 0
    length = choose_chunk(limits, start, work, min(builder.budget, most), builder.kind.lengths)
    if most_partial is not None and length < left and builder.count_partial() >= most_partial:
        return 0
    return length


def choose_chunk(limits: SchedulerLimits, start: int, work: int, budget: int, lengths: range = ANY_STEP.lengths) -> int:
    """Returns how many of the `work` tokens from position `start` to compute now.

    0: the budget reaches no edge, or the step takes no such length. An unfinished chunk ends on an edge: kernels then
    write whole tiles, and cached prefixes align. Without causal attention there are none.
    """
    ends = ((start + budget) // edge * edge for edge in limits.chunk_edges)
    length = work if work <= budget else next((end - start for end in ends if end > start), 0)
    if length < work and limits.reads_whole:
        return 0
    return length if length in lengths else 0

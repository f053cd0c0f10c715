"""Sequences with a grammar: their matchers, and the token masks of their steps."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Ids
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from jaxserve.errors import GrammarError
from jaxserve.request import FinishReason

if TYPE_CHECKING:
    from jaxserve.core.scheduler import Batch, Sequence, StepPlan
    from jaxserve.features.grammars import Matcher

MASK_TIMEOUT = 0.02  # seconds that a step waits for masks while its forward runs; rows with late masks do not sample
_SHORTEST_JUMP = 2  # forced tokens; a mask is as fast for one


@dataclass(slots=True)
class StepMasks:
    """The tokens that a step may sample: line s * width + i is for the token after the first i drafts of row s."""

    mask: Any  # uint32 [rows of the plan * width, words of the vocabulary], a bit per token; a line of 0: no sampling
    late: list[Sequence] = field(default_factory=list)  # their masks are not ready
    failed: list[tuple[Sequence, GrammarError]] = field(default_factory=list)
    jumps: list[tuple[Sequence, list[int]]] = field(default_factory=list)  # tokens forced by the grammar


class GrammarRows:
    """The matchers of unfinished sequences with a grammar.

    Args:
        mask_timeout: seconds that a step waits for its masks; None: as long as they take.
    """

    def __init__(self, vocab_size: int, mask_timeout: float | None) -> None:
        self._vocab_size, self._mask_timeout = vocab_size, mask_timeout
        self._pool: Any = None  # made with the first mask
        self._matchers: dict[Sequence, Matcher] = {}
        self._masked: dict[Sequence, Matcher] = {}  # matchers without an automaton on the device

    def __bool__(self) -> bool:
        """Whether any unfinished sequence has a grammar."""
        return bool(self._matchers)

    def add(self, sequences: Iterable[Sequence]) -> None:
        """Makes the matchers of sequences whose request has a grammar; ignores others."""
        for sequence in sequences:
            if sequence.request.grammar is not None:
                self._matchers[sequence] = sequence.request.grammar.new_matcher()
                if sequence.request.automaton is None:
                    self._masked[sequence] = self._matchers[sequence]

    def drop(self, sequence: Sequence) -> None:
        """Drops the matcher of a sequence that has ended, if there is one."""
        self._matchers.pop(sequence, None)
        self._masked.pop(sequence, None)

    def accept(self, sequence: Sequence, run: Ids[int]) -> tuple[int, FinishReason | None, GrammarError | None]:
        """Advances the matcher by a run, up to the token that completes the text or that the grammar refuses.

        Returns (tokens of the run that the sequence keeps, finish reason, error); None, None where it goes on.
        """
        matcher = self._matchers.get(sequence)
        if matcher is None:
            return len(run), None, None
        from jaxserve.features.grammars import MatcherError

        for count, token_id in enumerate(run, 1):
            try:
                matcher.accept(token_id)
            except MatcherError as error:
                return count, FinishReason.ERROR, _explain(sequence, error)
            if matcher.is_finished:
                return count, FinishReason.STOP, None
        return len(run), None, None

    def is_needed(self, plan: StepPlan, batch: Batch) -> bool:
        """Returns whether a row of the plan has a grammar that needs masks."""
        return bool(self._masked) and any(sequence in self._masked for sequence in _find_rows(plan, batch))

    def make_masks(self, plan: StepPlan, batch: Batch) -> StepMasks:
        """Returns the masks of a plan's rows. All earlier steps must be committed.

        A row has a line where it is and one after each of its drafts. The lines end with the first draft that the
        grammar does not allow, at the end of the text, and where they are late; those behind are 0, so the device
        accepts nothing there. The row is late only if its first line is.
        """
        width, rows = plan.width, _find_rows(plan, batch)
        matchers = [None if row is None else self._masked.get(row) for row in rows]
        for index, chunk in enumerate(plan.chunks, len(plan.decode_rows)):
            if not chunk.is_last:
                matchers[index] = None
        jumps = {index: tokens for index, row in enumerate(rows) if (tokens := _find_jump(row, matchers[index]))}
        if self._pool is None:
            from jaxserve.features.grammars import MaskPool

            self._pool = MaskPool(self._vocab_size)
        drafts = [() if row is None else row.drafts[: width - 1] for row in rows] if width > 1 else ()
        open_matchers = [None if index in jumps else matcher for index, matcher in enumerate(matchers)]
        work = self._pool.start(open_matchers, drafts, width)
        ready = self._pool.collect(work, self._mask_timeout)
        found = StepMasks(work.read())
        for index, row in enumerate(rows):
            if row is None or (ready[index] and index not in jumps):
                continue
            if index in work.errors:
                found.failed.append((row, _explain(row, work.errors[index])))
            elif index in jumps:
                found.jumps.append((row, jumps[index]))
                found.mask[index * width : (index + 1) * width] = 0
            else:
                found.late.append(row)
        return found


def _find_rows(plan: StepPlan, batch: Batch) -> list[Sequence | None]:
    """Returns the sequence of each row; None where it has ended since it was planned."""
    return [batch.by_ticket.get(ticket) for ticket in plan.tickets]


def _find_jump(sequence: Sequence | None, matcher: Matcher | None) -> list[int]:
    """Returns the forced tokens that come next and need no sampling; [] when there are too few."""
    if sequence is None or matcher is None:
        return []
    params = sequence.request.params
    if params.shapes_logits or params.logprobs is not None:
        return []  # the sampler must count these tokens, or the request wants their log-probabilities
    tokens = matcher.forced_tokens()[: max(0, sequence.max_num_tokens - len(sequence.token_ids) - 1)]
    stop = next((index for index, token in enumerate(tokens) if token in sequence.stop_ids), len(tokens))
    return tokens[:stop] if stop >= _SHORTEST_JUMP else []


def _explain(sequence: Sequence, error: BaseException) -> GrammarError:
    return GrammarError(f"request {sequence.request.request_id}: {error}", field="structured_outputs")

"""The persistent batch: its rows, and the tickets of sequences that steps in flight may serve."""

from __future__ import annotations

import itertools
from bisect import bisect_left, insort
from collections import Counter

from jaxserve.core.pages.manager import PageManager
from jaxserve.core.scheduler.sequence import Sequence, SequenceStatus, age
from jaxserve.core.scheduler.step_plan import FinishedAnswer

CONTEXT_TOKENS = 16  # of the prompt, which are remembered with its answer: so its first tokens are found, too


class Batch:
    """Rows, tickets and the two lists of running sequences, both by age.

    The next token of a `decoding` sequence is on the device; the tokens that a `prefilling` one has to compute are on
    the host. A ticket outlives its row: a preempted sequence still receives its tokens in flight.
    """

    def __init__(self, num_rows: int, pages: PageManager) -> None:
        self._pages = pages
        self.decoding: list[Sequence] = []
        self.prefilling: list[Sequence] = []
        self.by_ticket: dict[int, Sequence] = {}
        self.num_by_adapter: Counter[int] = Counter()  # running sequences by generation, none of them 0
        self._finished: list[FinishedAnswer] = []
        self._free_rows = list(range(num_rows - 1, -1, -1))
        self._tickets = itertools.count()

    def __len__(self) -> int:
        return len(self.decoding) + len(self.prefilling)

    @property
    def is_full(self) -> bool:
        return not self._free_rows

    def list_adapters(self) -> set[str]:
        """Returns the names of the adapters of running sequences. Safe from any thread."""
        running = [*list(self.decoding), *list(self.prefilling)]
        return {each.request.adapter.name for each in running if each.request.adapter is not None}

    def join(self, sequence: Sequence, num_cached: int) -> None:
        """Gives a sequence a row and a new ticket. It already holds the pages of its first `num_cached` tokens."""
        self.revoke_ticket(sequence)
        sequence.ticket, sequence.row = next(self._tickets), self._free_rows.pop()
        sequence.status, sequence.num_computed_tokens = SequenceStatus.RUNNING, num_cached
        sequence.publish_from = self._pages.next_publish(sequence.pages)
        self.by_ticket[sequence.ticket] = sequence
        insort(self.prefilling, sequence, key=age)
        if sequence.request.adapter is not None:
            self.num_by_adapter[sequence.request.generation] += 1

    def start_decoding(self, sequence: Sequence) -> None:
        """Moves a sequence to `decoding`: its next token will be on the device."""
        _remove(self.prefilling, sequence)
        insort(self.decoding, sequence, key=age)

    def resume_prefilling(self, sequence: Sequence) -> bool:
        """Undoes `start_decoding`: the next token is on the host. Returns False if the sequence was not decoding."""
        if not _remove(self.decoding, sequence):
            return False
        insort(self.prefilling, sequence, key=age)
        return True

    def compute_again(self, sequence: Sequence, width: int = 1) -> None:
        """Makes a decoding sequence recompute its last token, because the step in flight does not sample for it.

        All its tokens must be committed. That step planned `width` tokens for it, which its commit does not take back.
        """
        if self.resume_prefilling(sequence):
            sequence.num_computed_tokens -= width

    def leave(self, sequence: Sequence) -> bool:
        """Releases the row and the pages; the ticket stays. Returns whether the sequence was decoding."""
        self._pages.release(sequence.pages)
        sequence.publish_from = 0
        was_decoding = _remove(self.decoding, sequence)
        if not was_decoding:
            _remove(self.prefilling, sequence)
        self._free_rows.append(sequence.row)
        sequence.row = -1
        if sequence.request.adapter is not None:
            self._count_out(sequence.request.generation)
        return was_decoding

    def _count_out(self, generation: int) -> None:
        if self.num_by_adapter[generation] > 1:
            self.num_by_adapter[generation] -= 1
        else:
            del self.num_by_adapter[generation]

    def finish(self, sequence: Sequence, *, keeps_answers: bool) -> None:
        """Lets a running sequence leave for good; `take_finished` has its answer if that is to be remembered."""
        self.leave(sequence)
        num_prompt = sequence.num_prompt_tokens
        if keeps_answers and len(sequence.token_ids) > num_prompt:
            token_ids = tuple(sequence.token_ids[max(0, num_prompt - CONTEXT_TOKENS) :])
            self._finished.append(FinishedAnswer(token_ids, sequence.request.salt))

    def take_finished(self) -> tuple[FinishedAnswer, ...]:
        """Returns the answers of sequences that ended since the last call."""
        finished = tuple(self._finished)
        self._finished.clear()
        return finished

    def revoke_ticket(self, sequence: Sequence) -> None:
        """Removes the ticket: commits drop the sequence's tokens in flight."""
        self.by_ticket.pop(sequence.ticket, None)


def _remove(by_age: list[Sequence], sequence: Sequence) -> bool:
    index = bisect_left(by_age, age(sequence), key=age)
    if index < len(by_age) and by_age[index] is sequence:
        del by_age[index]
        return True
    return False

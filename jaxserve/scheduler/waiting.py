"""Who waits for a row, in which order, and how much of it waits for the first time."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterator
from collections.abc import Sequence as List

from jaxserve.scheduler.sequence import Sequence, SequenceStatus, age


class WaitingQueue:
    """Sequences in the order in which they get a row: by `age`, so a preempted one stands before what came later.

    The siblings of a request's first sequence are counted from the start, and stand here once its prompt is computed.
    """

    def __init__(self) -> None:
        self.num_new = 0  # sequences that were never admitted
        self.num_new_tokens = 0  # of their prompts, each prompt once
        self._sequences: deque[Sequence] = deque()

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences)

    def __reversed__(self) -> Iterator[Sequence]:
        return reversed(self._sequences)

    @property
    def worst_priority(self) -> int | None:
        """Of the last in line; None when nobody is. Safe from any thread."""
        try:
            return self._sequences[-1].request.priority
        except IndexError:
            return None

    @property
    def first(self) -> Sequence:
        """Who gets the next row."""
        return self._sequences[0]

    def enter(self, sequences: List[Sequence]) -> None:
        """Takes a new request: counts all its sequences, and queues the first."""
        self.num_new += len(sequences)
        self.num_new_tokens += sequences[0].num_prompt_tokens
        self.push(sequences[0])

    def push(self, sequence: Sequence) -> None:
        """Queues a sequence that is counted already, or that has run before."""
        if not self._sequences or age(self._sequences[-1]) < age(sequence):
            self._sequences.append(sequence)
        else:
            insort(self._sequences, sequence, key=age)

    def push_siblings(self, first: Sequence) -> None:
        """Queues the other sequences of a request: the prompt is computed, or will not be."""
        siblings, first.siblings = first.siblings, []
        for sequence in siblings:
            if sequence.status is SequenceStatus.WAITING:
                self.push(sequence)

    def pop(self) -> Sequence:
        """Takes out the first, which is about to be admitted."""
        sequence = self._sequences.popleft()
        self._uncount(sequence)
        return sequence

    def remove(self, sequence: Sequence) -> None:
        """Takes out a sequence that ends without having been admitted again, wherever it waits."""
        self._uncount(sequence)
        place = bisect_left(self._sequences, age(sequence), key=age)
        if place < len(self._sequences) and self._sequences[place] is sequence:
            del self._sequences[place]

    def _uncount(self, sequence: Sequence) -> None:
        if sequence.status is SequenceStatus.WAITING:
            self.num_new -= 1
            if sequence.index == 0:
                self.num_new_tokens -= sequence.num_prompt_tokens

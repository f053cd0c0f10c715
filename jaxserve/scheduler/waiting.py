"""The queue of sequences that wait for a row."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterator
from collections.abc import Sequence as List

from jaxserve.request import Rank
from jaxserve.scheduler.sequence import Sequence, SequenceStatus, age


class WaitingQueue:
    """Waiting sequences by `age`: a preempted sequence precedes those of its priority that arrived later.

    Siblings of a request's first sequence are counted from the start, but queued once the prompt is computed.
    """

    def __init__(self) -> None:
        self.num_new = 0  # sequences that were never admitted
        self.num_new_tokens = 0  # prompt tokens of never-admitted requests, once per request
        self._sequences: deque[Sequence] = deque()

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences)

    def __reversed__(self) -> Iterator[Sequence]:
        return reversed(self._sequences)

    @property
    def worst_rank(self) -> Rank | None:
        """The rank of the last in line; None if the queue is empty. Safe from any thread."""
        try:
            return self._sequences[-1].request.rank
        except IndexError:
            return None

    @property
    def first(self) -> Sequence:
        """The sequence that gets the next row."""
        return self._sequences[0]

    def enter(self, sequences: List[Sequence]) -> None:
        """Counts all sequences of a new request and queues the first."""
        self.num_new += len(sequences)
        self.num_new_tokens += sequences[0].num_prompt_tokens
        self.push(sequences[0])

    def push(self, sequence: Sequence) -> None:
        """Queues a sequence that is already counted or has run before."""
        if not self._sequences or age(self._sequences[-1]) < age(sequence):
            self._sequences.append(sequence)
        else:
            insort(self._sequences, sequence, key=age)

    def push_siblings(self, first: Sequence) -> None:
        """Queues the other sequences of a request once the prompt is computed, or `first` has ended."""
        siblings, first.siblings = first.siblings, []
        for sequence in siblings:
            if sequence.status is SequenceStatus.WAITING:
                self.push(sequence)

    def pop(self) -> Sequence:
        """Removes and returns the first sequence, for admission."""
        sequence = self._sequences.popleft()
        self._uncount(sequence)
        return sequence

    def remove(self, sequence: Sequence) -> None:
        """Removes a sequence that ends before it is admitted; an unqueued sibling is only uncounted."""
        self._uncount(sequence)
        place = bisect_left(self._sequences, age(sequence), key=age)
        if place < len(self._sequences) and self._sequences[place] is sequence:
            del self._sequences[place]

    def _uncount(self, sequence: Sequence) -> None:
        if sequence.status is SequenceStatus.WAITING:
            self.num_new -= 1
            if sequence.index == 0:
                self.num_new_tokens -= sequence.num_prompt_tokens

"""Who waits for a row, in which order, and how much of it waits for the first time."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterator
from collections.abc import Sequence as List

from jaxserve.errors import QueueFullError
from jaxserve.request import Request
from jaxserve.scheduler.policy import age
from jaxserve.scheduler.sequence import Sequence, SequenceStatus


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

    def refuse_if_full(self, requests: List[Request], max_sequences: int | None, max_tokens: int | None) -> None:
        """Raises QueueFullError when the requests would make more wait than may; none is too large for an empty queue.

        Without requests: when not even the smallest could wait. `n` x max_tokens is not reserved, and only what waits
        for its first admission counts.
        """
        if not self.num_new:
            return
        count = max(1, sum(request.params.n for request in requests))
        tokens = max(1, sum(len(request.prompt_token_ids) for request in requests))
        for name, limit, waiting, more in (
            ("max_num_queued_reqs", max_sequences, self.num_new, count),
            ("max_num_queued_tokens", max_tokens, self.num_new_tokens, tokens),
        ):
            if limit is not None and waiting + more > limit:
                what = "sequences" if name == "max_num_queued_reqs" else "prompt tokens"
                message = (
                    f"the queue is full: {waiting} {what} wait, and {more} more would pass {name}={limit}; "
                    "try again when some of them run"
                )
                raise QueueFullError(message, limit=limit, queued=waiting)

    def _uncount(self, sequence: Sequence) -> None:
        if sequence.status is SequenceStatus.WAITING:
            self.num_new -= 1
            if sequence.index == 0:
                self.num_new_tokens -= sequence.num_prompt_tokens

"""What the scheduler has done since the start."""

from __future__ import annotations

from dataclasses import dataclass

from jaxserve.scheduler.sequence import Sequence


@dataclass(slots=True)
class SchedulerCounts:
    """Only the scheduler writes it; any thread may read."""

    num_preemptions: int = 0
    num_admitted_tokens: int = 0  # of prompts, each once, when its request left the queue for the first time
    prefix_queries: int = 0  # prompt tokens that were looked up in the prefix cache, at first admissions
    prefix_hits: int = 0  # those that were found

    def count_admission(self, sequence: Sequence, num_cached: int) -> None:
        """Counts a sequence that runs for the first time."""
        if sequence.index == 0:
            self.num_admitted_tokens += sequence.num_prompt_tokens
        if sequence.pages.is_cached:
            self.prefix_queries += len(sequence.sharable_tokens)
            self.prefix_hits += num_cached

"""The scheduler's counters since the start."""

from __future__ import annotations

from dataclasses import dataclass, field

from jaxserve.core.scheduler.sequence import Sequence


@dataclass(slots=True)
class SchedulerCounts:
    """Only the scheduler writes the counters; any thread may read them."""

    num_preemptions: int = 0
    num_tier_misses: int = 0  # steps that took longer than `priority_itl_ms` while a row of that tier decoded
    num_admitted: int = 0  # sequences, counted at their first admission
    num_admitted_tokens: int = 0  # prompt tokens, counted at a request's first admission
    prefix_queries: int = 0  # tokens looked up in the prefix cache at first admissions
    prefix_hits: int = 0  # tokens found there
    snapshot_misses: int = 0  # tokens whose pages were there, behind the last snapshot of a recurrent state
    host_hits: int = 0  # those among them that were loaded from the host tier
    num_images: int = 0  # of prompts, counted at a request's first admission
    image_page_hits: int = 0  # those among them that lay in pages of the prefix cache
    tower_step_seconds: float = 0.0  # of steps that images were computed in front of, and of these images
    image_row_hits: int = 0  # others, whose vectors the device had
    num_drafts: int = 0  # chains of drafts that were verified: one for each row with drafts in a step
    num_draft_tokens: int = 0  # drafts in them
    num_accepted_tokens: int = 0  # drafts that were right, with all before them
    num_accepted_by_position: list[int] = field(default_factory=list)  # the same by position in the chain

    def count_admission(self, sequence: Sequence, num_cached: int, num_held: int) -> None:
        """Counts a sequence's first admission with `num_cached` tokens from the prefix cache.

        The device has the vectors of `num_held` images behind them.
        """
        self.num_admitted += 1
        if sequence.index == 0:
            self.num_admitted_tokens += sequence.num_prompt_tokens
            if (images := sequence.request.images) is not None:
                self.num_images += len(images.spans)
                self.image_page_hits += sum(span.end <= num_cached for span in images.spans)
                self.image_row_hits += num_held
        if sequence.pages.is_cached:
            self.prefix_queries += len(sequence.sharable_tokens)
            self.prefix_hits += num_cached
            self.snapshot_misses += sequence.pages.states.num_lost_tokens
            self.host_hits += min(num_cached, sequence.pages.num_loaded_tokens)

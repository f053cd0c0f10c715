"""The limits of every plan."""

from __future__ import annotations

from dataclasses import dataclass, field

from jaxserve.config import SchedulerOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerLimits:
    """The sizes that the compiled programs impose, and the options that queue and policies read by name."""

    max_num_seqs: int  # rows
    max_num_batched_tokens: int  # tokens of a step
    max_model_len: int  # tokens of a sequence
    max_prefix_updates: int  # page-table entries of admitted prefixes in one step
    token_sizes: tuple[int, ...] = ()  # padded step sizes, ascending; empty where padding is cheap
    options: SchedulerOptions = field(default_factory=SchedulerOptions)

"""The options of the scheduler: how much runs at once, and who is next."""

from __future__ import annotations

from dataclasses import dataclass

from jaxserve.errors import ConfigError, shorten
from jaxserve.options import check_at_least, check_choices, option

MAX_DECODE_STEPS = 16
MIN_CHUNK = 32  # tokens that a full batch of decoding rows must leave for a prompt in each step


@dataclass(frozen=True, slots=True)
class SchedulerOptions:
    """How much runs at once."""

    max_num_seqs: int | None = option(None, "rows of the batch; default: cpu 32, gpu 256, tpu 128")
    max_num_batched_tokens: int | None = option(None, "tokens of a step; default: cpu 512, gpu 2048, tpu 2048")
    max_decode_steps: int = option(
        1, "decode steps in one dispatch, while few rows decode and nobody waits; tokens then come in groups"
    )
    async_scheduling: bool = option(True, "plan and dispatch the next step while one runs")
    deterministic: bool = option(
        False,
        "a request's tokens and log-probabilities are the same bits whatever runs beside it; slower",
        "enable_deterministic_inference",
    )
    max_num_queued_reqs: int | None = option(
        None, "sequences that may wait for a row; a server refuses more; default: 4 x max_num_seqs, for servers only"
    )
    max_num_queued_tokens: int | None = option(None, "prompt tokens that may wait for a row; default: no limit")
    scheduling_policy: str = option(
        "fcfs",
        "which waiting request is next within a tier and priority; fcfs: the one that arrived first; fair: the one of "
        "the tenant that was served least for its weight",
        choices=("fcfs", "fair"),
        synonyms={"priority": "fcfs"},
    )
    priority_itl_ms: float | None = option(
        None, "milliseconds of a step while a request of the tier priority decodes; default: no limit"
    )
    priority_scheduling_preemption_threshold: int | None = option(
        None, "a waiting request takes the row of a running one whose priority is worse by so much; default: never"
    )
    long_prefill_token_threshold: int | None = option(
        None,
        "tokens of one prompt in a step while others can use the rest; 0: no limit; default: 4 % of max_model_len, at "
        "most half a step",
    )
    max_num_partial_prefills: int | None = option(
        None, "prompts computed in parts at once; default: as many as fit a step"
    )
    max_long_partial_prefills: int | None = option(
        None, "prompts above long_prefill_token_threshold computed at once; default: as many as fit a step"
    )

    def __post_init__(self) -> None:
        check_at_least(
            self,
            max_num_seqs=1,
            max_num_batched_tokens=MIN_CHUNK + 1,
            max_num_queued_reqs=1,
            max_num_queued_tokens=1,
            priority_scheduling_preemption_threshold=1,
            long_prefill_token_threshold=0,
            max_num_partial_prefills=1,
            max_long_partial_prefills=1,
            max_decode_steps=1,
        )
        if self.max_decode_steps > MAX_DECODE_STEPS:
            message = f"must be at most {MAX_DECODE_STEPS}, got {self.max_decode_steps}"
            raise ConfigError(message, field="max_decode_steps", value=self.max_decode_steps)
        if self.deterministic and self.max_decode_steps > 1:
            message = "must be 1 with deterministic: such loops run in another program, and only while nobody waits"
            raise ConfigError(message, field="max_decode_steps", value=self.max_decode_steps)
        threshold = self.priority_scheduling_preemption_threshold
        if self.deterministic and threshold is not None:
            message = f"must be left out with deterministic, in which no request yields its row, got {threshold}"
            raise ConfigError(message, field="priority_scheduling_preemption_threshold", value=threshold)
        check_choices(self)
        limit = self.priority_itl_ms
        if limit is not None and not limit > 0:
            raise ConfigError(f"must be above 0, got {shorten(limit)}", field="priority_itl_ms", value=limit)

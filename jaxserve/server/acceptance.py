"""Figures of an answer's drafts, in vLLM's form (`metrics.speculative_decoding`)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from jaxserve.request import RequestMetrics

LEVELS = ("none", "summary", "detailed")


def describe_acceptance(metrics: RequestMetrics, num_spec_tokens: int, *, is_detailed: bool) -> dict[str, Any]:
    """Returns the acceptance of one sequence's drafts.

    Args:
        metrics: of the finished sequence.
        num_spec_tokens: the most drafts of a step.
        is_detailed: adds the drafts and the accepted ones of each step.
    """
    steps, drafts, accepted = len(metrics.verified), metrics.num_draft_tokens, metrics.num_accepted_tokens
    by_length = {
        str(length): _count(length, (right for made, right in metrics.verified if made == length))
        for length in sorted({made for made, _ in metrics.verified})
    }
    found: dict[str, Any] = {
        "mean_acceptance_length": 1.0 + (accepted / steps if steps else 0.0),
        "draft_acceptance_rate": accepted / drafts if drafts else 0.0,
        "acceptance_histogram": _count(num_spec_tokens, (right for _, right in metrics.verified)),
        "acceptance_histogram_by_draft_length": by_length,
        "num_spec_steps": steps,
        "num_accepted_draft_tokens": accepted,
        "num_draft_tokens": drafts,
        "num_spec_tokens": num_spec_tokens,
    }
    if is_detailed:
        found["per_step_accepted"] = [right for _, right in metrics.verified]
        found["per_step_drafted"] = [made for made, _ in metrics.verified]
    return found


def _count(most: int, numbers: Iterable[int]) -> list[int]:
    """Returns how often each number from 0 to `most` occurs."""
    counts = [0] * (most + 1)
    for number in numbers:
        counts[number] += 1
    return counts

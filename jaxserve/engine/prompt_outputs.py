"""Prompt log-probabilities and embeddings of a step, given to the requests that asked for them."""

from __future__ import annotations

from collections.abc import Mapping

from jaxserve.core.scheduler import Sequence, StepOutputs, StepPlan
from jaxserve.engine.output import OutputStream
from jaxserve.request import Task


def hand_out_prompts(
    plan: StepPlan,
    outputs: StepOutputs,
    by_ticket: Mapping[int, Sequence],
    streams: Mapping[Sequence, OutputStream],
) -> None:
    """Stores a step's prompt log-probabilities and embeddings with their requests.

    Call it before the commit, which may end their sequences.
    """
    if outputs.prompt_logprobs is None and outputs.embeddings is None:
        return
    line = row = len(plan.decode_rows)
    for chunk in plan.chunks:
        sequence = by_ticket.get(chunk.ticket)
        if sequence is not None:
            group = streams[sequence].group
            if outputs.prompt_logprobs is not None and group.prompt_logprobs is not None:
                group.prompt_logprobs.add(outputs.prompt_logprobs, line, chunk.start, len(chunk.token_ids))
            if outputs.embeddings is not None and sequence.request.task is Task.POOL and chunk.is_last:
                found = outputs.embeddings[row]  # of tokens it may be megabytes: too many for this thread
                group.embedding = found.tolist() if found.ndim == 1 else found
        line, row = line + len(chunk.token_ids), row + 1

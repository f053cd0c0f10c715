"""From a request to its sequences, or to why it can never run."""

from __future__ import annotations

import itertools
from collections.abc import Sequence as Ids
from dataclasses import dataclass

from jaxserve.errors import CapacityError, InvalidRequestError, JaxServeError, NonFiniteLogitsError, NoTokenLeftError
from jaxserve.pages.manager import PageManager
from jaxserve.request import FinishReason, Request
from jaxserve.scheduler.sequence import MASK_LATE, NO_TOKEN_LEFT, Sequence, SequenceStatus
from jaxserve.scheduler.waiting import WaitingQueue

_shared_alone = itertools.count()  # numbers of requests that share pages among their own sequences: ids come again


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """The static bounds that the compiled programs impose on every plan, and those of the queue."""

    max_num_seqs: int  # rows
    max_num_batched_tokens: int  # tokens of a step
    max_model_len: int  # tokens of a sequence
    max_prefix_updates: int  # page-table entries of admitted prefixes in one step
    max_num_queued_reqs: int | None = None  # sequences that may wait for their first admission; for servers
    max_num_queued_tokens: int | None = None  # and tokens of their prompts
    token_sizes: tuple[int, ...] = ()  # that a step is padded to, ascending, where padding costs as much as tokens do


def make_sequences(request: Request, max_model_len: int, pages: PageManager) -> list[Sequence]:
    """Returns a request's n sequences.

    They share the pages of the prompt by its content; without a prefix cache among themselves only, under a name of
    their own.

    Raises:
        InvalidRequestError: the prompt leaves no room for an output token.
        CapacityError: a sequence would not fit the empty KV pool.
    """
    num_prompt, wanted = len(request.prompt_token_ids), request.params.max_tokens
    if num_prompt == 0:
        raise InvalidRequestError("is empty; give at least one token", field="prompt", value=request.prompt)
    if num_prompt >= max_model_len:
        message = (
            f"This model's maximum context length is {max_model_len} tokens, and the prompt alone has {num_prompt}; "
            f"at most {max_model_len - 1} leave room for an answer"
        )
        raise InvalidRequestError(message, field="prompt", value=num_prompt)
    most = max_model_len if wanted is None else min(max_model_len, num_prompt + wanted)
    if (unfit := pages.first_unfit_group(most)) is not None:
        message = f"{most} tokens need {unfit[0]} KV pages, and the whole pool has {unfit[1]}"
        raise CapacityError(message, field="prompt" if request.embeds else "max_tokens", value=wanted)
    count = request.params.n
    shares_alone = count > 1 and not pages.enable_prefix_caching
    salt = f"n of request {next(_shared_alone)}" if shares_alone else request.cache_salt
    cache = True if shares_alone else None
    sequences = [Sequence(request, pages.new_sequence(salt, cache=cache), most, index=index) for index in range(count)]
    sequences[0].siblings = sequences[1:]
    return sequences


def let_siblings_in(first: Sequence, waiting: WaitingQueue) -> None:
    """The prompt is computed, or will not be: the request's other sequences queue."""
    siblings, first.siblings = first.siblings, []
    for sequence in siblings:
        if sequence.status is SequenceStatus.WAITING:
            waiting.push(sequence)


def find_end(sequence: Sequence, run: Ids[int]) -> tuple[Ids[int], FinishReason | None, JaxServeError | None]:
    """Returns what a sequence keeps of a run, and how it ends there: at its limit, a stop id or a sentinel; or None."""
    room = sequence.max_num_tokens - len(sequence.token_ids)
    run = run[:room]
    for index, token_id in enumerate(run):
        if token_id not in sequence.stop_ids:
            continue
        if token_id >= 0:
            sequence.stop_token_id = None if token_id in sequence.request.eos_token_ids else token_id
            return run[: index + 1], FinishReason.STOP, None
        if token_id == MASK_LATE:  # `Batch.compute_again` has seen to it
            return run[:index], None, None
        return run[:index], FinishReason.ERROR, _explain(sequence, token_id)
    return run, FinishReason.LENGTH if len(run) == room else None, None


def _explain(sequence: Sequence, sentinel: int) -> JaxServeError:
    name = sequence.request.request_id
    if sentinel == NO_TOKEN_LEFT:
        return NoTokenLeftError(f"request {name}: its constraints together forbid every token", field="logit_bias")
    return NonFiniteLogitsError(f"request {name}: the model's logits are not finite")

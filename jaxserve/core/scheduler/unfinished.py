"""The unfinished requests and their unfinished sequences."""

from __future__ import annotations

import itertools
from typing import Any

from jaxserve.core.pages.manager import PageManager
from jaxserve.core.scheduler.limits import SchedulerLimits
from jaxserve.core.scheduler.running import Batch
from jaxserve.core.scheduler.sequence import Sequence, SequenceStatus, make_order
from jaxserve.core.scheduler.waiting import WaitingQueue
from jaxserve.errors import CapacityError, InvalidRequestError, JaxServeError
from jaxserve.request import FinishReason, Request, Task

_shared_alone = itertools.count()  # unique salts; request ids can be reused


class UnfinishedRequests:
    """Begins and ends sequences, whether they wait or run."""

    def __init__(self, limits: SchedulerLimits, pages: PageManager, waiting: WaitingQueue, batch: Batch) -> None:
        self._limits, self._pages = limits, pages
        self._waiting, self._batch = waiting, batch
        self._by_id: dict[str, list[Sequence]] = {}
        self._arrivals = itertools.count()

    def __len__(self) -> int:
        return len(self._by_id)

    def add(self, request: Request) -> list[Sequence]:
        """Queues a request; see `Scheduler.add`."""
        if request.request_id in self._by_id:
            raise InvalidRequestError("is already running", field="request_id", value=request.request_id)
        sequences = self._make_sequences(request)
        for sequence in sequences:
            sequence.order = make_order(request.rank, next(self._arrivals))
        self._by_id[request.request_id] = sequences.copy()
        self._waiting.enter(sequences)
        return sequences

    def finish(self, request_id: str, reason: FinishReason, error: JaxServeError | None) -> list[Sequence]:
        """Ends a request's unfinished sequences; see `Scheduler.finish`."""
        sequences = self._by_id.get(request_id, []).copy()
        for sequence in reversed(sequences):  # siblings first: the end of the first sequence queues the others
            self.finish_sequence(sequence, reason, error)
        return sequences

    def finish_sequence(self, sequence: Sequence, reason: FinishReason, error: JaxServeError | None = None) -> bool:
        """Ends one sequence; returns False if it has already ended."""
        if sequence.status is SequenceStatus.FINISHED:
            return False
        if sequence.status is SequenceStatus.RUNNING:
            self._batch.finish(sequence, keeps_answers=self._limits.keeps_answers)
        else:
            self._waiting.remove(sequence)
        self._batch.revoke_ticket(sequence)
        sequence.status, sequence.finish_reason, sequence.error = SequenceStatus.FINISHED, reason, error
        others = self._by_id[sequence.request.request_id]
        others.remove(sequence)
        self._waiting.push_siblings(sequence)
        if not others:
            del self._by_id[sequence.request.request_id]
        return True

    def _make_sequences(self, request: Request) -> list[Sequence]:
        """Returns the n sequences, or raises the errors of `Scheduler.add`.

        They share the prompt's pages by content; without a prefix cache, under a salt unique to the request.
        """
        if request.task is not Task.POOL and not self._limits.generates:
            message = f"this model generates no text, and the request is to {request.task.value}"
            raise InvalidRequestError(message, field="model")
        num_prompt, max_model_len = len(request.prompt_token_ids), self._limits.max_model_len
        if num_prompt == 0:
            raise InvalidRequestError("is empty; give at least one token", field="prompt", value=request.prompt)
        if num_prompt + request.needs_room > max_model_len:
            fits = f"at most {max_model_len - 1} leave room for an answer" if request.needs_room else "shorten it"
            message = (
                f"This model's maximum context length is {max_model_len} tokens, and the prompt alone has "
                f"{num_prompt}; {fits}"
            )
            raise InvalidRequestError(message, field="prompt", value=num_prompt)
        self._refuse_images(request)
        generates, pages = request.task is Task.GENERATE, self._pages
        wanted = request.params.max_tokens if generates else 0
        most = max_model_len if wanted is None else min(max_model_len, num_prompt + wanted)
        if (unfit := pages.first_unfit_group(most)) is not None:
            message = f"{most} tokens need {unfit[0]} KV pages, and the whole pool has {unfit[1]}"
            raise CapacityError(message, field="max_tokens" if generates else "prompt", value=wanted)
        count = request.params.n
        shares_alone = count > 1 and not pages.enable_prefix_caching and not self._limits.keeps_states
        salt = f"n of request {next(_shared_alone)}" if shares_alone else request.salt
        cache = True if shares_alone else None
        # Decoding writes other bits than the chunks of a prompt.
        num_sharable = num_prompt if self._limits.options.deterministic else most
        images = () if request.images is None else request.images.spans
        options: dict[str, Any] = {"cache": cache, "num_sharable": num_sharable, "images": images}
        sequences = [
            Sequence(request, pages.new_sequence(salt, **options), most, index=index) for index in range(count)
        ]
        sequences[0].siblings = sequences[1:]
        return sequences

    def _refuse_images(self, request: Request) -> None:
        """Raises InvalidRequestError for an image that no step can compute, for which a prompt would wait forever."""
        limits = self._limits
        for index, item in enumerate(() if request.images is None else request.images.items):
            if item.num_patches > limits.max_num_batched_patches or item.num_tokens > limits.max_image_rows:
                message = (
                    f"has {item.num_patches} patches and {item.num_tokens} tokens; a step computes at most "
                    f"{limits.max_num_batched_patches} patches, and {limits.max_image_rows} tokens have room"
                )
                raise InvalidRequestError(message, field=f"images[{index}]", value=item.num_patches)

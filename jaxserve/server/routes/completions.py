"""`/v1/completions`: prompts to continue."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from json.encoder import encode_basestring_ascii as quote
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from jaxserve.errors import InvalidRequestError
from jaxserve.request import CompletionOutput, RequestOutput
from jaxserve.request import Request as EngineRequest
from jaxserve.sampling_params import SamplingParams
from jaxserve.server.body import prepare, read_body
from jaxserve.server.generation import Generation, echo_tier, name_requests
from jaxserve.server.logprobs import to_completion, to_prompt_logprobs
from jaxserve.server.openapi import document
from jaxserve.server.prompts import (
    check_count,
    check_length,
    count_prompts,
    list_limits,
    list_prompts,
    name_fields,
    read_form,
)
from jaxserve.server.protocol.completions import Completion, CompletionRequest
from jaxserve.server.server_state import ServerState, get_state
from jaxserve.server.stream import ChunkWriter, respond

router = APIRouter()


@router.post("/v1/completions", **document(CompletionRequest, Completion, streams=True))
async def create_completion(http: Request) -> Response:
    """Continues one prompt or many."""
    state = get_state(http)
    body = await read_body(http, CompletionRequest, state)
    model = state.check_model(body.model)
    check_body(body, state)
    names = {"prompt_token_ids": "prompt"}
    if body.response_format is not None:
        names["structured_outputs.json"] = "response_format.json_schema.schema"
    with name_fields(names):
        requests = await prepare(http, body, state, make_requests)
        answer = _Answer(body, model, state, name_requests(requests, http), http)
        return await respond(http, answer, state, streams=body.stream)


def check_body(body: CompletionRequest, state: ServerState) -> None:
    """Refuses conflicting fields, and what exceeds the server's limits.

    Raises:
        InvalidRequestError: names the field.
    """
    body.check_stream()
    check_count(body, state, count_prompts(body.prompt))
    if body.max_tokens == 0 and not body.echo:
        raise InvalidRequestError("0 is only allowed with echo", field="max_tokens", value=0)


def make_requests(body: CompletionRequest, state: ServerState, options: dict[str, Any]) -> list[EngineRequest]:
    """Returns one engine request for each prompt."""
    engine = state.engine
    more = {"logprobs": body.logprobs, "structured_outputs": read_form(body), **list_limits(body)}
    more["max_tokens"] = 1 if body.max_tokens == 0 else engine.defaults.limit_tokens(body.max_tokens)
    params = body.to_sampling_params(engine.defaults.params, **more)
    if body.echo and body.logprobs is not None and params.prompt_logprobs is None:
        params = replace(params, prompt_logprobs=body.logprobs)
    prompts = list_prompts(body.prompt, state.config.limits.max_prompts, "prompt")
    for prompt in prompts:
        check_length(prompt.get("prompt"), state, "prompt", cuts=body.truncate_prompt_tokens is not None)
    if body.add_special_tokens is False and engine.tokenizer is not None:
        encode = engine.tokenizer.encode
        for prompt in prompts:
            if "prompt" in prompt:
                prompt["prompt_token_ids"] = encode(prompt.pop("prompt"), add_special_tokens=False)
    return [engine.requests.make(prompt, params, **options) for prompt in prompts]


@dataclass(slots=True)
class _Choice:
    """The state of one completion while it is written."""

    num_characters: int = 0
    has_begun: bool = False


class _Answer:
    """The completions of one HTTP request, numbered across its prompts."""

    def __init__(
        self,
        body: CompletionRequest,
        model: str,
        state: ServerState,
        requests: Sequence[EngineRequest],
        http: Request,
    ) -> None:
        self._body, self._state, self._requests = body, state, requests
        self._params: SamplingParams = requests[0].params
        self._generation = Generation(state, requests, http)
        self._choices = [_Choice() for _ in range(len(requests) * self._params.n)]
        number = body.request_id or requests[0].request_id.partition("-")[0]
        self._head = {
            "id": f"cmpl-{number}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": state.fingerprint,
            **echo_tier(body, requests[0]),
        }
        tokenizer = state.engine.tokenizer
        hides = self._params.skip_special_tokens and tokenizer is not None
        self._hidden = tokenizer.special_ids if hides else frozenset()
        self._echoes_only = body.max_tokens == 0

    async def collect(self) -> dict[str, Any]:
        """Returns the whole answer."""
        choices = []
        async for position, output in self._generation.outputs():
            choices += [self._render(position, output, completion) for completion in output.outputs]
        choices.sort(key=lambda choice: choice["index"])
        more = self._generation.describe_metrics()
        return {**self._head, "choices": choices, "usage": self._usage(), **more}

    async def start_stream(self) -> AsyncGenerator[bytes]:
        """Returns the answer's pieces; raises errors that occur before the first."""
        return self._stream(await self._generation.begin())

    async def _stream(self, outputs: AsyncGenerator[tuple[int, RequestOutput]]) -> AsyncGenerator[bytes]:
        shows_usage = self._body.wants_usage or self._state.config.serving.enable_force_include_usage
        writer = ChunkWriter(self._head, shows_usage=shows_usage)
        head, tail = writer.head, writer.tail
        counts = self._body.wants_usage_so_far
        is_plain = not (counts or self._params.logprobs is not None or self._body.echo or self._body.return_token_ids)
        async with aclosing(outputs):
            async for position, output in outputs:
                for completion in output.outputs:
                    if is_plain and completion.finish_reason is None:
                        if completion.text:
                            index = position * self._params.n + completion.index
                            text = quote(completion.text)
                            choice = f'{{"index":{index},"text":{text},"logprobs":null,"finish_reason":null}}'
                            yield f"{head}{choice}{tail}".encode()
                    else:
                        usage = self._usage() if counts else None
                        yield writer.write(self._render(position, output, completion), usage)
            if shows_usage:
                yield writer.write_usage(self._usage(), self._generation.describe_metrics())

    def _render(self, position: int, output: RequestOutput, completion: CompletionOutput) -> dict[str, Any]:
        """Returns the new part of one choice."""
        index = position * self._params.n + completion.index
        choice, begins = self._choices[index], not self._choices[index].has_begun
        choice.has_begun = True
        text, token_ids, logprobs = completion.text, completion.token_ids, completion.logprobs
        if self._echoes_only:
            text, token_ids, logprobs = "", [], [] if logprobs is not None else None
        found: dict[str, Any] = {"index": index, "text": text, "logprobs": None}
        prompt = self._read_prompt(output) if begins and self._body.echo else ""
        if logprobs is not None:
            ids: list[int] = list(token_ids)
            entries: list[Any] = list(logprobs)
            first = ""
            if prompt:
                ids, entries = [*output.prompt_token_ids, *ids], [*(output.prompt_logprobs or []), *entries]
                first = self._decode(ids[:1])
            count, offset = self._params.logprobs or 0, choice.num_characters
            found["logprobs"] = to_completion(ids, entries, count, offset, first, self._hidden, prompt)
        found["text"] = prompt + text
        choice.num_characters += len(found["text"])
        found["finish_reason"] = "length" if self._echoes_only else completion.finish_reason
        if completion.finish_reason is not None:
            found["stop_reason"] = None if self._echoes_only else completion.stop_reason
        if self._body.return_token_ids:
            found["token_ids"] = token_ids
            found["prompt_token_ids"] = output.prompt_token_ids if begins else None
        if self._body.prompt_logprobs is not None and completion.finish_reason is not None:
            found["prompt_logprobs"] = to_prompt_logprobs(output.prompt_logprobs)
        return found

    def _read_prompt(self, output: RequestOutput) -> str:
        return output.prompt if output.prompt is not None else self._decode(output.prompt_token_ids)

    def _decode(self, token_ids: Sequence[int]) -> str:
        tokenizer = self._state.engine.tokenizer
        return "" if tokenizer is None else tokenizer.decode(token_ids, skip_special_tokens=False)

    def _usage(self) -> dict[str, Any]:
        if self._echoes_only:
            self._generation.account.completion_tokens = 0
        return self._generation.account.to_usage().model_dump()

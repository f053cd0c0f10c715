"""`/v1/completions`: prompts to continue."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from json.encoder import encode_basestring_ascii as quote
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from jaxserve.errors import InvalidRequestError
from jaxserve.request import Request as EngineRequest
from jaxserve.request import RequestOutput, Task, TokenLogprobs
from jaxserve.server.answers import AnswerReader, respond
from jaxserve.server.body import prepare, read_body
from jaxserve.server.errors import ApiError
from jaxserve.server.events import Update, join_texts
from jaxserve.server.generation import Account, name_requests
from jaxserve.server.logprobs import CompletionTokens, to_prompt_logprobs
from jaxserve.server.openapi import document
from jaxserve.server.prompts import (
    check_count,
    check_length,
    count_prompts,
    list_prompts,
    make_params,
    name_fields,
    name_form,
    read_form,
    rename_field,
)
from jaxserve.server.protocol.completions import Completion, CompletionRequest
from jaxserve.server.server_state import ServerState, get_state
from jaxserve.server.stream import DONE, make_chunk_writer, render_error

router = APIRouter()


@router.post("/v1/completions", **document(CompletionRequest, Completion, streams=True))
async def create_completion(http: Request) -> Response:
    """Continues one prompt or many."""
    state = get_state(http)
    body = await read_body(http, CompletionRequest, state)
    model = state.check_model(http, body.model)
    check_body(body, state)
    with name_fields(list_names(body)):
        requests = await prepare(http, body, state, make_requests)
        requests = name_requests(requests, http)
        reader = AnswerReader(requests[0].params.n)
        writer = CompletionWriter(body, model, state, requests[0])
        return await respond(http, body, state, requests, reader, writer, operation="text_completion")


def list_names(body: CompletionRequest) -> dict[str, str]:
    """Returns the body's names of the engine's fields."""
    return {"prompt_token_ids": "prompt"} | name_form(body)


def check_body(body: CompletionRequest, state: ServerState) -> None:
    """Refuses conflicting fields, and what exceeds the server's limits.

    Raises:
        InvalidRequestError: names the field.
    """
    body.check_stream()
    check_count(body, state, count_prompts(body.prompt))
    if body.max_tokens == 0 and not body.echo and body.prompt_logprobs is None:
        raise InvalidRequestError("0 is only allowed with echo or prompt_logprobs", field="max_tokens", value=0)


def make_requests(body: CompletionRequest, state: ServerState, options: dict[str, Any]) -> list[EngineRequest]:
    """Returns one engine request for each prompt."""
    engine = state.engine
    most = 1 if body.max_tokens == 0 else body.max_tokens
    given = body.list_params(logprobs=body.logprobs, structured_outputs=read_form(body), max_tokens=most)
    params = make_params(given, engine.defaults)
    if body.echo and body.logprobs is not None and params.prompt_logprobs is None:
        params = replace(params, prompt_logprobs=body.logprobs)
    prompts = list_prompts(body.prompt, state.config.limits.max_prompts, "prompt")
    for prompt in prompts:
        check_length(prompt.get("prompt"), state, "prompt", cuts=body.truncate_prompt_tokens is not None)
    if body.add_special_tokens is False and engine.tokenizer is not None:
        encode = engine.tokenizer.encode
        for prompt in prompts:
            if "prompt" in prompt:
                prompt["prompt_token_ids"] = encode(prompt["prompt"], add_special_tokens=False)
    task = Task.READ if body.max_tokens == 0 else Task.GENERATE
    return [engine.requests.make(prompt, params, task=task, **options) for prompt in prompts]


class CompletionWriter:
    """Writes an answer as a completion, whose choices are numbered across its prompts."""

    done = DONE
    ping = None

    def __init__(self, body: CompletionRequest, model: str, state: ServerState, request: EngineRequest) -> None:
        self._body, self._num_logprobs = body, request.params.logprobs
        self._chunks = make_chunk_writer(body, model, state, request, prefix="cmpl", kind="text_completion")
        self._tokens: dict[int, CompletionTokens] = {}  # by choice
        self._tokenizer = tokenizer = state.engine.tokenizer
        self._skips_special = request.params.skip_special_tokens
        self._special_ids = frozenset() if tokenizer is None else tokenizer.special_ids
        self._is_plain = not (
            body.wants_usage_so_far or self._num_logprobs is not None or body.echo or body.return_token_ids
        )

    def render_error(self, error: ApiError) -> bytes:
        """Returns the event that ends a failed stream."""
        return render_error(rename_field(error, list_names(self._body)))

    def write(self, update: Update, usage: Account) -> list[bytes]:
        """Returns the chunk of an update, if it has one."""
        if self._is_plain and update.ended is None:
            if not (text := join_texts(update.events)):
                return []
            choice = f'{{"index":{update.choice},"text":{quote(text)},"logprobs":null,"finish_reason":null}}'
            return [f"{self._chunks.head}{choice}{self._chunks.tail}".encode()]
        shown = usage.to_usage() if self._body.wants_usage_so_far else None
        return [self._chunks.write(self._render(update), shown)]

    def end(self, usage: Account, metrics: Mapping[str, Any]) -> Sequence[bytes]:
        """Returns the chunk with the usage, if it is shown."""
        return self._chunks.end(usage.to_usage(), metrics)

    def fold(self, updates: Sequence[Update], usage: Account, metrics: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the whole answer."""
        choices = [self._render(update) for update in sorted(updates, key=lambda update: update.choice)]
        return {**self._chunks.values, "choices": choices, "usage": usage.to_usage(), **metrics}

    def _render(self, update: Update) -> dict[str, Any]:
        """Returns the new part of one choice."""
        completion, output, ended = update.completion, update.output, update.ended
        text, token_ids, logprobs = join_texts(update.events), completion.token_ids, completion.logprobs
        prompt = self._read_prompt(output) if update.begins and self._body.echo else None
        text = (prompt or "") + text
        found: dict[str, Any] = {"index": update.choice, "text": text, "logprobs": None}
        if logprobs is not None:
            found["logprobs"] = self._list_tokens(update, prompt, token_ids, logprobs).take(
                text, is_last=ended is not None
            )
        found["finish_reason"] = ended.reason if ended is not None else None
        if ended is not None:
            found["stop_reason"] = ended.stop_reason
        if self._body.return_token_ids:
            found["token_ids"] = token_ids
            found["prompt_token_ids"] = output.prompt_token_ids if update.begins else None
        if self._body.prompt_logprobs is not None and ended is not None:
            found["prompt_logprobs"] = to_prompt_logprobs(output.prompt_logprobs)
        return found

    def _list_tokens(
        self, update: Update, prompt: str | None, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]
    ) -> CompletionTokens:
        """Returns the tokens of a choice with those of an update, and the echoed prompt's in front of the first."""
        tokens = self._tokens.get(update.choice)
        if tokens is None:
            hidden = self._special_ids if self._skips_special else frozenset()
            tokens = self._tokens[update.choice] = CompletionTokens(self._num_logprobs or 0, hidden)
        if prompt is not None:
            output, skips = update.output, self._skips_in_prompt(update.output)
            ids = output.prompt_token_ids
            first = "" if self._tokenizer is None else self._tokenizer.split_text(ids, skips)[0]
            hidden = self._special_ids if skips else frozenset()
            assert output.prompt_logprobs is not None  # an echo with log-probabilities asks for them
            tokens.add_prompt(prompt, ids, output.prompt_logprobs, first, hidden)
        tokens.add(token_ids, logprobs)
        return tokens

    def _read_prompt(self, output: RequestOutput) -> str:
        if output.prompt is not None or self._tokenizer is None:
            return output.prompt or ""
        return self._tokenizer.decode(output.prompt_token_ids, self._skips_in_prompt(output))

    def _skips_in_prompt(self, output: RequestOutput) -> bool:
        """Whether the echoed prompt omits special tokens: as the answer does, and always if it was given as text."""
        return self._skips_special or output.prompt is not None

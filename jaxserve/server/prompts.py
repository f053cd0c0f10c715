"""Translates prompts and output formats of bodies into the engine's arguments, and its errors into their fields."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from jaxserve.engine.generation_config import GenerationDefaults
from jaxserve.errors import InvalidRequestError
from jaxserve.sampling_params import SamplingParams
from jaxserve.server.errors import ApiError
from jaxserve.server.protocol.chat import ChatCompletionRequest
from jaxserve.server.protocol.completions import CompletionRequest
from jaxserve.server.server_state import ServerState
from jaxserve.structured_params import StructuredOutputsParams

_MOST_CHARACTERS = 16  # that a prompt may have per token of context; text has 3 to 5
_MOST_CUT = 4  # times as many if the prompt is to be truncated
_PLAIN_FORM = dict.fromkeys(
    ("structured_outputs.json_object", "structured_outputs.structural_tag", "structured_outputs"), "response_format"
)


@contextmanager
def name_fields(names: Mapping[str, str]) -> Iterator[None]:
    """Renames the engine's fields in errors to those of the body, by the mapping `names`.

    Raises:
        InvalidRequestError, ApiError: the error raised inside, with the body's field name.
    """
    try:
        yield
    except InvalidRequestError as error:
        field = _translate(error.field, names)
        message = str(error).removeprefix(f"{error.field}: ")
        raise InvalidRequestError(message, field=field, value=error.value) from error
    except ApiError as refusal:
        raise rename_field(refusal, names) from refusal.__cause__


def rename_field(refusal: ApiError, names: Mapping[str, str]) -> ApiError:
    """Returns the same refusal with the body's name of the engine's field, also where it says which fields conflict."""
    if refusal.param is not None:
        before, refusal.param = refusal.param, _translate(refusal.param, names)
        if before == "structured_outputs":
            refusal.message = refusal.message.replace(before, refusal.param)
    return refusal


def name_form(body: Any) -> dict[str, str]:
    """Returns the body's names of the engine's structured output, where it is given in OpenAI's field."""
    if body.response_format is None or body.structured_outputs is not None:
        return {}
    return {"structured_outputs.json": "response_format.json_schema.schema", **_PLAIN_FORM}


def name_calls(place: str = "tools") -> dict[str, str]:
    """Returns the body's name of a form that calls impose: a schema, or a grammar in the model's own format."""
    return dict.fromkeys(("structured_outputs.json", "structured_outputs.grammar", "structured_outputs"), place)


def _translate(field: str, names: Mapping[str, str]) -> str:
    for inner, outer in names.items():
        rest = field.removeprefix(inner)
        if field.startswith(inner) and rest[:1] in ("", ".", "["):
            return outer + rest
    return field


def list_prompts(prompt: Any, most: int, field: str) -> list[dict[str, Any]]:
    """Returns each prompt as `RequestFactory` takes it, from any form that OpenAI allows.

    Raises:
        InvalidRequestError: there is none, or too many.
    """
    if isinstance(prompt, str):
        return [{"prompt": prompt}]
    if prompt and isinstance(prompt[0], int):
        return [{"prompt_token_ids": prompt}]
    if not 1 <= len(prompt) <= most:
        raise InvalidRequestError(f"must hold 1 to {most} prompts, got {len(prompt)}", field=field, value=len(prompt))
    return [{"prompt": each} if isinstance(each, str) else {"prompt_token_ids": each} for each in prompt]


def check_length(texts: Any, state: ServerState, field: str, *, cuts: bool = False) -> None:
    """Refuses text that is certainly too long before it is tokenized.

    Args:
        texts: a string, or a JSON value; templates also render its keys and numbers.
        cuts: the prompt will be truncated.

    Raises:
        InvalidRequestError: begins like the engine's own error about prompts that are too long.
    """
    waiting, count = [texts], 0
    while waiting:
        value = waiting.pop()
        count += len(value) if isinstance(value, str) else 1
        if isinstance(value, dict):
            waiting += value
            waiting += value.values()
        elif isinstance(value, list):
            waiting += value
    context = state.engine.max_model_len
    most = context * _MOST_CHARACTERS * (_MOST_CUT if cuts else 1)
    if count > most:
        message = f"This model's maximum context length is {context} tokens, and {count} characters are far too many"
        raise InvalidRequestError(f"{message}; at most {most} are read", field=field, value=count)


def count_prompts(prompt: Any) -> int:
    """Returns the number of prompts in any form that OpenAI allows."""
    return 1 if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)) else len(prompt)


def check_count(body: ChatCompletionRequest | CompletionRequest, state: ServerState, num_prompts: int = 1) -> None:
    """Refuses more completions than the server allows, per prompt and in total."""
    most = state.config.limits.max_n
    if body.n is not None and body.n > most:
        raise InvalidRequestError(f"at most {most}, got {body.n}", field="n", value=body.n)
    if body.best_of is not None and body.best_of != (body.n or 1):
        message = f"must equal n, got {body.best_of}"
        raise InvalidRequestError(message, field="best_of", value=body.best_of)
    n, most = body.n or 1, state.max_sequences
    if num_prompts * n > most:
        what = f"{num_prompts} prompts x n={n}" if num_prompts > 1 else f"n={n}"
        message = f"{what} are {num_prompts * n} sequences, and one request may have {most} (max_sequences_per_request)"
        raise InvalidRequestError(message, field="prompt" if num_prompts > most else "n", value=num_prompts * n)


def read_form(body: Any) -> StructuredOutputsParams | None:
    """Returns the structured output that the body asks for, in either field; None for plain text."""
    if body.response_format is not None and body.structured_outputs is not None:
        message = "conflicts with response_format; give only one"
        raise InvalidRequestError(message, field="structured_outputs", value=None)
    given = body.response_format or body.structured_outputs
    return None if given is None else given.to_params()


def make_params(given: Mapping[str, Any], defaults: GenerationDefaults) -> SamplingParams:
    """Returns the parameters of a request, with the model's defaults for those that it leaves out.

    Raises:
        InvalidRequestError: names the field that is out of range.
    """
    most = defaults.limit_tokens(given.get("max_tokens"))
    found = {**given, "max_tokens": most}
    if most is not None:  # an answer may be shorter than the default min_tokens
        found.setdefault("min_tokens", min(defaults.params.min_tokens, max(0, most)))
    return replace(defaults.params, **found)

"""Checks of texts, token ids and arguments, before a tokenizer sees them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jaxserve.errors import InvalidRequestError, shorten

_LISTS = "ids are lists of int; make an array of them yourself"
_LENGTHS = "nothing is padded or cut here; SamplingParams(truncate_prompt_tokens=N) keeps the end of a prompt"
# Arguments that scripts pass to transformers' tokenizers: the accepted values, and the hint in the error for others.
_ARGUMENTS: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "clean_up_tokenization_spaces": ((None, False), "text stays as the tokens spell it"),
    "documents": ((None,), "put documents into messages"),
    "max_length": ((None,), _LENGTHS),
    "padding": ((None, False, "do_not_pad"), _LENGTHS),
    "return_tensors": ((None,), _LISTS),
    "text_pair": ((None,), "give one text, or a list of texts"),
    "truncation": ((None, False, "do_not_truncate"), _LENGTHS),
}


def refuse_arguments(given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments without those of transformers that have no effect here.

    Raises:
        InvalidRequestError: an argument of transformers has a value that would change something.
    """
    for name in given.keys() & _ARGUMENTS.keys():
        harmless, hint = _ARGUMENTS[name]
        if not any(given[name] is value or given[name] == value for value in harmless):
            message = f"only {' or '.join(map(repr, harmless))} is accepted, got {shorten(given[name])}: {hint}"
            raise InvalidRequestError(message, field=name, value=given[name])
    return {name: value for name, value in given.items() if name not in _ARGUMENTS}


def refuse_all_arguments(given: Mapping[str, Any]) -> None:
    """Raises InvalidRequestError for any argument but those of transformers at values that change nothing."""
    for name, value in refuse_arguments(given).items():
        message = f"not an argument here; of transformers' others, {', '.join(_ARGUMENTS)} may be given unset"
        raise InvalidRequestError(message, field=name, value=value)


def require_text(text: object, field: str) -> str:
    """Returns the text if it is a string that UTF-8 can encode.

    Raises:
        InvalidRequestError: it has another type, or holds a lone surrogate.
    """
    if not isinstance(text, str):
        raise InvalidRequestError(
            f"must be a string, got {type(text).__name__} {shorten(text)}", field=field, value=text
        )
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            where = f"character {error.start} is the lone surrogate U+{ord(text[error.start]):04X}"
            raise InvalidRequestError(f"is not valid Unicode: {where}", field=field) from None
    return text


def require_token_ids(ids: Sequence[int]) -> None:
    """Raises InvalidRequestError if an id is negative or not an integer."""
    for token_id in ids:
        if not isinstance(token_id, int) or token_id < 0:
            raise InvalidRequestError(
                f"must be integers of at least 0, got {shorten(token_id)}", field="token_ids", value=token_id
            )

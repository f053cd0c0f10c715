"""Checks of texts and token ids, before a tokenizer sees them."""

from __future__ import annotations

from collections.abc import Sequence

from jaxserve.errors import InvalidRequestError, shorten


def require_text(text: object, field: str) -> str:
    """Returns the text if it is a string that UTF-8 can encode.

    Raises:
        InvalidRequestError: it has another type, or holds a lone surrogate.
    """
    if not isinstance(text, str):
        raise InvalidRequestError(f"must be a string, got {shorten(text)}", field=field, value=text)
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

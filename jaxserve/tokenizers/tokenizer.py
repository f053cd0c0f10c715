"""What every tokenizer offers to the rest of jaxserve."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from jaxserve.errors import InvalidRequestError, shorten
from jaxserve.tokenizers.stream import DetokenizerStream


class Tokenizer(Protocol):
    """Text to token ids and back. Immutable after loading and safe to use from several threads at once."""

    vocab_size: int  # largest token id + 1; a model's embedding may have more rows
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]  # the tokenizer's own first, then those of generation_config.json
    special_tokens: Mapping[str, int]  # text to id of every token that plain text never becomes
    special_ids: frozenset[int]  # the ids of `special_tokens`: hidden by skip_special_tokens
    special_pattern: re.Pattern[str]  # matches the text of any special token, the longest first
    named_tokens: Mapping[str, str]  # bos_token, eos_token, ... to their text: variables of a chat template
    chat_template: str | None

    def encode(
        self, text: str, add_special_tokens: bool = True, *, allow_special: bool = False, escape: str = ""
    ) -> list[int]:
        """Returns the ids of a text.

        Args:
            text: any Unicode text, also empty.
            add_special_tokens: put BOS (and EOS) around it where the checkpoint's own tokenizer does.
            allow_special: turn the text of a special token into that token. Off for a user's text, on for a rendered
                chat template.
            escape: with `allow_special`, one character that stands inside the text of each special token that has to
                stay plain text; it is removed everywhere before the text is encoded.

        Raises:
            InvalidRequestError: `text` is no string, holds lone surrogates, or spells a special token that this
                tokenizer cannot keep as plain text.
        """
        ...

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Returns the text of ids: all that a fresh `new_stream` gives for them.

        Ids that are not in the vocabulary have no text, as in `tokenizers`.

        Raises:
            InvalidRequestError: an id is negative or no integer.
        """
        ...

    def new_stream(
        self,
        skip_special_tokens: bool = True,
        prompt_ids: Sequence[int] = (),
        spaces_between_special_tokens: bool = True,
    ) -> DetokenizerStream:
        """Returns a detokenizer for output that continues a prompt.

        Args:
            skip_special_tokens: whether special tokens have no text.
            prompt_ids: the tokens of the prompt.
            spaces_between_special_tokens: where special tokens are shown, False hides the space that some decoders
                put between two adjacent added tokens.

        Raises:
            TokenizerError: this tokenizer's decoder needs the whole text (its message names the decoder).
        """
        ...

    def list_token_bytes(self) -> list[bytes]:
        """Returns what each token id adds to a text that has begun, special tokens as their text; b"" without a token.

        Raises:
            TokenizerError: this tokenizer's decoder needs the whole text (its message names the decoder).
        """
        ...


def compile_special_pattern(texts: Iterable[str]) -> re.Pattern[str]:
    """Returns a pattern that matches any of the texts, the longest first; nothing when there are none."""
    longest_first = sorted(texts, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")


def require_text(text: object, field: str) -> str:
    """Returns the text if it is a string that UTF-8 can hold.

    Raises:
        InvalidRequestError: it is another type, or holds a lone surrogate.
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
    """Refuses ids that no vocabulary can hold.

    Raises:
        InvalidRequestError: an id is negative or no integer.
    """
    for token_id in ids:
        if not isinstance(token_id, int) or token_id < 0:
            raise InvalidRequestError(
                f"must be integers of at least 0, got {shorten(token_id)}", field="token_ids", value=token_id
            )

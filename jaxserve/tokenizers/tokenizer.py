"""The interface of every tokenizer."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from jaxserve.errors import InvalidRequestError, TokenizerError
from jaxserve.tokenizers.checks import require_text, require_token_ids
from jaxserve.tokenizers.stream import DetokenizerStream


@dataclass(frozen=True, slots=True)
class PairForm:
    """How two texts are read together: the ids before, between and behind them, and the types of these and of texts."""

    around: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
    types: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
    text_types: tuple[int, int]


class Tokenizer(ABC):
    """Text to token ids and back. Immutable after loading and safe to use from several threads at once.

    This is the part that jaxserve calls. `TransformersTokenizer` adds what scripts written for transformers call.
    """

    vocab_size: int  # largest token id + 1; a model's embedding may have more rows
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]  # the tokenizer's own first, then those of generation_config.json
    special_tokens: Mapping[str, int]  # text to id; plain text never becomes one of them
    special_ids: frozenset[int]  # the ids of `special_tokens`: hidden by skip_special_tokens
    special_pattern: re.Pattern[str]  # matches the text of any special token, the longest first
    named_tokens: Mapping[str, str]  # bos_token, eos_token, ... to text: variables of a chat template
    chat_template: str | None
    _prefix: Sequence[int]  # ids that `add_special_tokens` puts before a text
    _suffix: Sequence[int]  # ids that it puts after a text
    _pair: PairForm | None = None  # None where the files do not say

    def encode(
        self, text: str, add_special_tokens: bool = True, *, allow_special: bool = False, escape: str = ""
    ) -> list[int]:
        """Returns the ids of a text.

        Args:
            text: any Unicode text, also empty.
            add_special_tokens: put BOS (and EOS) around it where the checkpoint's own tokenizer does.
            allow_special: turn the text of a special token into that token, as transformers does. Off for users' text,
                on for a rendered chat template.
            escape: with `allow_special`, a character inside the text of each special token that must stay plain text;
                it is removed everywhere before encoding.

        Raises:
            InvalidRequestError: `text` is not a string, holds lone surrogates, or spells a special token that this
                tokenizer cannot keep as plain text; or the tokenizer's library fails on it.
        """
        ids = self._encode(require_text(text, "prompt"), allow_special, escape)
        return [*self._prefix, *ids, *self._suffix] if add_special_tokens else ids

    def encode_start(self, text: str, most: int) -> list[int]:
        """Returns at most so many ids: those of the text's start, between those that `encode` puts around.

        Raises InvalidRequestError as `encode` does.
        """
        ids = self._encode(require_text(text, "prompt"), allow_special=False, escape="")
        return [*self._prefix, *ids[: max(most - len(self._prefix) - len(self._suffix), 0)], *self._suffix]

    def encode_pair(
        self, first: str, second: str, most: int | None = None, most_of_second: int | None = None
    ) -> tuple[list[int], list[int]]:
        """Returns the ids of two texts read together, and the type of each, as the checkpoint's own tokenizer does.

        Args:
            most: at most so many ids. The ends of the texts are cut, the longer one's first.
            most_of_second: at most so many ids of the second text, before that.

        Raises:
            InvalidRequestError: as `encode`; or `most` has no room for the tokens around the texts.
            TokenizerError: this tokenizer does not say how pairs are encoded.
        """
        form = self._pair
        if form is None:
            raise TokenizerError(
                "pairs of texts need a tokenizer.json, which says how they are read", field="tokenizer"
            )
        texts = [self._encode(require_text(text, "prompt"), allow_special=False, escape="") for text in (first, second)]
        texts[1] = texts[1][:most_of_second]
        if most is not None:
            room = most - sum(map(len, form.around))
            if room < 0:
                message = f"{most} tokens have no room for the {most - room} around a pair"
                raise InvalidRequestError(message, field="truncate_prompt_tokens", value=most)
            texts = [text[:count] for text, count in zip(texts, _cut_longest(*map(len, texts), room), strict=True)]
        ids, types = [*form.around[0]], [*form.types[0]]
        for at, text in enumerate(texts):
            ids += [*text, *form.around[at + 1]]
            types += [*[form.text_types[at]] * len(text), *form.types[at + 1]]
        return ids, types

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """Returns the text of ids: what a new stream gives for them.

        Ids beyond the vocabulary have no text, as in `tokenizers`.

        Raises:
            InvalidRequestError: an id is negative or not an integer, or the tokenizer's library fails.
        """
        require_token_ids(ids)
        return self._decode(ids, skip_special_tokens)

    def _decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        stream = self.new_stream(skip_special_tokens)
        return stream.push_many(ids) + stream.flush()

    def split_text(self, ids: Sequence[int], skip_special_tokens: bool = False) -> list[str]:
        """Returns the text of each token in its place, as a `TokenNamer` gives it.

        Joined they are `decode(ids, skip_special_tokens)`. Special tokens have their text even if `decode` leaves it
        out. A character that stays incomplete belongs to the last token. If the decoder needs the whole text, each
        token is decoded alone.

        Raises:
            InvalidRequestError: as `decode_token`.
        """
        try:
            namer = TokenNamer(self, skip_special_tokens)
        except TokenizerError:
            return [self.decode_token(token_id) for token_id in ids]
        texts = [namer.name(token_id) for token_id in ids]
        if texts:
            texts[-1] += namer.flush()
        return texts

    @abstractmethod
    def _encode(self, text: str, allow_special: bool, escape: str) -> list[int]:
        """Returns the ids of a valid text, without prefix and suffix."""

    @abstractmethod
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
            TokenizerError: this tokenizer's decoder needs the whole text.
        """

    @abstractmethod
    def decode_token(self, token_id: int) -> str:
        """Returns the text that a token adds inside a text, with its space; U+FFFD for part of a character.

        Raises:
            InvalidRequestError: the tokenizer's library fails on it.
        """

    @abstractmethod
    def list_token_bytes(self) -> list[bytes]:
        """Returns the bytes that each token id adds inside a text; special tokens as their text, b"" without a token.

        Raises:
            TokenizerError: this tokenizer's decoder needs the whole text.
        """

    @abstractmethod
    def _find_id(self, token: str) -> int | None:
        """Returns the id of a token by its spelling in the vocabulary, None if there is none."""

    def _find_named(self, name: str) -> int | None:
        text = self.named_tokens.get(name)
        return None if text is None else self._find_id(text)


class TokenNamer:
    """Gives the text of each token of an output in its place. Joined, these are the output's text.

    A token that leaves a character incomplete has no text; the one that completes it has the character. A special token
    that the output's text omits has its own text all the same.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        skip_special_tokens: bool,
        prompt_ids: Sequence[int] = (),
        spaces_between_special_tokens: bool = True,
    ) -> None:
        """The arguments are those of `Tokenizer.new_stream`, and so is the error."""
        self._tokenizer = tokenizer
        self._omitted = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._ends_omitted = False  # the last token has no place in the text
        self._stream = tokenizer.new_stream(skip_special_tokens, prompt_ids, spaces_between_special_tokens)

    def name(self, token_id: int) -> str:
        """Returns the text of the next token."""
        self._ends_omitted = token_id in self._omitted
        return self._tokenizer.decode_token(token_id) if self._ends_omitted else self._stream.push(token_id)

    def flush(self) -> str:
        """Returns what the last token gets at the end of the text: U+FFFD for an incomplete character, else ""."""
        return "" if self._ends_omitted else self._stream.flush()


def compile_special_pattern(texts: Iterable[str]) -> re.Pattern[str]:
    """Returns a pattern that matches any of the texts, the longest first; without texts it matches nothing."""
    longest_first = sorted(texts, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")


def _cut_longest(first: int, second: int, room: int) -> tuple[int, int]:
    """Returns the lengths of two texts that fit `room` together, as `tokenizers` cuts them: the longer one first."""
    if first + second <= room:
        return first, second
    if first > second:
        return _cut_longest(second, first, room)[::-1]
    return (first, room - first) if 2 * first <= room else (room // 2, room - room // 2)

"""Log-probabilities in OpenAI's formats."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import Any

from jaxserve.errors import TokenizerError
from jaxserve.request import Logprob, TokenLogprobs
from jaxserve.tokenizers import Tokenizer

_MOST_SKIPPED = 64  # characters of a prompt that a tokenizer drops in one place
_LEAST = -9999.0  # replaces minus infinity, which JSON does not have


class TokenTexts:
    """The bytes of each token: a character may span several tokens."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._bytes: Sequence[bytes] | None = None

    def find_bytes(self, token_id: int, text: str) -> list[int]:
        """Returns the bytes of a token's text, or the token's own where these are part of a character."""
        if self._bytes is None:
            try:
                self._bytes = self._tokenizer.list_token_bytes() if self._tokenizer is not None else ()
            except TokenizerError:
                self._bytes = ()
        own = self._bytes[token_id] if token_id < len(self._bytes) else b""
        return list(own if _is_broken(own) or ("\ufffd" in text and own) else text.encode("utf-8", "replace"))

    def to_chat(self, token_ids: Sequence[int], found: Sequence[TokenLogprobs], count: int) -> list[dict[str, Any]]:
        """Returns `choices[].logprobs.content`: each token with the `count` most likely ones in its place."""
        return [
            {
                **self._describe(token_id, entries[token_id]),
                "top_logprobs": [self._describe(other, entries[other]) for other in _list_likeliest(entries, count)],
            }
            for token_id, entries in zip(token_ids, found, strict=True)
        ]

    def _describe(self, token_id: int, logprob: Logprob) -> dict[str, Any]:
        text = _name(token_id, logprob)
        return {"token": text, "logprob": _bound(logprob.logprob), "bytes": self.find_bytes(token_id, text)}


class CompletionTokens:
    """`choices[].logprobs` of one choice of a completion, chunk by chunk.

    A token is shown once the text in front of it is. A stop string that is found later, and takes back text that was
    held, then moves no offset that was streamed.

    Args:
        count: likeliest tokens of each place; -1 for all.
        hidden: ids of tokens that the text omits.
    """

    def __init__(self, count: int, hidden: Set[int]) -> None:
        self._count, self._hidden = count, hidden
        self._num_shown = 0  # characters of the text
        self._end = 0  # characters in front of the next token
        self._lines: list[_Line] = []  # not shown yet

    def add(self, token_ids: Sequence[int], found: Sequence[TokenLogprobs]) -> None:
        """Adds tokens of the answer with their entries."""
        for token_id, entries in zip(token_ids, found, strict=True):
            line = self._make_line(token_id, entries)
            line.offset = self._end
            self._lines.append(line)
            if token_id not in self._hidden:
                self._end += len(entries[token_id].decoded_token or "")

    def add_prompt(
        self,
        prompt: str,
        token_ids: Sequence[int],
        found: Sequence[TokenLogprobs | None],
        first: str,
        hidden: Set[int],
    ) -> None:
        """Adds the tokens of the echoed prompt, in front of all others.

        The tokenizer may have changed the text, as by a space in front, so each token is looked for.

        Args:
            found: entries of each token but the first.
            first: text of the first one.
            hidden: ids of tokens that the prompt omits.
        """
        for token_id, entries in zip(token_ids, found, strict=True):
            line = _Line(first) if entries is None else self._make_line(token_id, entries)
            text = "" if token_id in hidden else line.token
            at = prompt.find(text, self._end, self._end + len(text) + _MOST_SKIPPED)
            line.offset = self._end if at < 0 else at
            self._lines.append(line)
            self._end = min(line.offset + len(text), len(prompt))
        self._end = len(prompt)

    def take(self, text: str, *, is_last: bool) -> dict[str, Any]:
        """Returns the tokens to show with the next part of the text; all that are left with the last one."""
        self._num_shown += len(text)
        count = len(self._lines)
        if is_last:
            for line in self._lines:  # behind a stop string
                line.offset = min(line.offset, self._num_shown)
        else:
            count = bisect_right(self._lines, self._num_shown, key=lambda line: line.offset)
        shown, self._lines = self._lines[:count], self._lines[count:]
        return {
            "text_offset": [line.offset for line in shown],
            "token_logprobs": [line.logprob for line in shown],
            "tokens": [line.token for line in shown],
            "top_logprobs": [line.likeliest for line in shown],
        }

    def _make_line(self, token_id: int, entries: TokenLogprobs) -> _Line:
        own = entries[token_id]
        return _Line(_name(token_id, own), _bound(own.logprob), _name_likeliest(token_id, entries, self._count))


@dataclass(slots=True)
class _Line:
    """A token of a completion."""

    token: str
    logprob: float | None = None  # None for the first token of a prompt
    likeliest: dict[str, float] | None = None
    offset: int = 0  # characters of the text in front of it


def to_prompt_logprobs(found: Sequence[TokenLogprobs | None] | None) -> list[dict[str, Any] | None] | None:
    """Returns vLLM's `prompt_logprobs`: one mapping from token id to its entry per token of the prompt."""
    if found is None:
        return None
    return [
        None
        if entries is None
        else {
            str(token_id): {"logprob": _bound(e.logprob), "rank": e.rank, "decoded_token": e.decoded_token}
            for token_id, e in entries.items()
        }
        for entries in found
    ]


def _list_likeliest(entries: TokenLogprobs, count: int) -> list[int]:
    """Returns the ids of the `count` most likely tokens; `entries` begins with the sampled one, whatever its rank."""
    ranked = sorted(entries, key=lambda token_id: entries[token_id].rank or 0)
    return ranked if count < 0 else ranked[:count]


def _name_likeliest(token_id: int, entries: TokenLogprobs, count: int) -> dict[str, float]:
    """Returns the log-probabilities of the `count` most likely tokens and the sampled one, by text.

    A token whose text is another's, too, goes by its id.
    """
    chosen = _name(token_id, entries[token_id])
    shown: dict[str, float] = {}
    for other in dict.fromkeys((*_list_likeliest(entries, count), token_id)):
        name = _name(other, entries[other])
        if other != token_id and (name == chosen or name in shown):  # parts of characters look alike
            name = _name_by_id(other)
        shown[name] = _bound(entries[other].logprob)
    return shown


def _name(token_id: int, logprob: Logprob) -> str:
    return logprob.decoded_token if logprob.decoded_token is not None else _name_by_id(token_id)


def _name_by_id(token_id: int) -> str:
    return f"token_id:{token_id}"


def _is_broken(data: bytes) -> bool:
    """Whether bytes are part of a character."""
    try:
        data.decode()
    except UnicodeDecodeError:
        return True
    return False


def _bound(value: float) -> float:
    return max(value, _LEAST)

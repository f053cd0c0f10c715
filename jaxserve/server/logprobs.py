"""Log-probabilities in OpenAI's formats."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxserve.errors import TokenizerError
from jaxserve.request import Logprob, TokenLogprobs
from jaxserve.tokenizers import Tokenizer

_LEAST = -9999.0  # replaces minus infinity, which JSON does not have


class TokenTexts:
    """The bytes of each token: a character may span several tokens."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._bytes: Sequence[bytes] | None = None

    def find_bytes(self, token_id: int, text: str) -> list[int]:
        """Returns the token's own bytes, which may be part of a character."""
        if self._bytes is None:
            try:
                self._bytes = self._tokenizer.list_token_bytes() if self._tokenizer is not None else ()
            except TokenizerError:
                self._bytes = ()
        return list(self._bytes[token_id] if token_id < len(self._bytes) else text.encode("utf-8", "replace"))

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


def to_completion(
    token_ids: Sequence[int],
    found: Sequence[TokenLogprobs | None],
    count: int,
    offset: int,
    first: str = "",
    hidden: frozenset[int] = frozenset(),
    echoed: str = "",
) -> dict[str, Any]:
    """Returns `choices[].logprobs` of a completion.

    Args:
        found: entries of each token; None for the first token of a prompt.
        offset: characters before the first token.
        first: text of the first token if it has no entry.
        hidden: ids of tokens that the answer's text omits.
        echoed: the prompt before the answer; a hidden token counts where the prompt's text contains it.
    """
    tokens: list[str] = []
    values: list[float | None] = []
    tops: list[dict[str, float] | None] = []
    offsets: list[int] = []
    for token_id, entries in zip(token_ids, found, strict=True):
        offsets.append(offset)
        if entries is None:
            name, value, top = first, None, None
        else:
            name, value = _name(token_id, entries[token_id]), _bound(entries[token_id].logprob)
            top = _name_likeliest(token_id, entries, count)
        tokens.append(name)
        values.append(value)
        tops.append(top)
        offset += len(name) if token_id not in hidden or echoed.startswith(name, offset) else 0
    return {
        "text_offset": offsets,
        "token_logprobs": values,
        "tokens": tokens,
        "top_logprobs": tops if count else None,
    }


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
    return ranked[:count]


def _name_likeliest(token_id: int, entries: TokenLogprobs, count: int) -> dict[str, float]:
    """Returns the log-probabilities of the `count` most likely tokens and the sampled one, by text."""
    shown: dict[str, float] = {}
    for other in (*_list_likeliest(entries, count), token_id):
        shown.setdefault(_name(other, entries[other]), _bound(entries[other].logprob))  # the more likely of equal texts
    return shown


def _name(token_id: int, logprob: Logprob) -> str:
    return logprob.decoded_token if logprob.decoded_token is not None else f"token_id:{token_id}"


def _bound(value: float) -> float:
    return max(value, _LEAST)

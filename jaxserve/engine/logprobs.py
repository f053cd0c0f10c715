"""From a step's arrays of log-probabilities to `TokenLogprobs`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxserve.errors import InvalidRequestError, TokenizerError
from jaxserve.request import Logprob, Request, TokenLogprobs
from jaxserve.tokenizers import TokenNamer

if TYPE_CHECKING:
    from jaxserve.tokenizers import Tokenizer


class LogprobReader:
    """Reads lines of a step's log-probabilities (`StepOutputs`) and adds the tokens' text."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer

    def read(self, logprobs: Any, line: int, token_id: int, count: int, text: str | None = None) -> TokenLogprobs:
        """Returns the entries of `token_id`, then of the `count` likeliest tokens (-1: all).

        `text` is that of `token_id` in its place, as a namer gives it. Other tokens have their text inside a text, and
        so has this one without it.
        """
        text = self._text(token_id) if text is None else text
        if isinstance(logprobs, np.ndarray):
            return self._read_all(logprobs[line], token_id, count, text)
        values, ids, ranks = logprobs[0][line].tolist(), logprobs[1][line].tolist(), logprobs[2]
        found = {token_id: Logprob(values[0], int(ranks[line]), text)}
        for rank, (other, value) in enumerate(zip(ids[1 : count + 1], values[1 : count + 1], strict=True), 1):
            found.setdefault(other, Logprob(value, rank, self._text(other)))
        return found

    def open_namer(
        self, skip_special_tokens: bool, prompt_ids: Sequence[int] = (), spaces_between_special_tokens: bool = True
    ) -> TokenNamer | None:
        """Returns a namer of the tokens behind a prompt; None without a tokenizer, or if it cannot stream.

        See `Tokenizer.new_stream`.
        """
        if self._tokenizer is None:
            return None
        try:
            return TokenNamer(self._tokenizer, skip_special_tokens, prompt_ids, spaces_between_special_tokens)
        except TokenizerError:
            return None

    def name_prompt(self, request: Request) -> list[str | None]:
        """Returns the text of each token of a prompt in its place; all None if the tokenizer cannot give them.

        A prompt that was given as text contains none of its special tokens, whatever the request says of its output.
        """
        ids, skips = request.prompt_token_ids, request.params.skip_special_tokens or request.prompt is not None
        try:
            return [None] * len(ids) if self._tokenizer is None else [*self._tokenizer.split_text(ids, skips)]
        except InvalidRequestError:  # the tokenizer cannot decode one of them
            return [None] * len(ids)

    def _read_all(self, line: np.ndarray, token_id: int, count: int, text: str | None) -> TokenLogprobs:
        """Like `read`, from one line [V] of the whole vocabulary."""
        chosen = float(line[token_id])
        found = {token_id: Logprob(chosen, 1 + int(np.sum(line > chosen)), text)}
        count = len(line) if count < 0 else min(count, len(line))
        likeliest = np.argsort(-line, kind="stable")[:count].tolist()
        for rank, other in enumerate(likeliest, 1):
            found.setdefault(other, Logprob(float(line[other]), rank, self._text(other)))
        return found

    def _text(self, token_id: int) -> str | None:
        if self._tokenizer is None:
            return None
        try:
            return self._tokenizer.decode_token(token_id)
        except InvalidRequestError:  # the tokenizer cannot decode this token; the step must not fail
            return None


def add_text(entries: TokenLogprobs, text: str) -> TokenLogprobs:
    """Returns the entries of a place with more text of its own token, which is the first."""
    token_id, logprob = next(iter(entries.items()))
    return {**entries, token_id: replace(logprob, decoded_token=(logprob.decoded_token or "") + text)}


class PromptLogprobs:
    """The log-probabilities of a prompt's tokens, collected chunk by chunk."""

    def __init__(self, request: Request, count: int, reader: LogprobReader) -> None:
        self._tokens, self._count, self._reader = request.prompt_token_ids, count, reader
        self._texts = reader.name_prompt(request)
        self.found: list[TokenLogprobs | None] = [None] * len(self._tokens)

    def add(self, logprobs: Any, first_line: int, start: int, length: int) -> None:
        """Adds the log-probabilities of the tokens after positions [start, start + length); lines from `first_line`."""
        for line, at in enumerate(range(start + 1, min(start + 1 + length, len(self._tokens))), first_line):
            self.found[at] = self._reader.read(logprobs, line, self._tokens[at], self._count, self._texts[at])

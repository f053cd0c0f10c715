"""From a step's arrays of log-probabilities to `TokenLogprobs`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from jaxserve.errors import InvalidRequestError
from jaxserve.request import Logprob, TokenLogprobs

if TYPE_CHECKING:
    from jaxserve.tokenizers import Tokenizer


class LogprobReader:
    """Reads lines of a step's log-probabilities (`StepOutputs`) and adds the tokens' text."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer

    def read(self, logprobs: Any, line: int, token_id: int, count: int) -> TokenLogprobs:
        """Returns the entries of `token_id`, then of the `count` likeliest tokens (-1: all)."""
        if isinstance(logprobs, np.ndarray):
            return self._read_all(logprobs[line], token_id, count)
        values, ids, ranks = logprobs[0][line].tolist(), logprobs[1][line].tolist(), logprobs[2]
        found = {token_id: Logprob(values[0], int(ranks[line]), self._text(token_id))}
        for rank, (other, value) in enumerate(zip(ids[1 : count + 1], values[1 : count + 1], strict=True), 1):
            found.setdefault(other, Logprob(value, rank, self._text(other)))
        return found

    def _read_all(self, line: np.ndarray, token_id: int, count: int) -> TokenLogprobs:
        """Like `read`, from one line [V] of the whole vocabulary."""
        chosen = float(line[token_id])
        found = {token_id: Logprob(chosen, 1 + int(np.sum(line > chosen)), self._text(token_id))}
        count = len(line) if count < 0 else min(count, len(line))
        likeliest = np.argsort(-line, kind="stable")[:count].tolist()
        for rank, other in enumerate(likeliest, 1):
            found.setdefault(other, Logprob(float(line[other]), rank, self._text(other)))
        return found

    def _text(self, token_id: int) -> str | None:
        if self._tokenizer is None:
            return None
        try:
            return self._tokenizer.decode([token_id], skip_special_tokens=False)
        except InvalidRequestError:  # the tokenizer cannot decode this token; the step must not fail
            return None


class PromptLogprobs:
    """The log-probabilities of a prompt's tokens, collected chunk by chunk."""

    def __init__(self, prompt_token_ids: tuple[int, ...], count: int, reader: LogprobReader) -> None:
        self._tokens, self._count, self._reader = prompt_token_ids, count, reader
        self.found: list[TokenLogprobs | None] = [None] * len(prompt_token_ids)

    def add(self, logprobs: Any, first_line: int, start: int, length: int) -> None:
        """Adds the log-probabilities of the tokens after positions [start, start + length); lines from `first_line`."""
        for offset in range(min(length, len(self._tokens) - 1 - start)):
            position = start + offset + 1
            self.found[position] = self._reader.read(logprobs, first_line + offset, self._tokens[position], self._count)

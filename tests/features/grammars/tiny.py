"""A tokenizer whose vocabulary can be checked by hand."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from jaxserve.tokenizers import DetokenizerStream
from jaxserve.tokenizers.stream import PieceTable

PIECES = [
    "<s>",
    "</s>",
    "</end>",
    "",
    *"abcdn01 ",
    "ab",
    "bc",
    "abc",
    "and",
    "na",
    "a",
    "10",
    "01",
    "é",
    b"\xc3",
    b"\xa9",
]


class TinyTokenizer:
    """Twenty-odd tokens: two that end, a hole, one text with two ids, and a character in one and in two tokens."""

    vocab_size = len(PIECES)
    bos_token_id: int | None = 0
    eos_token_ids = (1, 2)
    special_tokens: Mapping[str, int] = {"<s>": 0, "</s>": 1, "</end>": 2}
    special_ids = frozenset({0, 1, 2})
    special_pattern = re.compile("(?!)")
    named_tokens: Mapping[str, str] = {}
    chat_template = None

    def __init__(self) -> None:
        self._table = PieceTable(PIECES, PIECES, "replace")  # type: ignore[arg-type]
        self._longest_first = sorted(range(4, len(PIECES)), key=lambda i: -len(self.list_token_bytes()[i]))

    def list_token_bytes(self) -> list[bytes]:
        return self._table.list_bytes()

    def encode(
        self, text: str, add_special_tokens: bool = True, *, allow_special: bool = False, escape: str = ""
    ) -> list[int]:
        data, ids, tokens = text.encode(), [], self.list_token_bytes()
        while data:
            found = next((i for i in self._longest_first if data.startswith(tokens[i])), None)
            if found is None:
                return ids  # text outside the alphabet: the caller sees that bytes are missing
            ids.append(found)
            data = data[len(tokens[found]) :]
        return ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return b"".join(self.list_token_bytes()[i] for i in ids).decode(errors="replace")

    def new_stream(
        self,
        skip_special_tokens: bool = True,
        prompt_ids: Sequence[int] = (),
        spaces_between_special_tokens: bool = True,
    ) -> DetokenizerStream:
        return DetokenizerStream(self._table, skip_special_tokens=skip_special_tokens, prompt_ids=prompt_ids)

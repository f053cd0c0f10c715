"""Bounds the blanks between the tokens of one JSON text."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jaxserve.features.grammars.vocabulary import Vocabulary

if TYPE_CHECKING:
    import numpy as np

MOST_BLANKS = 160  # tokens in a row; eight levels indented by two, where each blank is a token of its own
_QUOTE, _BACKSLASH = b'"\\'


class BlankLimit:
    """The tokens of nothing but blanks that one JSON text may still have outside of strings.

    Each gap may have a line break and 32 blanks, so a model that prefers blanks could fill its context with them. Here
    a blank token takes one from an account, and any other token puts one back. Text without blanks never meets the
    limit, nor does usual indentation, which is one or two tokens of a line.
    """

    __slots__ = ("_is_escaped", "_is_in_string", "_room", "_vocabulary")

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._room = MOST_BLANKS
        self._is_in_string = self._is_escaped = False

    def accept(self, token_id: int) -> None:
        """Counts the next token of the text."""
        text = self._vocabulary.tokens[token_id]
        if not self._is_in_string and text.isspace():
            self._room -= 1
            return
        self._room = min(MOST_BLANKS, self._room + 1)
        if self._is_escaped or b'"' in text or b"\\" in text:
            self._scan(text)

    def _scan(self, text: bytes) -> None:
        for byte in text:
            if self._is_escaped:
                self._is_escaped = False
            elif byte == _QUOTE:
                self._is_in_string = not self._is_in_string
            elif byte == _BACKSLASH:
                self._is_escaped = self._is_in_string

    def narrow(self, row: np.ndarray) -> None:
        """Removes blank tokens from a mask (uint32 [V / 32]) at the limit, unless the grammar allows nothing else."""
        if self._room > 0 or self._is_in_string:
            return
        words = self._vocabulary.blank_words
        narrowed = row[: len(words)] & ~words
        if narrowed.any():
            row[: len(words)] = narrowed

    def copy(self) -> BlankLimit:
        """Returns an independent limit at the same position."""
        other = object.__new__(BlankLimit)
        for name in self.__slots__:
            setattr(other, name, getattr(self, name))
        return other

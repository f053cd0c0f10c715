"""Bounds the digits of the numbers of JSON, so that a model that prefers digits comes to an end."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jaxserve.features.grammars.vocabulary import Vocabulary

if TYPE_CHECKING:
    import numpy as np

MOST_WHOLE, MOST_FRACTION, MOST_EXPONENT = 20, 20, 3  # digits of a number
MOST_INTEGER = 19  # digits of an integer: 64 bits hold most of them
_LONGEST = {"whole": MOST_WHOLE, "fraction": MOST_FRACTION, "exponent": MOST_EXPONENT}
_OF_NUMBERS = frozenset(b"0123456789.eE+-")


class DigitLimit:
    """The digits that the number at the end of a text may still have.

    The text is JSON, or free text around it. The mask says which: behind a digit of a string or of free text a quote
    may follow, behind one of a number it may not. Where a schema allows nothing but digits, they stay allowed.
    """

    __slots__ = ("_count", "_part", "_vocabulary")

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._part, self._count = "whole", 0

    def accept(self, token_id: int) -> None:
        """Counts the next token of the text."""
        text = self._vocabulary.tokens[token_id]
        if not text or text[-1] not in _OF_NUMBERS:
            self._part, self._count = "whole", 0
            return
        for byte in text:
            if byte in b"0123456789":
                self._count += 1
            elif byte in b"." and self._part == "whole" and self._count:
                self._part, self._count = "fraction", 0
            elif byte in b"eE" and self._part != "exponent" and self._count:
                self._part, self._count = "exponent", 0
            elif byte not in b"+-" or self._part != "exponent" or self._count:
                self._part, self._count = "whole", 0

    def narrow(self, row: np.ndarray) -> None:
        """Removes tokens that begin with too many digits from a mask (uint32 [V / 32]), if it has other ones."""
        vocabulary, is_whole = self._vocabulary, self._part == "whole"
        room = _LONGEST[self._part] - self._count
        if room - is_whole >= vocabulary.longest_digits:  # the usual case
            return
        words = row[: len(vocabulary.blank_words)]
        if (words & vocabulary.list_beginning(b'"')).any():
            return
        if is_whole and not (words & vocabulary.list_beginning(b".")).any():
            room -= MOST_WHOLE - MOST_INTEGER
        narrowed = words & ~vocabulary.list_longer_digits(max(room, 0))
        if self._part == "fraction" and not narrowed.any():  # behind 0.00 a bound asks for another digit
            narrowed = words & ~vocabulary.list_beginning(b"0")
        if narrowed.any():
            words[:] = narrowed

    def copy(self) -> DigitLimit:
        """Returns an independent limit at the same position."""
        other = object.__new__(DigitLimit)
        other._vocabulary, other._part, other._count = self._vocabulary, self._part, self._count
        return other

"""The limits beside a grammar, which narrow its masks so that no text of JSON is endless."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from jaxserve.features.grammars.blanks import BlankLimit
from jaxserve.features.grammars.digits import DigitLimit
from jaxserve.features.grammars.vocabulary import Vocabulary
from jaxserve.structured_params import StructuredOutputsParams

if TYPE_CHECKING:
    import numpy as np


class Limit(Protocol):
    """Follows one text token by token."""

    def accept(self, token_id: int) -> None:
        """Counts the next token of the text."""
        ...

    def narrow(self, row: np.ndarray) -> None:
        """Removes tokens from a mask (uint32 [V / 32]), but never all of them."""
        ...

    def copy(self) -> Limit:
        """Returns an independent limit at the same position."""
        ...


LimitMaker = Callable[[Vocabulary], Limit]  # makes one at the start of a text


def choose_limits(params: StructuredOutputsParams) -> tuple[LimitMaker, ...]:
    """Returns the limits of a constraint: blanks of one JSON text with the usual whitespace, and digits of any JSON."""
    if not params.kind.startswith("json"):
        text = params.grammar or params.structural_tag or ""
        return (DigitLimit,) if "%json" in text or (params.structural_tag and "schema" in text) else ()
    has_own_blanks = params.disable_any_whitespace or params.whitespace_pattern is not None
    return (DigitLimit,) if has_own_blanks else (BlankLimit, DigitLimit)

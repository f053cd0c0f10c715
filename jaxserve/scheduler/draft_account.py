"""What drafts may cost: an account of what they gained and lost."""

from __future__ import annotations

_START, _MOST = 10.0, 16.0  # plain steps in the account, at the start and at most
_PLENTY = 0.5  # of the most


class DraftAccount:
    """Seconds that drafts may still cost.

    Verify steps pay in what they gain over plain steps. Whatever takes longer than plain steps would is taken out.
    Every step pays in a small share of its time, which bounds what drafts cost in the long run.

    Args:
        share: of the time of plain steps that drafts may cost.
    """

    def __init__(self, share: float) -> None:
        self.share = share
        self._balance = self._most = 0.0
        self.is_open = False  # plain steps were measured

    def add(self, plain: float, gain: float = 0.0) -> None:
        """Adds a step.

        Args:
            plain: seconds of a plain step.
            gain: seconds in which plain steps would have brought the step's tokens, less its own.
        """
        if not self.is_open:
            self._balance, self.is_open = _START * plain, True
        self._most = _MOST * plain
        self._balance = min(self._balance + self.share * plain + gain, self._most)

    def affords(self, seconds: float) -> bool:
        """Returns whether the balance is above zero and covers the cost, or is nearly as high as it can be."""
        return self._balance > 0 and self._balance >= min(seconds, 0.9 * self._most)

    @property
    def has_plenty(self) -> bool:
        return self.affords(_PLENTY * self._most)

    def halve(self) -> None:
        """Takes out half of what there is, so that a try after one that found nothing has to wait longer."""
        self._balance = min(self._balance, self._balance / 2)

"""What drafts may cost: an account of what they gained and lost."""

from __future__ import annotations

_START, _MOST = 10.0, 16.0  # at the start and at most
_PLENTY = 0.5  # of the most


class DraftAccount:
    """What drafts may still cost, in plain steps.

    Verify steps pay in what they gain over plain steps. Whatever takes longer than plain steps would is taken out.
    Every step pays in a small share, which bounds what drafts cost in the long run. The account is kept in steps, not
    in seconds, because single steps are long and short in turns, and what the machine does changes them all.

    Args:
        share: of a plain step, which each step pays in.
    """

    def __init__(self, share: float) -> None:
        self.share = share
        self._balance = 0.0
        self.is_open = False  # plain steps were measured

    def add(self, gain: float = 0.0) -> None:
        """Adds a step.

        Args:
            gain: plain steps that would have brought the step's tokens, less the time of the step in plain steps.
        """
        if not self.is_open:
            self._balance, self.is_open = _START, True
        self._balance = min(self._balance + self.share + gain, _MOST)

    def affords(self, cost: float) -> bool:
        """Returns whether the balance is above zero and covers the cost, or is nearly as high as it can be."""
        return self._balance > 0 and self._balance >= min(cost, 0.9 * _MOST)

    @property
    def has_plenty(self) -> bool:
        return self.affords(_PLENTY * _MOST)

    def halve(self) -> None:
        """Takes out half of what there is, so that a try after one that found nothing has to wait longer."""
        self._balance = min(self._balance, self._balance / 2)

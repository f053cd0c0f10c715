"""Running acceptance: for each draft position, a moving average of the share of rows whose draft was right there."""

from __future__ import annotations

from collections import Counter

_MEMORY, _STEPS = 32, 8  # rows, or the rows of so many steps if they are more; an older one counts less
_PRIOR = 2.0  # rows that a guess stands for: later drafts are as good as those before them
_FADE = 0.995  # of what is known about a position, per step that did not verify it


class Acceptance:
    """The share of rows that gained the draft at each position, among those that gained the one before it.

    A row without a draft, or one that ends before it, gains nothing there. So the tokens that are expected are those
    that sequences really get.

    Args:
        most: the most drafts of a row in a step.
    """

    def __init__(self, most: int) -> None:
        self._shares, self._weights = [0.0] * most, [0.0] * most  # and the rows that each share stands for

    def hope(self) -> None:
        """Forgets everything. Drafts are taken for right until some were verified."""
        self._weights = [0.0] * len(self._weights)

    def add(self, gains: Counter[int], num_drafts: int) -> None:
        """Adds a step that verified `num_drafts` drafts of each row: rows by the drafts that they gained."""
        reached = gains.total()
        most = max(_MEMORY, _STEPS * reached)
        for position, weight in enumerate(self._weights):
            if position >= num_drafts or not reached:
                self._weights[position] *= _FADE
                continue
            gained = reached - gains[position]
            self._shares[position] += (gained / reached - self._shares[position]) * reached / (weight + reached)
            self._weights[position] = min(weight + reached, most)
            reached = gained

    def predict(self) -> list[float]:
        """Returns the tokens that a row is expected to get in a step of each width, from 1 to all drafts."""
        tokens, reached, guess = [1.0], 1.0, 1.0
        for share, weight in zip(self._shares, self._weights, strict=True):
            guess = (weight * share + _PRIOR * guess) / (weight + _PRIOR)
            reached *= guess
            tokens.append(tokens[-1] + reached)
        return tokens

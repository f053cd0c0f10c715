"""How often drafts are right, by their position in the chain."""

from __future__ import annotations

from collections import Counter

_MEMORY = 32  # observations; an older one counts less
_FADE = 0.995  # of what is known about a position, per step without an observation
_FORGOTTEN = 0.5  # observations; a position with fewer is taken for as good as the one before it
_FIRST_GUESS = 0.5
_PRIOR = 2.0  # observations that the guess stands for


class Acceptance:
    """The share of right drafts at each position among chains that were right before it; a moving average.

    Args:
        most: the most drafts in a chain.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._shares = [_FIRST_GUESS] * most
        self._weights = [0.0] * most  # observations that the share stands for
        self._lengths = [0.0] * most  # share of rows whose newest chain reaches the position

    def add(self, chains: Counter[tuple[int, int]]) -> None:
        """Adds a step's chains: rows by (drafts that were compared, drafts that were right)."""
        seen, right = [0] * self.most, [0] * self.most
        for (length, accepted), count in chains.items():
            for position in range(min(length, accepted + 1)):
                seen[position] += count
                right[position] += count if position < accepted else 0
        for position, count in enumerate(seen):
            weight = self._weights[position]
            if not count:
                self._weights[position] = weight * _FADE
                continue
            total = max(weight, _PRIOR) + count
            share = self._shares[position]
            if weight < _FORGOTTEN and position:
                share = self._shares[position - 1]
            self._shares[position] = share + (right[position] / count - share) * count / total
            self._weights[position] = min(total, _MEMORY)

    def set_lengths(self, lengths: list[int]) -> None:
        """Notes how many drafts each row has for its next step."""
        counts, rows = Counter(lengths), max(1, len(lengths))
        beyond = len(lengths)
        for position in range(self.most):
            beyond -= counts[position]
            self._lengths[position] = beyond / rows

    def forget(self) -> None:
        """Lets the next few observations outweigh what was known."""
        self._weights = [min(weight, _PRIOR) for weight in self._weights]

    def predict(self, *, always_drafts: bool, hopes: bool = False) -> list[float]:
        """Returns the tokens per row of a step of each width, from 1 to all drafts.

        Args:
            always_drafts: every row has all drafts; otherwise as many as it had lately.
            hopes: drafts are no worse at later positions than at the first.
        """
        tokens, reached, before = [1.0], 1.0, _FIRST_GUESS
        for position in range(self.most):
            share = self._shares[position] if self._weights[position] >= _FORGOTTEN else before
            before = max(share, before) if hopes and position else share
            reached *= before
            tokens.append(tokens[-1] + reached * (1.0 if always_drafts else self._lengths[position]))
        return tokens

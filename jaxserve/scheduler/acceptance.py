"""How often drafts are right, by their position in the chain."""

from __future__ import annotations

from collections import Counter

_MEMORY = 32  # observations; an older one counts less
_SHORT_MEMORY = 5  # the same for first drafts, in hopes
_LENGTHS_MEMORY = 3  # rows of which the number of drafts counts
_FADE = 0.995  # of what is known about a position, per step without an observation
_FIRST_GUESS = 0.5
_PRIOR = 2.0  # observations that a guess stands for: later drafts are as good as those before them


class Acceptance:
    """The share of right drafts at each position among chains that were right before it; a moving average.

    Args:
        most: the most drafts in a chain.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._shares = [_FIRST_GUESS] * most
        self._weights = [_PRIOR, *[0.0] * (most - 1)]  # observations that the share stands for
        self._lately = _FIRST_GUESS  # the share of right first drafts, of the last few
        self._lengths = [0.0] * most  # share of rows whose newest chains reach the position

    def add(self, chains: Counter[tuple[int, int]]) -> None:
        """Adds a step's chains: rows by (drafts that were compared, drafts that were right)."""
        seen, right = [0] * self.most, [0] * self.most
        for (length, accepted), count in chains.items():
            for position in range(min(length, accepted + 1)):
                seen[position] += count
                right[position] += count if position < accepted else 0
        if seen[0]:
            self._lately += (right[0] / seen[0] - self._lately) * min(1.0, seen[0] / _SHORT_MEMORY)
        for position, count in enumerate(seen):
            if not count:
                self._weights[position] *= _FADE
                continue
            total = self._weights[position] + count
            self._shares[position] += (right[position] / count - self._shares[position]) * count / total
            self._weights[position] = min(total, _MEMORY)

    def set_lengths(self, lengths: list[int]) -> None:
        """Notes how many drafts each row has for its next step. Few rows say little of the step behind it."""
        counts, rows = Counter(lengths), len(lengths)
        beyond, part = rows, min(1.0, rows / _LENGTHS_MEMORY)
        for position in range(self.most if rows else 0):
            beyond -= counts[position]
            self._lengths[position] += (beyond / rows - self._lengths[position]) * part

    def forget(self) -> None:
        """Lets the next few observations outweigh what was known."""
        self._weights = [min(weight, _PRIOR) for weight in self._weights]

    def predict(self, *, always_drafts: bool, hopes: bool = False) -> list[float]:
        """Returns the tokens per row of a step of each width, from 1 to all drafts.

        Args:
            always_drafts: every row has all drafts; otherwise as many as it had lately.
            hopes: all drafts are as good as first ones were lately, if none was known to be better.
        """
        tokens, reached, before = [1.0], 1.0, self._shares[0]
        for position, (share, weight) in enumerate(zip(self._shares, self._weights, strict=True)):
            guess = (weight * share + _PRIOR * before) / (weight + _PRIOR)
            before = max(guess, before if position else self._lately) if hopes else guess
            reached *= before
            tokens.append(tokens[-1] + reached * (1.0 if always_drafts else self._lengths[position]))
        return tokens

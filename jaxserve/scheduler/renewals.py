"""When a few plain steps are run although drafts pay, to measure their time anew: a renewal."""

from __future__ import annotations

_STEPS = 8  # plain steps of a renewal: three say nothing yet, and the last is not known in time
_FIRST_DUE, _DUE_EVERY = 16, 256  # steps without a plain one after which a renewal is due, at first and later
_FRESH = 8  # steps for which a time counts as new
_GROWN = 1.4  # times what a verify step usually takes, from which on a renewal is due
_MEMORY = 64  # verify steps of the mean that is usual


class Renewals:
    """Plans renewals: now and then, where plain steps seem better, and where verify steps suddenly take longer.

    Most likely it is the machine that became slower then, and plain steps take longer, too. What a verify step takes is
    given in plain steps as they were when they were last measured.
    """

    def __init__(self) -> None:
        self._num_left = 0  # plain steps of the renewal under way that are not planned yet
        self._age = 0  # steps since a plain one was measured
        self._due_after = _FIRST_DUE
        self.usual = 0.0  # what a step of the current width takes, a slow mean; 0: not known

    @property
    def is_under_way(self) -> bool:
        return self._num_left > 0

    def note_step(self, was_plain: bool) -> None:
        """Notes whether a committed step was measured as a plain one."""
        self._age = 0 if was_plain else self._age + 1

    def forget_usual(self) -> None:
        """Forgets what is usual: another width or number of rows counts."""
        self.usual = 0.0

    def consider(self, ratio: float, *, is_worse: bool) -> None:
        """Begins a renewal if one is due, while drafts are verified.

        Args:
            ratio: what a step of the current width takes; 0: not known.
            is_worse: whether plain steps seem better.
        """
        if self.is_under_way:
            return
        if ratio:
            self.usual += (ratio - self.usual) / (_MEMORY if self.usual else 1)
        is_due = self._age >= self._due_after
        if is_due:
            self._due_after = min(2 * self._due_after, _DUE_EVERY)
        if is_due or ((is_worse or ratio > _GROWN * self.usual) and self._age >= _FRESH):
            self._num_left = _STEPS
            self.forget_usual()

    def take_step(self) -> bool:
        """Returns whether the step that is planned is one of a renewal."""
        if not self.is_under_way:
            return False
        self._num_left -= 1
        return True

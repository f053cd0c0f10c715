"""When plain steps look drafts up that no verify step waits for, to see how good lookups are."""

from __future__ import annotations

from jaxserve.scheduler.draft_account import DraftAccount

_LEAST, _MOST = 16, 512  # plain steps from one look to the next
_SHARE = 0.5  # of what the account earns, for looks that nothing suggested
_FIRST_COST = 0.5  # of a look whose time is not known, in plain steps


class Looks:
    """Spaces looks out.

    A look is a plain step whose drafts the host reads: the next step's tokens show which first drafts were right. It
    takes longer than other plain steps. So looks come as often as a part of the account's income pays for; earlier if
    other rows decode and the account has plenty, and at once behind one whose drafts were good.
    """

    def __init__(self) -> None:
        self._wait = self._num_rows = 0  # plain steps until the next look; decoding rows of the last step

    @property
    def is_due(self) -> bool:
        return self._wait <= 0

    def note_rows(self, num_rows: int, account: DraftAccount) -> None:
        """Notes the decoding rows of the next step."""
        if num_rows != self._num_rows:
            self._num_rows = num_rows
            if account.has_plenty:
                self._wait = 0

    def hope(self) -> None:
        """Asks for a look at once."""
        self._wait = 0

    def pass_step(self) -> None:
        """Passes a plain step without a look."""
        self._wait -= 1

    def begin(self, account: DraftAccount, cost: float) -> None:
        """Begins to wait for the next look, or try of one.

        Args:
            account: that pays.
            cost: of a look, in plain steps.
        """
        self._wait = int(min(_MOST, max(_LEAST, cost / (_SHARE * account.share))))


def estimate_cost(plain: float, seconds: float) -> float:
    """Returns what a look takes longer than a plain step, in plain steps.

    Args:
        plain: seconds of a plain step; above 0.
        seconds: those of one that looks; 0: not known.
    """
    return max(0.0, seconds / plain - 1) if seconds else _FIRST_COST

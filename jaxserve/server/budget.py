"""How many bytes of bodies are in the server's hands at once."""

from __future__ import annotations

from jaxserve.server.errors import ApiError

FREE_BYTES = 64 * 2**10  # of each body, that count for nothing: whoever says little is served beside whoever says much
_RETRY_AFTER = 5  # seconds, in which a body that is prepared makes room


class BodyBudget:
    """The bytes that bodies may have together while they are read and prepared."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.held = 0

    def open(self) -> BodyShare:
        """Returns the share of a new body."""
        return BodyShare(self)


class BodyShare:
    """What one body has of the budget."""

    def __init__(self, budget: BodyBudget) -> None:
        self._budget = budget
        self._held = 0

    def grow(self, size: int) -> None:
        """Counts a body that has so many bytes by now; ApiError 429 when all together have more than they may."""
        budget, wanted = self._budget, max(0, size - FREE_BYTES) - self._held
        if budget.held + wanted > budget.limit:
            self.close()
            message = f"Bodies of {budget.held} bytes are read already, of {budget.limit} that may be; try again."
            headers = {"Retry-After": str(_RETRY_AFTER), "Connection": "close"}
            raise ApiError(429, message, code="too_many_body_bytes", headers=headers)
        budget.held += wanted
        self._held += wanted

    def close(self) -> None:
        """Gives back what it has; calling it again does nothing."""
        self._budget.held -= self._held
        self._held = 0

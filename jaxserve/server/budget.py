"""A limit on the bytes of all request bodies that the server holds at once."""

from __future__ import annotations

from jaxserve.server.errors import ApiError

FREE_BYTES = 64 * 2**10  # per body are not counted, so small bodies are accepted beside large ones
_RETRY_AFTER = 5  # seconds; by then some bodies have been prepared


class BodyBudget:
    """The bytes that all bodies being read and prepared may have together."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.held = 0

    def open(self) -> BodyShare:
        """Returns the empty share of a new body."""
        return BodyShare(self)


class BodyShare:
    """One body's part of the budget."""

    def __init__(self, budget: BodyBudget) -> None:
        self._budget = budget
        self._held = 0

    def grow(self, size: int) -> None:
        """Counts a body that has `size` bytes by now; ApiError 429 when all bodies together exceed the budget."""
        budget, wanted = self._budget, max(0, size - FREE_BYTES) - self._held
        if budget.held + wanted > budget.limit:
            self.close()
            message = f"Request bodies already hold {budget.held} of {budget.limit} bytes; try again."
            headers = {"Retry-After": str(_RETRY_AFTER), "Connection": "close"}
            raise ApiError(429, message, code="too_many_body_bytes", headers=headers)
        budget.held += wanted
        self._held += wanted

    def close(self) -> None:
        """Returns the bytes to the budget. Calling it again does nothing."""
        self._budget.held -= self._held
        self._held = 0

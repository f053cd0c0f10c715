"""Limits on bytes that all requests together hold at once: their bodies, and the images decoded of these."""

from __future__ import annotations

from jaxserve.server.errors import ApiError

FREE_BYTES = 64 * 2**10  # per body are not counted, so small bodies are accepted beside large ones
_RETRY_AFTER = 5  # seconds; by then some have been prepared


class ByteBudget:
    """The bytes that all requests may hold together."""

    def __init__(self, limit: int, what: str, code: str, *, free: int = 0) -> None:
        """Holds none.

        Args:
            what: the bytes are those of, in the plural, as the refusal begins.
            code: of the refusal.
            free: bytes of each share that are not counted.
        """
        self.limit, self.what, self.code, self.free = limit, what, code, free
        self.held = 0

    def open(self) -> ByteShare:
        """Returns the empty share of a new request."""
        return ByteShare(self)


class ByteShare:
    """One request's part of a budget."""

    def __init__(self, budget: ByteBudget) -> None:
        self._budget = budget
        self._held = 0

    def grow(self, size: int) -> None:
        """Counts `size` bytes that the request has by now; ApiError 429 when all together exceed the budget."""
        budget, wanted = self._budget, max(0, size - self._budget.free) - self._held
        if budget.held + wanted > budget.limit:
            self.close()
            message = f"{budget.what} already hold {budget.held} of {budget.limit} bytes; try again."
            headers = {"Retry-After": str(_RETRY_AFTER), "Connection": "close"}
            raise ApiError(429, message, code=budget.code, headers=headers)
        budget.held += wanted
        self._held += wanted

    def close(self) -> None:
        """Returns the bytes to the budget. Calling it again does nothing."""
        self._budget.held -= self._held
        self._held = 0

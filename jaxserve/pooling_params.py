"""The parameters of one request for an embedding, for classes or for a score."""

from __future__ import annotations

from dataclasses import dataclass

from jaxserve.errors import InvalidRequestError, shorten


@dataclass(frozen=True, slots=True)
class PoolingParams:
    """What is made of a text's vector (vLLM's names); None: as the model's files say.

    `use_activation`: classes and scores go through the model's activation; embeddings have length 1. `dimensions`: only
    so many numbers of an embedding, in front of its division by its length. Raises InvalidRequestError for values of
    other types.
    """

    use_activation: bool | None = None
    dimensions: int | None = None

    def __post_init__(self) -> None:
        if self.use_activation is not None and not isinstance(self.use_activation, bool):
            message = f"must be true or false, got {shorten(self.use_activation)}"
            raise InvalidRequestError(message, field="use_activation", value=self.use_activation)
        given = self.dimensions
        if given is not None and (not isinstance(given, int) or isinstance(given, bool) or given < 1):
            message = f"must be an integer of at least 1, got {shorten(given)}"
            raise InvalidRequestError(message, field="dimensions", value=given)

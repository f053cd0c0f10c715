"""Agreement among the nodes of one engine while it starts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol


class Nodes(Protocol):
    """The nodes that run one engine together. Every node makes the same calls in the same order."""

    @property
    def rank(self) -> int:
        """This node's number; 0 plans the steps."""
        ...

    @property
    def size(self) -> int:
        """How many nodes there are."""
        ...

    def require_equal(self, facts: Mapping[str, Any]) -> None:
        """Returns once all nodes have stated the same facts (values of JSON).

        Raises:
            ClusterError: on every node; the field is the dotted name of the first difference, and the message names the
                rank and both values.
        """
        ...

    def take_least(self, name: str, value: int) -> int:
        """Returns the least value that any node gave; `name` is for messages."""
        ...


class OneNode:
    """A single node, which agrees with itself."""

    rank = 0
    size = 1

    def require_equal(self, facts: Mapping[str, Any]) -> None:
        """See `Nodes.require_equal`."""

    def take_least(self, name: str, value: int) -> int:
        """See `Nodes.take_least`."""
        del name
        return value


ONE_NODE = OneNode()

"""Agreement among the hosts of one engine while it starts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol


class Hosts(Protocol):
    """The hosts that run one engine together. Every host makes the same calls in the same order."""

    @property
    def rank(self) -> int:
        """This host's number; 0 plans the steps."""
        ...

    @property
    def size(self) -> int:
        """How many hosts there are."""
        ...

    def require_equal(self, facts: Mapping[str, Any]) -> None:
        """Returns once all hosts have stated the same facts (values of JSON).

        Raises:
            ClusterError: on every host; the field is the dotted name of the first difference, and the message names the
                rank and both values.
        """
        ...

    def take_least(self, name: str, value: int) -> int:
        """Returns the least value that any host gave; `name` is for messages."""
        ...


class OneHost:
    """A single host, which agrees with itself."""

    rank = 0
    size = 1

    def require_equal(self, facts: Mapping[str, Any]) -> None:
        """See `Hosts.require_equal`."""

    def take_least(self, name: str, value: int) -> int:
        """See `Hosts.take_least`."""
        del name
        return value


ONE_HOST = OneHost()

"""A small grammar as a table of token transitions: built on the host, followed on the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

MAX_TRANSITIONS = 512  # per row
MAX_STATE_TRANSITIONS = 64  # per state


@final
@dataclass(frozen=True, slots=True)
class TokenAutomaton:
    """The tokens that each state allows, and the state after each token.

    A state's number is the index of its first transition; the first state is 0. EOS leads back to its own state.
    """

    transitions: tuple[tuple[int, int, int], ...]  # (state, token, next state), by state and then by token

    def find_state(self, token_ids: Sequence[int]) -> int:
        """Returns the state after an output; a token that is not allowed changes nothing."""
        following = {(state, token): after for state, token, after in self.transitions}
        state = 0
        for token in token_ids:
            state = following.get((state, token), state)
        return state

    def list_allowed(self, state: int) -> list[int]:
        """Returns the ids of the tokens that a state allows."""
        return [token for at, token, _ in self.transitions if at == state]

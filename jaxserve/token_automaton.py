"""A few texts written out as tokens: what the host makes of a small grammar, and the device follows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

MAX_TRANSITIONS = 512  # that a row has room for
MAX_STATE_TRANSITIONS = 64  # of one state


@final
@dataclass(frozen=True, slots=True)
class TokenAutomaton:
    """Every token that may come in every state, and the state after it.

    A state's number is the index of its first transition; the first state is 0. EOS leads back to its own state.
    """

    transitions: tuple[tuple[int, int, int], ...]  # (state, token, next state), by state and then by token

    def find_state(self, token_ids: Sequence[int]) -> int:
        """Returns the state after an output; a token that may not come changes nothing."""
        following = {(state, token): after for state, token, after in self.transitions}
        state = 0
        for token in token_ids:
            state = following.get((state, token), state)
        return state

    def list_allowed(self, state: int) -> list[int]:
        """Returns the tokens that may come in a state."""
        return [token for at, token, _ in self.transitions if at == state]

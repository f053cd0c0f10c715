"""What a recurrent rule reads, and its sizes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import jax

RULES = ("delta", "space")


@dataclass(frozen=True)
class RuleShape:
    """The static sizes of a rule on one device.

    `rule` is "delta", the gated delta rule, whose pool has states [A, B], or "space", the state space of Mamba-2, whose
    pool has them turned, [B, A].
    """

    keys: int  # K, key heads; groups of a state space
    group: int  # r, value heads of each, so that N = K r
    key_dim: int  # A
    value_dim: int  # B
    state_dtype: str  # of the pool
    num_tokens: int  # T, the most of a step
    rule: str = "delta"

    def __post_init__(self) -> None:
        if self.rule not in RULES:
            raise ValueError(f"RuleShape.rule must be one of {', '.join(RULES)}, got {self.rule!r}")

    @property
    def heads(self) -> int:
        """Value heads (N)."""
        return self.keys * self.group

    @property
    def state(self) -> tuple[int, int]:
        """The shape of a head's state in the pool."""
        return (self.key_dim, self.value_dim) if self.rule == "delta" else (self.value_dim, self.key_dim)


class RuleTokens(NamedTuple):
    """The tokens of a step in float32, with queries and keys of their final lengths; those of no row may be anything.

    A head's state S [A, B] follows each: S = exp(decay) S; S = S + k d^T; its answer is S^T q. Of the delta rule d is
    beta (v - S^T k), of a state space v, and there are no betas.
    """

    q: jax.Array  # [T, K, A]
    k: jax.Array  # [T, K, A]
    v: jax.Array  # [T, N, B]
    decay: jax.Array  # [T, N], the logarithm of what remains
    beta: jax.Array | None  # [T, N]


class StateRows(NamedTuple):
    """The rows of a step and the slots of their states; a slot that the pool does not have reads zeros, or is not
    written. A slot has one row at most."""

    starts: jax.Array  # [S + 1] i32, where each row's tokens begin
    read: jax.Array  # [S] i32
    write: jax.Array  # [S] i32

"""What a recurrent rule reads, and its sizes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import jax


@dataclass(frozen=True)
class DeltaShape:
    """The static sizes of a gated delta rule on one device."""

    keys: int  # K, key heads
    group: int  # r, value heads of each, so that N = K r
    key_dim: int  # A
    value_dim: int  # B
    state_dtype: str  # of the pool
    num_tokens: int  # T, the most of a step

    @property
    def heads(self) -> int:
        """Value heads (N)."""
        return self.keys * self.group


class DeltaTokens(NamedTuple):
    """The tokens of a step in float32, with queries and keys of their final lengths; those of no row may be anything.

    A head's state S [A, B] follows each: S = exp(decay) S; d = beta (v - S^T k); S = S + k d^T; its answer is S^T q.
    """

    q: jax.Array  # [T, K, A]
    k: jax.Array  # [T, K, A]
    v: jax.Array  # [T, N, B]
    decay: jax.Array  # [T, N], the logarithm of what remains
    beta: jax.Array  # [T, N]


class StateRows(NamedTuple):
    """The rows of a step and the slots of their states; a slot that the pool does not have reads zeros, or is not
    written. A slot has one row at most."""

    starts: jax.Array  # [S + 1] i32, where each row's tokens begin
    read: jax.Array  # [S] i32
    write: jax.Array  # [S] i32

"""Arrays that one program of a step hands to the next."""

from __future__ import annotations

from typing import Any

import flax.struct
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxserve.core.runtime.rows import FLOAT_FIELDS, SAMPLING_FIELDS
from jaxserve.core.sampling import SamplingInputs


@flax.struct.dataclass
class HiddenStates:
    """The residual stream before the final norm, for the programs that only some steps need."""

    # Of the tokens that logits were computed of. If the engine only makes embeddings: what the rows were pooled to, or
    # of all tokens, if each has a vector of its own.
    last: Float[Array, "N D"]
    every: Float[Array, "T D"] | None  # all tokens of a mixed bucket, for prompts' log-probabilities


@flax.struct.dataclass
class RowLines:
    """The rows of a step, one line each, for the programs behind `forward`.

    They are one array, since every output of a program costs a CPU's host some ten microseconds.
    """

    array: Int[Array, "S C"]

    @classmethod
    def join(cls, row_ids: Int[Array, " S"], is_sampled: Int[Array, " S"], sampling: Int[Array, "S F"]) -> RowLines:
        """Returns the lines of rows."""
        return cls(jnp.concatenate([row_ids[:, None], is_sampled[:, None], sampling], axis=1))

    @property
    def row_ids(self) -> Int[Array, " S"]:
        """Their places in `RowState`."""
        return self.array[..., 0]

    @property
    def is_sampled(self) -> Int[Array, " S"]:
        """1 where the row samples after its last token."""
        return self.array[..., 1]

    @property
    def sampling(self) -> Int[Array, "S F"]:
        """The rows' parameters, see rows.py."""
        return self.array[..., 2:]

    def restrict(self, may_sample: Bool[Array, " S"]) -> RowLines:
        """Returns the lines by which no other row samples."""
        return RowLines(self.array.at[:, 1].multiply(may_sample))

    def __len__(self) -> int:
        return self.array.shape[0]


@flax.struct.dataclass
class SelectedLines:
    """What `forward` hands to sampling. Shapes depend on rows only, so that the programs add up, not multiply.

    N = S, one line of logits per row; in a verify step N = S * W, W in each row's order. An engine that only makes
    embeddings computes no logits.
    """

    logits: Float[Array, "N V"] | None
    lines: RowLines
    handed: tuple[Any, ...] = ()  # what features hand to `follow_sample`, in a verify step

    @property
    def width(self) -> int:
        """W."""
        return self.logits.shape[0] // len(self.lines)


@flax.struct.dataclass
class SampledTokens:
    """What a step brings each row."""

    # A sentinel where there is an error; NOT_KEPT after the end of a run. None: the engine samples no tokens.
    ids: Int[Array, "S W"] | None
    drafts: Int[Array, "S K"] | None = None  # of the row's next tokens


def unpack_sampling(sampling: Int[Array, "S F"], positions: Int[Array, " S"]) -> SamplingInputs:
    """Returns the parameters of rows whose next tokens get the `positions`; `sampling` as in `RowLines`."""
    names = [name for name in SAMPLING_FIELDS if name in SamplingInputs.__dataclass_fields__]
    columns = {name: sampling[:, SAMPLING_FIELDS.index(name)] for name in names}
    floats = {name: lax.bitcast_convert_type(columns[name], jnp.float32) for name in names if name in FLOAT_FIELDS}
    return SamplingInputs(**(columns | floats), positions=positions)

"""Abstract values of the arguments of an engine's programs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Sharding

from jaxserve.core.runtime.device_state import KVCache, RowState
from jaxserve.core.runtime.inputs import StateShape
from jaxserve.core.runtime.rows import NUM_SAMPLING_FIELDS
from jaxserve.core.runtime.step_arrays import RowLines
from jaxserve.core.sampling import SamplerState


@dataclass(frozen=True)
class ProgramInputs:
    """Abstract values of the programs' arguments. Those of features are in the order of `StepModel.features`."""

    params: Any
    cache: KVCache
    rows: RowState
    sampler: SamplerState
    feature_params: tuple[Any, ...]
    feature_state: tuple[Any, ...]
    state_shape: StateShape
    replicated: Sharding

    def spec(self, shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
        """Returns the abstract value of an array that is replicated on all devices."""
        return jax.ShapeDtypeStruct(shape, dtype, sharding=self.replicated)

    def lines(self, rows: int) -> RowLines:
        """Returns the abstract value of the lines of a step's rows."""
        return RowLines(self.spec((rows, 2 + NUM_SAMPLING_FIELDS), jnp.int32))

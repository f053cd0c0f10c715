"""The interface of step features: parts of an engine with a device side that most engines do without.

A feature has two objects. `StepFeature` is static: what it keeps on the device, its programs, and functions inside the
programs of a step. `FeatureHost` is the host's side: its calls around a step. The base classes do nothing, so a feature
overrides what it needs. The runner, the memory plan, the start, bundles and other nodes go through all features of an
engine and know none by name. The features themselves are in `jaxserve.features`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import jax
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from jaxserve.core.models.base import DecoderConfig
from jaxserve.core.runtime.buckets import Bucket, BucketTable
from jaxserve.core.runtime.device_state import KVCache, RowState
from jaxserve.core.runtime.inputs import StepInputs
from jaxserve.core.runtime.memory import AttachedPages, CachePlan
from jaxserve.core.runtime.program_inputs import ProgramInputs
from jaxserve.core.runtime.programs import Program, ProgramKey, Programs
from jaxserve.core.runtime.protocol import Runner
from jaxserve.core.runtime.sizes import Sizes
from jaxserve.core.runtime.step_arrays import RowLines, SampledTokens, SelectedLines
from jaxserve.core.runtime.step_counts import StepCounts
from jaxserve.core.sampling import SamplerState
from jaxserve.core.scheduler.step_plan import StepPlan


@dataclass(slots=True)
class DeviceState:
    """The donated arrays as the last dispatched program left them, and the programs that take and return them."""

    programs: Programs
    cache: KVCache = ()
    rows: RowState | None = None
    sampler: SamplerState | None = None


class ForwardedStep(NamedTuple):
    """A step as the model has computed it."""

    config: DecoderConfig
    params: Any  # the model's
    mesh: Mesh | None
    bucket: Bucket
    before: RowState  # the rows before the step
    inputs: StepInputs
    token_ids: Int[Array, " T"]
    seq_lens: Int[Array, " S"]
    tables: Int[Array, "G S M"]  # page tables of the step's rows, by KV group
    captured: Float[Array, "T AD"] | None  # the inputs of `StepFeature.aux_layers`, side by side
    ends: Int[Array, " S"]  # the place of each row's last token


class SampledStep(NamedTuple):
    """A step whose tokens are sampled."""

    lines: RowLines
    runs: Int[Array, "S W"]  # as `SampledTokens.ids`
    num_kept: Int[Array, " S"]
    handed: Any  # what `follow_forward` handed over


@dataclass(frozen=True)
class StepFeature:
    """The static side of a feature, hashable, since programs are compiled for it.

    The methods that end in `specs` return abstract values. `precede_forward`, `follow_forward` and `follow_sample` are
    pure and run inside the programs of a step.
    """

    @property
    def limits(self) -> Mapping[str, Any]:
        """Fields of `SchedulerLimits` that the feature sets."""
        return {}

    def page_options(self, sizes: Sizes) -> Mapping[str, int]:
        """Returns arguments of `PageManager` that the feature sets."""
        return {}

    @property
    def note(self) -> str:
        """Its parameters in a word, for users; empty: it has none."""
        return ""

    @property
    def aux_layers(self) -> tuple[int, ...]:
        """Layers of the model whose inputs the feature reads."""
        return ()

    @property
    def num_pools(self) -> int:
        """Pools of its own, which lie behind the model's in the cache."""
        return 0

    def pages(self, sizes: Sizes) -> AttachedPages | None:
        """Returns the pages of layers of its own."""
        return None

    def bind(self, sizes: Sizes, plan: CachePlan, mesh: Mesh, first_pool: int) -> StepFeature:
        """Returns the feature for pools of a size, which its programs need; its own begin at `first_pool`."""
        return self

    def column_specs(self, num_rows: int) -> Mapping[str, jax.ShapeDtypeStruct]:
        """Returns the columns that it adds to `RowState`."""
        return {}

    def state_specs(self, sizes: Sizes) -> Any:
        """Returns its own donated state, which begins as zeros."""
        return None

    def split_state(self, state: Any, width: int) -> tuple[Any, Any]:
        """Returns what the sample programs of rows of `width` tokens get of its state: to donate, and to read."""
        return None, None

    def params_specs(self, sizes: Sizes, mesh: Mesh) -> Any:
        """Returns the parameters that its programs read."""
        return None

    def select_params(self, params: Any, bucket: Bucket) -> Any:
        """Returns those of its parameters that the forward programs of a bucket read."""
        return params

    def params_bytes(self, sizes: Sizes) -> int:
        """Returns the bytes that these take on each device."""
        return 0

    def plan_line(self, sizes: Sizes) -> tuple[str, int, str] | None:
        """Returns (part, bytes, details) of a line of its own for its parameters in the memory plan."""
        return None

    def handed_specs(self, num_lines: int) -> Any:
        """Returns what `follow_forward` hands to `follow_sample` in a verify step of so many tokens."""
        return None

    def buffer_bytes(self, sizes: Sizes) -> int:
        """Returns the bytes of other arrays on each device."""
        return 0

    def require_room(self, sizes: Sizes, others: int) -> int:
        """Returns the bytes that it takes of the host's memory.

        Args:
            others: bytes that are taken already.

        Raises:
            CapacityError: they do not fit.
        """
        return 0

    def describe(self, sizes: Sizes) -> Mapping[str, Any]:
        """Returns what its programs depend on beside options, as values of JSON."""
        return {}

    def list_programs(self, buckets: BucketTable) -> Iterator[ProgramKey]:
        """Yields the programs of its own."""
        yield from ()

    def list_largest(self, buckets: BucketTable) -> Iterator[ProgramKey]:
        """Yields those of them that take most memory."""
        yield from ()

    def make_program(self, kind: str, key: Any, inputs: ProgramInputs, state: Any, params: Any) -> Program | None:
        """Returns one of them; None if the kind is not the feature's.

        Args:
            state: the abstract values of its state; `params` those of its parameters.
        """
        return None

    def precede_forward(self, params: Any, model_params: Any, inputs: StepInputs, bucket: Bucket) -> Any:
        """Returns the parameters that the model's layers use in a step.

        Args:
            params: of the feature.
            model_params: the model's, perhaps as a feature before this one has changed them.
        """
        return model_params

    def follow_forward(
        self,
        params: Any,
        pools: KVCache,
        rows: RowState,
        step: ForwardedStep,
    ) -> tuple[RowState, KVCache, Any]:
        """Returns the rows, the feature's pools, and what `follow_sample` gets of a verify step, after a forward pass.

        Args:
            params: of the feature.
            rows: after the step.
        """
        return rows, pools, None

    def follow_sample(
        self, rows: RowState, kept: Any, read: Any, step: SampledStep
    ) -> tuple[RowState, Any, Int[Array, "S K"] | None]:
        """Returns the rows, `kept`, and drafts of the rows' next tokens or None, after a step's tokens were sampled.

        Args:
            rows: with the step's tokens.
            kept: what `split_state` gives it to donate.
            read: likewise, to read.
        """
        return rows, kept, None

    def open(self, sizes: Sizes, params: Any, counts: StepCounts) -> FeatureHost:
        """Returns the host's side.

        Args:
            params: the parameters of the feature.
            counts: those of the runner.
        """
        return FeatureHost()


class InFlight(Protocol):
    """Work that a feature started beside a step."""

    def wait(self) -> Mapping[str, Any]:
        """Waits for it; returns fields of `StepOutputs`."""
        ...


class FeatureHost:
    """The host's side of a feature. The engine's thread makes all calls, in this order; only `start` may wait."""

    params: Any = None  # arrays that its programs read and no step changes
    state: Any = None  # its own donated arrays

    def reset(self, state: Any) -> None:
        """Takes the feature's state anew, zeroed: at the start, and after a failed step."""
        self.state = state

    def start(self, runner: Runner, device: DeviceState, plan: CachePlan, *, must_help: bool) -> None:
        """Prepares the feature once, after the runner was made.

        Args:
            must_help: raise ConfigError if the feature makes this engine slower.
        """

    def warm_up(self, device: DeviceState) -> None:
        """Runs each of its programs that `prepare` calls."""

    def prepare(self, device: DeviceState, plan: StepPlan) -> InFlight | None:
        """Does what comes before a step's forward pass; returns what runs beside the step."""
        return None

    def select_params(self, bucket: Bucket) -> Any:
        """Returns the arrays of `StepFeature.select_params`."""
        return self.params

    def sample_state(self, width: int) -> tuple[Any, Any]:
        """Returns the arrays of `StepFeature.split_state`."""
        return None, None

    def keep(self, kept: Any) -> None:
        """Takes back what a sample program donated."""

    def draft(self, device: DeviceState, params: Any, selected: SelectedLines, sampled: SampledTokens) -> SampledTokens:
        """Drafts what may follow a step's tokens, if the plan wants drafts; returns the tokens with them.

        Args:
            params: those of the model.
        """
        return sampled

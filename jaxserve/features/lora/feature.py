"""The step feature of adapters: those of all slots on the device, side by side, and the forms of programs with them."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jaxtyping import Array, Bool

from jaxserve.core.layers.stack import LayerStack, stack_specs
from jaxserve.core.models.base import DecoderConfig
from jaxserve.core.runtime.arguments import abstract_params
from jaxserve.core.runtime.buckets import Bucket, BucketTable
from jaxserve.core.runtime.device_state import make_zeros
from jaxserve.core.runtime.feature import DeviceState, FeatureHost, StepFeature
from jaxserve.core.runtime.host_memory import HOST_SHARE, host_memory_bytes
from jaxserve.core.runtime.inputs import StepInputs
from jaxserve.core.runtime.memory import CachePlan, format_bytes, params_bytes
from jaxserve.core.runtime.program_inputs import ProgramInputs
from jaxserve.core.runtime.programs import Program, ProgramKey, call_program
from jaxserve.core.runtime.rows import SAMPLING_FIELDS
from jaxserve.core.runtime.sizes import Sizes
from jaxserve.core.runtime.step_counts import StepCounts
from jaxserve.core.scheduler.step_plan import StepPlan
from jaxserve.errors import CapacityError
from jaxserve.families.registry import param_specs
from jaxserve.features.lora.files import AdapterFiles
from jaxserve.features.lora.matrices import join, list_matrices, nest
from jaxserve.features.lora.store import AdapterStore

_FEW = 128  # columns of a module's A with which programs are still fast; with more, there are those of the first slots
_MUCH = 0.25  # of the bytes of the model's weights, for a bank
_WRITE = "write_adapter"
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Lora(StepFeature):
    """The option `enable_lora`.

    The bank has, for each adapted matrix, A [in, slots * n * rank] and B [..., slots * n * rank, out].
    """

    config: DecoderConfig  # without quantization
    num_slots: int
    rank: int
    dtype: str
    targets: tuple[str, ...]
    store: AdapterStore = field(compare=False)
    mesh: Mesh | None = None  # of a bound feature

    @property
    def limits(self) -> Mapping[str, Any]:
        """See `StepFeature.limits`."""
        return {"num_adapters": self.num_slots}

    def bind(self, sizes: Sizes, plan: CachePlan, mesh: Mesh, first_pool: int) -> Lora:
        """See `StepFeature.bind`."""
        return replace(self, mesh=mesh)

    def bank_specs(self, num_slots: int) -> dict[str, Any]:
        """Returns the canonical tree of what a number of slots holds."""
        matrices = list_matrices(self.config, self.targets)
        return nest(self.config, ((each, each.bank_specs(num_slots, self.rank, self.dtype)) for each in matrices))

    def params_specs(self, sizes: Sizes, mesh: Mesh) -> Any:
        """Returns the bank."""
        return abstract_params(self.bank_specs(self.num_slots), sizes, mesh)

    def select_params(self, params: Any, bucket: Bucket) -> Any:
        """Returns nothing without adapters: a step does not even dispatch the bank."""
        return params if bucket.adapters else None

    def params_bytes(self, sizes: Sizes) -> int:
        """See `StepFeature.params_bytes`."""
        return params_bytes(self.bank_specs(self.num_slots), sizes.num_devices, sizes.platform)

    @property
    def copy_bytes(self) -> int:
        """Bytes of an adapter on the host: those of a slot, with its padding."""
        return params_bytes(self.bank_specs(1), 1)

    def require_room(self, sizes: Sizes, others: int) -> int:
        """See `StepFeature.require_room`."""
        each, num_copies, limit = self.copy_bytes, self.store.num_copies, host_memory_bytes()
        room = max(0, int(limit * HOST_SHARE) - others)
        if num_copies * each > room:
            beside = f", where {format_bytes(others)} are for other parts" if others else ""
            message = f"{num_copies} copies of {format_bytes(each)} are more than this machine or container can give"
            message = f"{message}: it has {format_bytes(limit)}{beside}; {room // each} would fit"
            raise CapacityError(message, field="max_cpu_loras", value=num_copies)
        return num_copies * each

    def plan_line(self, sizes: Sizes) -> tuple[str, int, str]:
        """See `StepFeature.plan_line`."""
        size, weights = self.params_bytes(sizes), _count_weights(sizes)
        details = f"{self.num_slots} slots of rank {self.rank}, {self.dtype}"
        details += f"; on the host {self.store.num_copies} copies of {format_bytes(self.copy_bytes)}"
        much = f", which is {size / weights:.0%} of the weights: lower max_loras or max_lora_rank"
        return "adapters", size, details + (much if size > _MUCH * weights else "")

    def describe(self, sizes: Sizes) -> Mapping[str, Any]:
        """See `StepFeature.describe`."""
        return {"adapters": [self.num_slots, self.rank, self.dtype, *self.targets]}

    def list_programs(self, buckets: BucketTable) -> Iterator[ProgramKey]:
        """See `StepFeature.list_programs`."""
        yield _WRITE, None

    def make_program(self, kind: str, key: Any, inputs: ProgramInputs, state: Any, params: Any) -> Program | None:
        """See `StepFeature.make_program`."""
        if kind != _WRITE:
            return None
        slot = jax.tree_util.tree_map_with_path(self._describe_slot, params)
        return Program(write_slot, (params, slot, inputs.spec((), jnp.int32)), donated=(0,))

    def _describe_slot(self, path: Any, spec: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        """Returns the abstract value of one slot's part of an array."""
        shape, axis = list(spec.shape), _find_axis(path)
        shape[axis] //= self.num_slots
        return jax.ShapeDtypeStruct(tuple(shape), spec.dtype, sharding=spec.sharding)

    def precede_forward(self, params: Any, model_params: Any, inputs: StepInputs, bucket: Bucket) -> Any:
        """Returns the parameters with the adapters of the bucket's slots beside each matrix that has any."""
        count = bucket.adapters
        if not count:
            return model_params
        own = _find_own(inputs, bucket)
        cut = jax.tree_util.tree_map_with_path(
            lambda path, array: lax.slice_in_dim(
                array, 0, array.shape[_find_axis(path)] // self.num_slots * count, axis=array.ndim + _find_axis(path)
            ),
            params["layers"],
        )
        layers = [join(model_params["layers"][at], cut[at], own) for at in range(self.config.num_layers)]
        return {**model_params, "layers": layers}

    def open(self, sizes: Sizes, params: Any, counts: StepCounts) -> AdapterBank:
        """See `StepFeature.open`."""
        assert self.mesh is not None
        return AdapterBank(self.params_specs(sizes, self.mesh), self.num_slots, self.store)


class AdapterBank(FeatureHost):
    """The slots on the device, which plans say how to fill."""

    def __init__(self, specs: Any, num_slots: int, store: AdapterStore) -> None:
        self._specs, self._num_slots, self._store = specs, num_slots, store

    def reset(self, state: Any) -> None:
        """Empties all slots."""
        self.params = None  # freed first
        self.params = make_zeros(self._specs)

    def select_params(self, bucket: Bucket) -> Any:
        """See `FeatureHost.select_params`."""
        return self.params if bucket.adapters else None

    def warm_up(self, device: DeviceState) -> None:
        """See `FeatureHost.warm_up`."""

        def make_slot(path: Any, spec: jax.ShapeDtypeStruct) -> np.ndarray:
            shape = list(spec.shape)
            shape[_find_axis(path)] //= self._num_slots
            return np.zeros(shape, spec.dtype)

        self._write(device, jax.tree_util.tree_map_with_path(make_slot, self._specs), 1)
        jax.block_until_ready(self.params)

    def prepare(self, device: DeviceState, plan: StepPlan) -> None:
        """Writes the adapters that the plan's rows need, behind the steps in flight."""
        for slot, generation in plan.adapter_writes:
            self._write(device, self._store.find_copy(generation), slot)

    def _write(self, device: DeviceState, copy: Any, slot: int) -> None:
        program = device.programs.get(_WRITE, None)
        self.params = call_program(program, self.params, copy, np.int32(slot - 1))


def write_slot(bank: Any, slot: Any, index: Array) -> Any:
    """Returns the bank, which is donated, with one slot replaced."""

    def write(path: Any, array: Array, part: Array) -> Array:
        axis = array.ndim + _find_axis(path)
        return lax.dynamic_update_slice_in_dim(array, part, index * part.shape[axis], axis)

    return jax.tree_util.tree_map_with_path(write, bank, slot)


def _find_axis(path: Any) -> int:
    """Returns the axis of slots: the last of A, the last but one of B."""
    return -1 if path[-1].key == "a" else -2


def _find_own(inputs: StepInputs, bucket: Bucket) -> Bool[Array, "T n"]:
    """Returns which of the bucket's slots each token of a step has."""
    slots = inputs.sampling[:, SAMPLING_FIELDS.index("adapter")]
    if bucket.is_mixed:
        rows = jnp.searchsorted(inputs.query_start_loc[1:], jnp.arange(bucket.tokens), side="right")
        slots = slots[jnp.minimum(rows, bucket.rows - 1)]
    else:
        slots = jnp.repeat(slots, bucket.width)
    return slots[:, None] == jnp.arange(1, bucket.adapters + 1)


def choose_counts(num_slots: int, rank: int, *, deterministic: bool) -> tuple[int, ...]:
    """Returns the numbers of slots that programs are compiled for; 0: without adapters.

    Where bits count there is one, so that a row's do not depend on who is beside it.
    """
    if deterministic:
        return (num_slots,)
    few = max(1, _FEW // rank)
    return (0, few, num_slots) if few < num_slots else (0, num_slots)


def make_lora(sizes: Sizes) -> Lora:
    """Returns the feature of an engine with `enable_lora`; ConfigError names an option that does not fit the model."""
    options, config = sizes.config.lora, replace(sizes.model, quantization=None, packed=False)
    dtype = config.dtype if options.lora_dtype == "auto" else options.lora_dtype
    matrices = list_matrices(config, options.lora_target_modules)
    specs = stack_specs(
        nest(config, ((each, each.bank_specs(1, options.max_lora_rank, dtype)) for each in matrices)), sizes.stack_mode
    )

    def read(folder: Path) -> Any:
        files = AdapterFiles(folder, config, matrices, options.max_lora_rank)
        return _stack(nest(config, files.read(np.dtype(jnp.dtype(dtype)))), specs["layers"])

    store = AdapterStore(read, options.num_copies)
    made = Lora(config, options.max_loras, options.max_lora_rank, dtype, options.lora_target_modules, store)
    size, weights = made.params_bytes(sizes), _count_weights(sizes)
    if size > _MUCH * weights:
        text = "adapters: %d slots of rank %d take %s on each device, and every step multiplies with all of them"
        _log.warning(text, options.max_loras, options.max_lora_rank, format_bytes(size))
    return made


def _count_weights(sizes: Sizes) -> int:
    """Returns the bytes of the model's parameters on each device."""
    return params_bytes(param_specs(sizes.model), sizes.num_devices, sizes.platform)


def _stack(canonical: dict[str, Any], specs: Any) -> dict[str, Any]:
    """Returns a canonical tree of host arrays in the form that `specs` have at run time."""
    if not isinstance(specs, LayerStack):
        return canonical
    groups: list[list[Any]] = [[] for _ in specs.groups]
    for layer, (group, _) in zip(canonical["layers"], specs.places, strict=True):
        groups[group].append(layer)
    stacked = (jax.tree.map(lambda *arrays: np.stack(arrays), *members) for members in groups)
    return {"layers": LayerStack(tuple(stacked), specs.places)}

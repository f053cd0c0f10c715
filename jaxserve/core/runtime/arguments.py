"""Makes the compiler of an engine's programs: their static arguments, and the abstract values of their arrays."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from jaxserve.core.layers.memory import StateArray
from jaxserve.core.layers.recurrent import PENDING
from jaxserve.core.layers.stack import stack_specs
from jaxserve.core.models.base import ParamSpec
from jaxserve.core.runtime.compile import ProgramCompiler
from jaxserve.core.runtime.device_state import RowState, row_state_specs
from jaxserve.core.runtime.feature import StepFeature
from jaxserve.core.runtime.memory import CachePlan
from jaxserve.core.runtime.program_inputs import ProgramInputs
from jaxserve.core.runtime.shapes import Shapes
from jaxserve.core.runtime.sizes import Sizes
from jaxserve.core.runtime.step_model import StepModel
from jaxserve.core.runtime.step_programs import EnginePrograms
from jaxserve.core.sampling import sampler_state_specs
from jaxserve.core.sharding import DEFAULT_RULES, KV_POOL_AXES, Axes
from jaxserve.families.registry import param_specs


def abstract_params(canonical: Any, sizes: Sizes, mesh: Mesh) -> Any:
    """Returns the runtime tree of canonical parameters as abstract sharded arrays."""
    specs = stack_specs(canonical, sizes.stack_mode)

    def abstract(spec: ParamSpec) -> jax.ShapeDtypeStruct:
        placement = DEFAULT_RULES.placement(mesh, spec.axes, spec.shape)
        return jax.ShapeDtypeStruct(spec.shape, jnp.dtype(spec.dtype), sharding=placement)

    return jax.tree.map(abstract, specs, is_leaf=lambda leaf: isinstance(leaf, ParamSpec))


def make_compiler(
    shapes: Shapes,
    plan: CachePlan,
    mesh: Mesh,
    trace: Callable[[], AbstractContextManager[Any]] = nullcontext,
    options: Mapping[str, Any] = MappingProxyType({}),
) -> ProgramCompiler:
    """Returns what compiles an engine's programs, for the pools of `plan`.

    Args:
        trace: a context in which kernels see the devices of the mesh, if they are not here.
        options: of the compiler, for such devices.
    """
    pool_sharding = DEFAULT_RULES.sharding(mesh, KV_POOL_AXES)
    replicated = NamedSharding(mesh, PartitionSpec())
    features = bind_features(shapes, plan, mesh)
    model = StepModel(
        shapes.model,
        plan.layout,
        shapes.attention,
        mesh if mesh.size > 1 else None,
        shapes.impl,
        shapes.processor,
        features,
        shapes.generates,
    )
    pools = [
        jax.ShapeDtypeStruct(shape, jnp.dtype(spec.dtype), sharding=pool_sharding)
        for shape, (spec, _) in zip(plan.pool_shapes, plan.pools, strict=True)
    ]
    states = describe_states(shapes, plan, mesh)
    of_pages = plan.layout.num_page_pools
    inputs = ProgramInputs(
        params=abstract_params(param_specs(shapes.model), shapes, mesh),
        cache=(*pools[:of_pages], *states, *pools[of_pages:]),
        rows=describe_rows(shapes, replicated),
        sampler=sampler_state_specs(shapes.state.rows, shapes.model.vocab_size, replicated),
        feature_params=tuple(feature.params_specs(shapes, mesh) for feature in features),
        feature_state=_share(tuple(feature.state_specs(shapes) for feature in features), replicated),
        state_shape=shapes.state,
        replicated=replicated,
    )
    config = shapes.config
    programs = EnginePrograms(model, inputs, config.compile.max_logprobs, config.scheduler.max_decode_steps)
    return ProgramCompiler(programs, trace, options)


def bind_features(shapes: Shapes, plan: CachePlan, mesh: Mesh) -> tuple[StepFeature, ...]:
    """Returns the features for pools of a size: each has its own behind those of the features before it."""
    bound, first_pool = [], plan.layout.num_pools
    for feature in shapes.features:
        bound.append(feature.bind(shapes, plan, mesh, first_pool))
        first_pool += bound[-1].num_pools
    return tuple(bound)


def describe_rows(shapes: Shapes, sharding: Sharding | None) -> RowState:
    """Returns the abstract values of the rows."""
    columns: dict[str, jax.ShapeDtypeStruct] = {}
    for feature in shapes.features:
        columns |= feature.column_specs(shapes.state.rows)
    return row_state_specs(shapes.state, sharding, columns)


def describe_states(sizes: Sizes, plan: CachePlan, mesh: Mesh) -> list[dict[str, Any]]:
    """Returns the abstract values of the pools of recurrent states: [L, slots, ...] by name, of rows and snapshots.

    Where steps verify drafts, a pool also has the streams of a step's tokens.
    """
    num_slots, num_pending = sizes.state.padding_row + plan.num_snapshots, sizes.state.max_pending

    def describe(array: StateArray, shape: tuple[int, ...], axes: Axes) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.dtype(array.dtype), sharding=DEFAULT_RULES.sharding(mesh, axes))

    pools = []
    for state, num_layers in sizes.model.states:
        pool: dict[str, Any] = {
            array.name: describe(array, (num_layers, num_slots, *array.shape), (None, None, *array.axes))
            for array in state.arrays
        }
        if num_pending:
            pool[PENDING] = tuple(
                describe(
                    stream,
                    (num_layers, *stream.shape[:-1], num_pending, stream.shape[-1]),
                    (None, *stream.axes[:-1], None, stream.axes[-1]),
                )
                for stream in state.streams
            )
        pools.append(pool)
    return pools


def _share(specs: Any, sharding: Sharding) -> Any:
    """Returns abstract values with one sharding for all."""
    return jax.tree.map(lambda spec: jax.ShapeDtypeStruct(spec.shape, spec.dtype, sharding=sharding), specs)

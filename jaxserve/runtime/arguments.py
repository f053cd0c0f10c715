"""The arguments of an engine's programs: the static ones, and the abstract values of arrays."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from jaxserve.layers.stack import stack_specs
from jaxserve.models.base import ParamSpec
from jaxserve.models.drafters import drafter_param_specs
from jaxserve.models.registry import param_specs
from jaxserve.runtime.compile import ProgramInputs
from jaxserve.runtime.device_state import RowState, row_state_specs
from jaxserve.runtime.memory import CachePlan
from jaxserve.runtime.shapes import Shapes
from jaxserve.runtime.step_model import DraftHead, Drafting, StepModel
from jaxserve.runtime.tier_start import plan_host_memory
from jaxserve.sampling import sampler_state_specs
from jaxserve.sharding import DEFAULT_RULES, KV_POOL_AXES
from jaxserve.speculation import LookupState


def abstract_params(shapes: Shapes, mesh: Mesh) -> Any:
    """Returns the runtime parameter tree as abstract sharded arrays."""
    return _abstract(param_specs(shapes.model), shapes, mesh)


def _abstract_drafter(shapes: Shapes, mesh: Mesh) -> Any:
    return None if shapes.drafter is None else _abstract(drafter_param_specs(shapes.drafter.model), shapes, mesh)


def _abstract(canonical: Any, shapes: Shapes, mesh: Mesh) -> Any:
    specs = stack_specs(canonical, shapes.stack_mode)

    def abstract(spec: ParamSpec) -> jax.ShapeDtypeStruct:
        placement = DEFAULT_RULES.placement(mesh, spec.axes, spec.shape)
        return jax.ShapeDtypeStruct(spec.shape, jnp.dtype(spec.dtype), sharding=placement)

    return jax.tree.map(abstract, specs, is_leaf=lambda leaf: isinstance(leaf, ParamSpec))


def describe_programs(
    shapes: Shapes, plan: CachePlan, mesh: Mesh, options: Mapping[str, Any] = MappingProxyType({})
) -> tuple[StepModel, ProgramInputs]:
    """Returns the static and the abstract arguments of all programs, for the pools of `plan`.

    Args:
        options: of the compiler, for devices that are not here.
    """
    pool_sharding = DEFAULT_RULES.sharding(mesh, KV_POOL_AXES)
    replicated = NamedSharding(mesh, PartitionSpec())
    step_mesh = mesh if mesh.size > 1 else None
    drafting = _describe_drafting(shapes, plan)
    model = StepModel(shapes.model, plan.layout, shapes.attention, step_mesh, shapes.impl, shapes.processor, drafting)
    inputs = ProgramInputs(
        params=abstract_params(shapes, mesh),
        draft_params=_abstract_drafter(shapes, mesh),
        cache=tuple(
            jax.ShapeDtypeStruct(shape, jnp.dtype(spec.dtype), sharding=pool_sharding)
            for shape, (spec, _) in zip(plan.pool_shapes, plan.pools, strict=True)
        ),
        rows=describe_rows(shapes, replicated),
        sampler=sampler_state_specs(shapes.state.rows, shapes.model.vocab_size, replicated),
        lookup=describe_lookup(shapes, replicated),
        state_shape=shapes.state,
        replicated=replicated,
        host_memory=plan_host_memory(
            shapes.config.cache.kv_offloading_size, shapes.specs, shapes.model.kv_groups, pool_sharding
        ),
        options=options,
    )
    return model, inputs


def _describe_drafting(shapes: Shapes, plan: CachePlan) -> Drafting | None:
    if shapes.drafting is None or shapes.drafter is None or plan.drafter is None:
        return shapes.drafting
    drafter = shapes.drafter.model
    head = DraftHead(
        # Its products are those of the model, which have been tested by now.
        replace(drafter, config=replace(drafter.config, few_rows=shapes.model.few_rows)),
        plan.drafter_layout,
        shapes.drafter_attention,
        plan.drafter.sources,
        shapes.drafter_impl,
        shapes.drafter.draws,
    )
    return replace(shapes.drafting, head=head)


def describe_rows(shapes: Shapes, sharding: Sharding | None) -> RowState:
    """Returns the abstract values of the rows."""
    drafts = 0 if shapes.drafting is None else shapes.drafting.max_drafts
    return row_state_specs(shapes.state, sharding, drafts, shapes.aux_size, shapes.model.dtype)


def describe_lookup(shapes: Shapes, sharding: Sharding | None) -> LookupState | None:
    """Returns those of what drafts are looked up in; None: nothing is looked up."""
    drafter = None if shapes.drafting is None else shapes.drafting.lookup
    return None if drafter is None else drafter.state_specs(shapes.state.rows, shapes.model.max_model_len, sharding)

"""The step feature of images: a tower's programs, and the rows of vectors that prompts read on the device.

A plan says which images are computed before a step, and in which rows their vectors lie (`image_writes`). One program
computes all of them, and is dispatched in front of the step. Programs of prompts then find the rows beside the
embedding (`core/layers/embedding.py`); programs of decoding rows know nothing of images.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

from jaxserve.core.models.tower import TowerConfig
from jaxserve.core.runtime.arguments import abstract_params
from jaxserve.core.runtime.buckets import Bucket, BucketTable
from jaxserve.core.runtime.device_state import make_zeros
from jaxserve.core.runtime.feature import DeviceState, FeatureHost, StepFeature
from jaxserve.core.runtime.identity import describe_value
from jaxserve.core.runtime.inputs import StepInputs
from jaxserve.core.runtime.memory import CachePlan, format_bytes, params_bytes
from jaxserve.core.runtime.program_inputs import ProgramInputs
from jaxserve.core.runtime.programs import Program, ProgramKey, call_program
from jaxserve.core.runtime.sizes import Sizes
from jaxserve.core.runtime.step_counts import StepCounts
from jaxserve.core.runtime.tower import choose_tower_impl, run_tower
from jaxserve.core.scheduler.step_plan import ImageWrite, StepPlan
from jaxserve.errors import ConfigError
from jaxserve.families.towers import find_tower, tower_param_specs

_TOWER = "tower"
_MAX_IMAGES = 32  # of a program; the smallest images of Qwen3-VL have 256 patches
_MAX_SIZES = 5  # of programs, each with half of the patches of the next
_GRAIN, _ROWS = 64, 8  # patches, whose multiples sizes are; the second where a vector's do not divide the first
_HELD_STEPS = 2  # the rows hold the images of so many of the largest steps


@dataclass(frozen=True)
class Images(StepFeature):
    """A model that reads images."""

    tower: TowerConfig  # fitted to the devices
    impl: str  # of its attention
    mesh: Mesh | None = None  # of a bound feature on several devices

    @property
    def limits(self) -> Mapping[str, Any]:
        """See `StepFeature.limits`."""
        return {
            "max_image_rows": self.num_rows,
            "max_num_batched_patches": self.tower.max_patches,
            "max_step_images": _MAX_IMAGES,
            "whole_image_tokens": self.tower.processor.shape.most_tokens if self.tower.mutual else 0,
        }

    @property
    def note(self) -> str:
        """See `StepFeature.note`."""
        return _TOWER

    @property
    def num_rows(self) -> int:
        """Vectors that the device holds."""
        return _HELD_STEPS * self.sizes[-1] // self.tower.merge_size**2

    @property
    def sizes(self) -> tuple[int, ...]:
        """The patches of each program, ascending, of whole vectors; none is for less than the smallest image."""
        largest, least = self.tower.max_patches, self.tower.processor.shape.least_patches
        square = self.tower.merge_size**2
        grain = math.lcm(square, _ROWS if _GRAIN % square else _GRAIN)
        halves = {-(-max(largest >> half, least) // grain) * grain for half in range(_MAX_SIZES)}
        return tuple(sorted(halves))

    def find_size(self, num_patches: int) -> int:
        """Returns the patches of the smallest program that holds so many."""
        return next(size for size in self.sizes if size >= num_patches)

    def bind(self, sizes: Sizes, plan: CachePlan, mesh: Mesh, first_pool: int) -> Images:
        """See `StepFeature.bind`."""
        # Its products and its attention are those of the model, which have been tested by now.
        blocks = replace(self.tower.blocks, few_rows=sizes.model.few_rows)
        bound = make_images(sizes, replace(self.tower, blocks=blocks))
        return replace(bound, mesh=mesh if mesh.size > 1 else None)

    def params_specs(self, sizes: Sizes, mesh: Mesh) -> Any:
        """Returns the tower's parameters, and the rows of vectors."""
        shape = self.num_rows, self.tower.num_parts, self.tower.out_size
        rows = jax.ShapeDtypeStruct(shape, self.tower.blocks.dtype, sharding=NamedSharding(mesh, PartitionSpec()))
        return {"tower": abstract_params(tower_param_specs(self.tower), sizes, mesh), "rows": rows}

    def select_params(self, params: Any, bucket: Bucket) -> Any:
        """See `StepFeature.select_params`."""
        return params["rows"] if bucket.is_mixed else None

    def params_bytes(self, sizes: Sizes) -> int:
        """See `StepFeature.params_bytes`."""
        return params_bytes(tower_param_specs(self.tower), sizes.num_devices, sizes.platform) + self.rows_bytes

    @property
    def rows_bytes(self) -> int:
        """Bytes of the rows on each device."""
        item = jnp.dtype(self.tower.blocks.dtype).itemsize
        return self.num_rows * self.tower.num_parts * self.tower.out_size * item

    def plan_line(self, sizes: Sizes) -> tuple[str, int, str]:
        """See `StepFeature.plan_line`."""
        rows = f"{format_bytes(self.rows_bytes)} for the vectors of {self.num_rows:,} tokens of images"
        return "images", self.params_bytes(sizes), f"a tower of {self.tower.blocks.num_layers} layers; {rows}"

    def describe(self, sizes: Sizes) -> Mapping[str, Any]:
        """See `StepFeature.describe`."""
        return {"tower": describe_value(self.tower), "tower_attention": self.impl}

    def list_programs(self, buckets: BucketTable) -> Iterator[ProgramKey]:
        """See `StepFeature.list_programs`."""
        yield from ((_TOWER, size) for size in self.sizes)

    def list_largest(self, buckets: BucketTable) -> Iterator[ProgramKey]:
        """See `StepFeature.list_largest`."""
        yield _TOWER, self.sizes[-1]

    def make_program(self, kind: str, key: Any, inputs: ProgramInputs, state: Any, params: Any) -> Program | None:
        """See `StepFeature.make_program`."""
        if kind != _TOWER:
            return None
        described = find_tower(self.tower).inputs(self.tower, key)
        arrays = {name: inputs.spec(array.shape, array.dtype) for name, array in described.items()}
        lengths = inputs.spec((_MAX_IMAGES,), jnp.int32)
        targets = inputs.spec((key // self.tower.merge_size**2,), jnp.int32)
        function = partial(write_images, self.tower, self.impl, self.mesh)
        arguments = params["rows"], params["tower"], arrays, lengths, targets
        return Program(function, arguments, donated=(0,), has_products=True)

    def precede_forward(self, params: Any, model_params: Any, inputs: StepInputs, bucket: Bucket) -> Any:
        """Returns the parameters with the rows beside the embedding, in programs of prompts."""
        if not bucket.is_mixed:
            return model_params
        return {**model_params, "embed": {**model_params["embed"], "images": params}}

    def open(self, sizes: Sizes, params: Any, counts: StepCounts) -> ImageRunner:
        """See `StepFeature.open`."""
        return ImageRunner(self, params, counts)


def write_images(
    tower: TowerConfig,
    impl: str,
    mesh: Mesh | None,
    rows: Float[Array, "R P D"],
    params: Any,
    arrays: Mapping[str, Array],
    lengths: Int[Array, " I"],
    targets: Int[Array, " M"],
) -> Float[Array, "R P D"]:
    """Returns the rows, which are donated, with the vectors of images; targets beyond the last row are padding."""
    vectors = run_tower(tower, params, arrays, lengths, impl=impl, mesh=mesh)
    return rows.at[targets].set(vectors, mode="drop")


class ImageRunner(FeatureHost):
    """Runs the tower in front of steps."""

    def __init__(self, feature: Images, tower_params: Any, counts: StepCounts) -> None:
        self._feature, self._tower, self._counts = feature, find_tower(feature.tower), counts
        self.params = {"tower": tower_params, "rows": None}

    def reset(self, state: Any) -> None:
        """Empties the rows."""
        (leaf, *_) = jax.tree.leaves(self.params["tower"])
        feature, self.params["rows"] = self._feature, None  # freed first
        shape = feature.num_rows, feature.tower.num_parts, feature.tower.out_size
        sharding = NamedSharding(leaf.sharding.mesh, PartitionSpec())
        self.params["rows"] = make_zeros(jax.ShapeDtypeStruct(shape, feature.tower.blocks.dtype, sharding=sharding))

    def select_params(self, bucket: Bucket) -> Any:
        """See `FeatureHost.select_params`."""
        return self.params["rows"] if bucket.is_mixed else None

    def warm_up(self, device: DeviceState) -> None:
        """Runs the tower on padding."""
        for size in self._feature.sizes:
            self._run(device, size, ())
        jax.block_until_ready(self.params["rows"])

    def prepare(self, device: DeviceState, plan: StepPlan) -> None:
        """Computes the images that the plan's chunks read, behind the steps in flight."""
        if plan.image_writes:
            num_patches = sum(write.item.num_patches for write in plan.image_writes)
            self._run(device, self._feature.find_size(num_patches), plan.image_writes)
            self._counts.tower_images += len(plan.image_writes)
            self._counts.tower_patches += num_patches

    def _run(self, device: DeviceState, size: int, writes: Sequence[ImageWrite]) -> None:
        feature, tower = self._feature, self._feature.tower
        arrays = {name: np.zeros(each.shape, each.dtype) for name, each in self._tower.inputs(tower, size).items()}
        lengths = np.zeros(_MAX_IMAGES, np.int32)
        targets = np.full(size // tower.merge_size**2, feature.num_rows, np.int32)
        if writes:
            for name, array in self._tower.arrange(tower, [write.item for write in writes]).items():
                arrays[name][: len(array)] = array
            lengths[: len(writes)] = [write.item.num_patches for write in writes]
            rows = [row for write in writes for row in write.rows]
            targets[: len(rows)] = rows
        program = device.programs.get(_TOWER, size)
        self.params["rows"] = call_program(program, self.params["rows"], self.params["tower"], arrays, lengths, targets)


def make_images(sizes: Sizes, tower: TowerConfig) -> Images:
    """Returns the feature of an engine that reads images with a fitted tower.

    Raises:
        ConfigError: a step has no room for an image that it must compute whole.
    """
    scheduler, num_tokens = sizes.config.scheduler, tower.processor.shape.most_tokens
    assert scheduler.max_num_seqs is not None and scheduler.max_num_batched_tokens is not None
    need, given = scheduler.max_num_seqs + num_tokens, scheduler.max_num_batched_tokens
    if tower.mutual and given < need:
        message = (
            f"must be at least {need}, got {given}: one step computes the {num_tokens} tokens of an image, beside one "
            f"for each of max_num_seqs={scheduler.max_num_seqs} rows; limit_mm_per_prompt={{'image': 0}} serves text"
        )
        raise ConfigError(message, field="max_num_batched_tokens", value=given)
    impl, _ = choose_tower_impl(tower, sizes.impl, sizes.num_devices, sizes.platform)
    return Images(tower, impl)

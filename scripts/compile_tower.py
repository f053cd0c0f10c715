"""Compiles the tower of Qwen3-VL-8B, as published, for devices that are not attached.

A child process of `scripts/test_kernels.py`, like `scripts/compile_step.py`: see `compile_gate.py`. A program takes one
batch of images. Its temporaries must grow with the patches, not with their square.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from jaxserve.core.models.base import ParamSpec
from jaxserve.core.models.tower import TowerConfig
from jaxserve.core.runtime.tower import choose_tower_impl, fit_tower, run_tower
from jaxserve.core.sharding import DEFAULT_RULES
from jaxserve.families.registry import parse_config
from jaxserve.families.towers import find_tower, parse_tower, tower_param_specs
from jaxserve.features.bundle.tuned.options import tuned_options
from jaxserve.media.processors import read_processor
from jaxserve.media.processors.settings import ImageSettings
from jaxserve.presets import load_preset
from pallas_kernels.targets import Target, find_target, open_devices
from pallas_kernels.testing.compile_gate import Gate, choose_names, make_parser, print_report
from pallas_kernels.testing.gate_report import ProgramReport
from scripts.compile_step import make_target_mesh

NAME, TEXT = "qwen3-vl-8b", "qwen3-8b"  # the text model has the sizes of this preset
VISION: dict[str, Any] = {
    "deepstack_visual_indexes": [8, 16, 24],
    "depth": 27,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_size": 1152,
    "in_channels": 3,
    "intermediate_size": 4304,
    "model_type": "qwen3_vl",
    "num_heads": 16,
    "num_position_embeddings": 2304,
    "out_hidden_size": 4096,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
PROCESSOR: dict[str, Any] = {
    "size": {"longest_edge": 16777216, "shortest_edge": 65536},
    "patch_size": 16,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}
FEW_LAYERS = 2
NUM_IMAGES = 64
PATCHES = (16384, 4096)  # the first always, both in the full gate
DEVICE_COUNTS = {"gpu": 2, "tpu": 8}  # in the full gate, beside one
# The most bytes of temporaries: of a step of attention, and of a patch. At 16,384 patches the scores of all pairs would
# be as many for a single head as those of all patches here.
STEP_TEMP, PATCH_TEMP = 2**28, 2**16


@dataclass(frozen=True)
class Program:
    """A tower for a batch of images on some devices."""

    config: TowerConfig
    num_patches: int
    num_devices: int

    @property
    def name(self) -> str:
        """Its name in reports."""
        layers = self.config.blocks.num_layers
        return f"tower {self.num_patches} patches: {NAME}, {layers} layers, {self.num_devices} devices"


def make_tower(num_layers: int, num_devices: int) -> TowerConfig:
    """Returns the tower with all layers, or a few, of which the first is deep."""
    rope = {"rope_type": "default", "mrope_section": [24, 20, 20], "mrope_interleaved": True}
    words = {"model_type": "qwen3_vl_text", "rope_scaling": rope}
    text = parse_config({"model_type": "qwen3_vl", "text_config": (load_preset(TEXT) or {}) | words})
    processor = read_processor("qwen3_vl", ImageSettings(PROCESSOR))
    deep = VISION["deepstack_visual_indexes"] if num_layers == VISION["depth"] else [0]
    vision = VISION | {"depth": num_layers, "deepstack_visual_indexes": deep}
    return fit_tower(parse_tower({"vision_config": vision}, text, processor), num_devices)


def list_programs(target: Target, *, full: bool) -> dict[str, Program]:
    """Returns the target's programs by name: of the largest size with few layers, in the full gate also others."""
    sizes = [(FEW_LAYERS, PATCHES[0], 1)]
    if full:
        sizes.append((FEW_LAYERS, PATCHES[1], 1))
        sizes.append((FEW_LAYERS, PATCHES[0], DEVICE_COUNTS[target.platform]))
        sizes += [(VISION["depth"], patches, 1) for patches in PATCHES]
    found = (Program(make_tower(layers, devices), patches, devices) for layers, patches, devices in sizes)
    return {program.name: program for program in found}


def measure_tower(gate: Gate, program: Program, impl: str, options: Mapping[str, Any]) -> ProgramReport:
    """Compiles one program."""
    config, devices, target = program.config, program.num_devices, gate.target
    impl, reason = choose_tower_impl(config, impl, devices, target.platform)
    mesh = None if devices == 1 else make_target_mesh(gate, devices)
    here = SingleDeviceSharding(gate.devices[0]) if gate.devices else None

    def place(spec: ParamSpec) -> jax.ShapeDtypeStruct:
        where = here if mesh is None else DEFAULT_RULES.sharding(mesh, spec.axes)
        return jax.ShapeDtypeStruct(spec.shape, jnp.dtype(spec.dtype), sharding=where)

    def replicate(array: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        where = here if mesh is None else NamedSharding(mesh, PartitionSpec())
        return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=where)

    params = jax.tree.map(place, tower_param_specs(config))
    arrays = jax.tree.map(replicate, find_tower(config).inputs(config, program.num_patches))
    lengths = replicate(jax.ShapeDtypeStruct((NUM_IMAGES,), jnp.int32))
    run = functools.partial(run_tower, config, impl=impl, mesh=mesh)
    jitted = jax.jit(run, compiler_options=dict(options) if gate.devices else None)
    report = ProgramReport(
        program.name,
        target.name,
        impl=impl,
        reason=reason,
        loops_follow_batch=impl == "xla",
        judges_tiles=True,
        most_temp_bytes=STEP_TEMP + PATCH_TEMP * program.num_patches,
    )
    return gate.measure(report, lambda: jitted.trace(params, arrays, lengths))


def main() -> None:
    args = make_parser(__doc__ or "").parse_args()
    target = find_target(args.target)
    programs = list_programs(target, full=args.full)
    chosen = choose_names(args, programs)
    gate = Gate(target, [] if args.lower_only else open_devices(target))
    with tuned_options(target) as options:
        for name in chosen:
            report = measure_tower(gate, programs[name], args.impl or target.impl, options)
            print_report(report, as_json=args.json)


if __name__ == "__main__":
    main()

"""Compiles the towers of published models that read images for devices that are not attached.

A child process of `scripts/test_kernels.py`, like `scripts/compile_step.py`: see `compile_gate.py`. A program is the
engine's own: it computes the images of a step, and writes their vectors to the rows that prompts read. Its temporaries
must grow with the patches, not with their square.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

from jaxserve.core.runtime.arguments import make_compiler
from jaxserve.core.runtime.memory import cache_budget
from jaxserve.core.runtime.shapes import Shapes
from jaxserve.core.runtime.startup import estimate_use, plan_pools
from jaxserve.core.runtime.tower import choose_tower_impl
from jaxserve.features.bundle.tuned.options import tuned_options
from jaxserve.features.images.feature import Images
from pallas_kernels.targets import Target, find_target, open_devices
from pallas_kernels.testing.compile_gate import Gate, choose_names, make_parser, print_report
from pallas_kernels.testing.gate_report import ProgramReport
from scripts.compile_step import FEW_LAYERS, FEWEST_LAYERS, MEMORY_SHARE, make_step_shapes, make_target_mesh
from scripts.image_models import IMAGE_MODELS

DEVICE_COUNTS = {"gpu": 2, "tpu": 8}  # in the full gate, beside one
# The most bytes of temporaries: of a step of attention, and of a patch. At 16,384 patches the scores of all pairs would
# be as many for a single head as those of all patches here.
STEP_TEMP, PATCH_TEMP = 2**28, 2**16
COPIES_STACKS = "tpu7x"  # its compiler lays stacked weights out anew in front of a loop over layers


@dataclass(frozen=True)
class Program:
    """The tower of a model, with all layers or a few, for the images of a step on some devices."""

    model: str
    num_layers: int
    num_patches: int
    num_devices: int

    @property
    def name(self) -> str:
        """Its name in reports."""
        layers = f"{self.num_layers} layers, {self.num_devices} devices"
        return f"tower {self.num_patches} patches: {self.model}, {layers}"

    def make_shapes(self, target: Target, impl: str) -> Shapes:
        """Returns those of an engine whose text model has a few layers: as many as a tower adds to, which sees none."""
        layers = {"num_layers": FEW_LAYERS, "num_tower_layers": self.num_layers}
        impl = IMAGE_MODELS[self.model].impl or impl
        return make_step_shapes(target, self.model, num_devices=self.num_devices, impl=impl, **layers)


def list_programs(target: Target, *, full: bool) -> dict[str, Program]:
    """Returns the target's programs by name: the largest of the first model with few layers, in the full gate also on
    several devices, and those of all models with all layers."""
    (first, model), is_gpu = next(iter(IMAGE_MODELS.items())), target.platform == "gpu"
    counts = (1, DEVICE_COUNTS[target.platform]) if full else (1,)
    found = [Program(first, FEWEST_LAYERS, model.patches[0], num_devices) for num_devices in counts]
    for name, model in IMAGE_MODELS.items() if full else ():
        found += [Program(name, model.num_layers, patches, 1) for patches in model.patches[: None if is_gpu else 1]]
    return {program.name: program for program in found}


def measure_tower(gate: Gate, program: Program, impl: str, options: Mapping[str, Any]) -> ProgramReport:
    """Compiles one program."""
    target, shapes = gate.target, program.make_shapes(gate.target, impl)
    (images,) = (feature for feature in shapes.features if isinstance(feature, Images))
    impl, reason = choose_tower_impl(images.tower, shapes.impl, shapes.num_devices, target.platform)
    ends = (layer + 1 for layer in images.tower.deep_layers)
    copied = images.params_bytes(shapes) - images.rows_bytes if target.name == COPIES_STACKS else 0
    plan = plan_pools(shapes, budget=cache_budget(target.memory_bytes, MEMORY_SHARE, estimate_use(shapes)))
    compiler = make_compiler(shapes, plan, make_target_mesh(gate, shapes.num_devices), options=options)
    report = ProgramReport(
        program.name,
        target.name,
        impl=impl,
        reason=reason,
        donated_bytes=images.rows_bytes,
        loops_follow_batch=impl == "xla",
        layer_turns=tuple(end - start for start, end in pairwise((0, *ends, images.tower.blocks.num_layers))),
        judges_tiles=True,
        most_temp_bytes=STEP_TEMP + PATCH_TEMP * program.num_patches + copied,
    )
    return gate.measure(report, partial(compiler.trace_program, "tower", program.num_patches))


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

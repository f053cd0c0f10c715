"""Builds a bundle: the programs of an engine, for devices that need not be here."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from jaxserve.config import EngineConfig
from jaxserve.engine.draft_files import locate_drafter
from jaxserve.engine.model_files import ModelFiles, resolve_model
from jaxserve.engine.progress import ShowProgress, hide_progress
from jaxserve.engine.tower_files import locate_tower

if TYPE_CHECKING:
    from jaxserve.core.runtime.shapes import Shapes
    from jaxserve.features.bundle.devices import BuildDevices
    from jaxserve.features.bundle.manifest import Manifest


def build_bundle(
    config: EngineConfig,
    files: ModelFiles,
    folder: Path,
    device: str | None = None,
    *,
    allow_untuned: bool = False,
    progress: ShowProgress = hide_progress,
) -> Manifest:
    """Compiles every program of an engine and writes them to `folder`, with the number of KV pages that they are for.

    No weight is read. The process compiles without JAX's cache from then on; for a `device` that is not None, this must
    be called before JAX has looked for devices.

    Args:
        device: the kind; None: the devices of this machine. See `open_build_devices`.
        allow_untuned: estimate the tiles of products where nothing was measured on such a GPU.

    Raises:
        ConfigError: the directory exists, or the device is not known or too few, or untuned.
        DeviceError: the compiler for the device is not installed.
        CapacityError: the device holds not even one sequence beside the model.
    """
    from jaxserve.core.runtime.arguments import make_compiler
    from jaxserve.core.runtime.memory import cache_budget
    from jaxserve.core.runtime.program_cache import disable_persistent_cache
    from jaxserve.core.runtime.self_test import confirm_kernels
    from jaxserve.core.runtime.startup import list_all_programs, measure_use, plan_pools, require_room
    from jaxserve.features.bundle.devices import open_build_devices, refuse_untuned
    from jaxserve.features.bundle.manifest import describe_target
    from jaxserve.features.bundle.tuned.options import tuned_options
    from jaxserve.features.bundle.write import refuse_target, write_bundle

    refuse_target(folder)
    if not allow_untuned:
        refuse_untuned(device, config.parallel.tensor_parallel_size)
    disable_persistent_cache()
    devices = open_build_devices(device, config.parallel.tensor_parallel_size)
    chosen = _choose_shapes(config, files, devices)
    shapes = confirm_kernels(chosen, devices.first) if devices.is_here else chosen
    require_room(shapes, devices.memory)
    facts = describe_target(shapes, devices.mesh)  # before anything is compiled, so that a fault of it costs nothing
    tuned = nullcontext({}) if devices.target is None else tuned_options(devices.target)
    with tuned as options, progress("Compiling programs") as report:
        elsewhere = devices.trace, options
        # Also where the pools' size is given: a start compares it with what is left there.
        use = None if devices.memory is None else measure_use(shapes, devices.mesh, *elsewhere)
        plan = plan_pools(shapes, budget=cache_budget(devices.memory, config.cache.device_memory_utilization, use))
        compiler = make_compiler(shapes, plan, devices.mesh, *elsewhere)
        return write_bundle(
            folder,
            facts,
            shapes,
            plan,
            use,
            compiler.compile,
            list_all_programs(shapes, shapes.buckets),
            tested=devices.is_here and shapes == chosen,
            progress=lambda name, done, total, _: report(done, total, name),
        )


def _choose_shapes(config: EngineConfig, files: ModelFiles, devices: BuildDevices) -> Shapes:
    from jaxserve.features.choose import make_shapes

    device = devices.first
    model = resolve_model(config, files, device.device_kind)
    drafter, tower = locate_drafter(config, files, model), locate_tower(config, files, model)
    with devices.trace():
        return make_shapes(
            config,
            model,
            device.platform,
            device.device_kind,
            None if drafter is None else drafter.model,
            None if tower is None else tower.config,
        )

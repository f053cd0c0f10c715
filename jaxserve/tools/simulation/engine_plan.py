"""From options to the engine that would serve with them, its KV pages as in `jaxserve plan`."""

from __future__ import annotations

from jaxserve.config import EngineConfig
from jaxserve.core.models.base import DecoderConfig
from jaxserve.core.runtime.memory import cache_budget
from jaxserve.core.runtime.shapes import Shapes
from jaxserve.core.runtime.startup import caches_prefixes, estimate_use, page_groups, plan_pools
from jaxserve.device_kinds import KNOWN, DeviceKind, find_kind
from jaxserve.errors import ConfigError
from jaxserve.features.choose import make_shapes
from jaxserve.tools.simulation.calibration import Calibration, make_formula, take_from_data_sheet
from jaxserve.tools.simulation.replica import EngineSpec


def choose_device(name: str | None, calibration: Calibration | None) -> tuple[DeviceKind, Calibration]:
    """Returns the kind of device to simulate, and its rates.

    Raises:
        ConfigError: the kind is unknown, or is not the one that was calibrated.
    """
    if name is None:
        if calibration is None or calibration.platform != "cpu":
            raise ConfigError(f"say which device to simulate: {KNOWN}", field="device")
        return DeviceKind("cpu", calibration.device, 0), calibration
    kind = find_kind(name)
    if calibration is None:
        return kind, take_from_data_sheet(name, kind)
    if calibration.platform != kind.platform:
        message = f"the calibration is of {calibration.device}, a {calibration.platform}, not of {name}"
        raise ConfigError(message, field="calibration", value=calibration.device)
    return kind, calibration


def plan_engine(config: EngineConfig, model: DecoderConfig, kind: DeviceKind, calibration: Calibration) -> EngineSpec:
    """Returns the engine of these options on devices of a kind.

    Raises:
        ConfigError: the options do not fit together.
        CapacityError: the model does not fit.
    """
    return make_spec(make_shapes(config, model, kind.platform, kind.name), kind, calibration)


def make_spec(shapes: Shapes, kind: DeviceKind, calibration: Calibration) -> EngineSpec:
    """Returns the engine of these shapes, with the pages that the memory plan leaves room for."""
    cache, scheduler = shapes.config.cache, shapes.config.scheduler
    limit = None if kind.platform == "cpu" else kind.memory
    pools = plan_pools(shapes, budget=cache_budget(limit, cache.device_memory_utilization, estimate_use(shapes)))
    assert cache.page_size is not None  # resolved
    return EngineSpec(
        limits=shapes.limits,
        groups=page_groups(shapes, pools),
        buckets=shapes.buckets,
        formula=make_formula(shapes, calibration),
        page_size=cache.page_size,
        enable_prefix_caching=caches_prefixes(shapes, pools),
        num_snapshots=pools.num_snapshots,
        overlap=scheduler.async_scheduling,
        **shapes.page_options,
    )

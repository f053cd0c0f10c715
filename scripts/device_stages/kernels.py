"""The kernels of a layer: the time of each by jax's profiler, and that of the layer by the slope.

Command buffers are off, because the profiler does not see the kernels in them.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import jax
from kernel_shapes import Shape

from device_stages.items import Context, Item, NotHereError
from device_stages.measure import (
    SLOPE,
    compile_programs,
    decode_shape,
    name_shape,
    prefill_shape,
    slope_item,
    timed_impl,
)
from device_stages.results import Line
from device_stages.traces import read_kernels

CALLS = 3  # per trace
MOST = 8  # kernels in a line, the slowest ones


def list_items(context: Context) -> Iterator[Item]:
    shapes = [decode_shape(context, 32, 4096)]
    if not context.tiny:
        shapes += [prefill_shape(context, 4096, among=True), decode_shape(context, 1, 4096)]
    for shape in shapes:
        yield Item(f"{name_shape(shape)}, traced", partial(trace_shape, context, shape))
    for shape in () if context.tiny else shapes:
        yield Item(name_shape(shape), slope_item(context, shape))


def trace_shape(context: Context, shape: Shape) -> Line:
    """Returns the microseconds of each kernel in one layer, from a trace of a few calls."""
    layers, impl = SLOPE[0], timed_impl(context, shape)
    (call,) = compile_programs(shape, impl, (layers,))
    jax.block_until_ready(call())
    with context.clocks.watch() as clocks:
        found = trace_kernels(call)
    if not found:
        raise NotHereError("the profiler saw no kernels of a device")
    share = {name: seconds / (CALLS * layers) for name, (seconds, _) in found.items()}
    kernels = sorted(share, key=share.__getitem__, reverse=True)
    return {
        "impl": impl,
        "us_of_layer": 1e6 * sum(share.values()),
        "us_of_kernels": {name: round(1e6 * share[name], 2) for name in kernels[:MOST]},
        "launches": {name: found[name][1] / (CALLS * layers) for name in kernels[:MOST]},
        "clocks": clocks,
    }


def trace_kernels(call: Callable[[], jax.Array]) -> dict[str, tuple[float, int]]:
    """Returns (seconds, launches) of each kernel in `CALLS` calls."""
    with tempfile.TemporaryDirectory() as folder:
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0
        options.host_tracer_level = 0
        with jax.profiler.trace(folder, profiler_options=options):
            for _ in range(CALLS):
                out = call()
            jax.block_until_ready(out)
        paths = sorted(Path(folder).rglob("*.xplane.pb"))
        return read_kernels(jax.profiler.ProfileData.from_file(str(paths[-1]))) if paths else {}

"""Shapes and figures that the stages share which measure attention."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import jax
from kernel_shapes import MODELS, Shape, make_program, platform_page_size
from kernel_timing import Effort, count_layers, hold_pool, summarize

from device_stages.items import Context
from device_stages.results import Line
from pallas_kernels import AttnShape, resolve_impl

MODEL = "llama-8b"
POOL_BYTES = 48 * 10**9  # for the longer of two programs
SLOPE = (4, 20)  # layers of two programs, whose difference has no cost per call
TINY_SLOPE = (1, 2)
EFFORT, TINY_EFFORT = Effort(repeats=12, calls=4), Effort(repeats=2, calls=1)
REPEAT_SECONDS = 0.02  # least seconds of a repeat, unless MOST_CALLS take less
MOST_CALLS = 200
CHUNK_ROWS = 256  # rows of a step with one chunk; the others decode
CHUNK_CONTEXT = 512  # tokens of each row that decodes


def decode_shape(context: Context, rows: int, length: int, page_size: int | None = None) -> Shape:
    """Returns a shape of rows of `length` tokens, whose last token is computed."""
    return _shape(context, rows, length - 1, 1, page_size=page_size)


def prefill_shape(context: Context, new: int, cached: int = 0, *, among: bool = False) -> Shape:
    """Returns a shape of one chunk, alone or `among` rows that decode."""
    beside = (CHUNK_CONTEXT - 1,) * (CHUNK_ROWS - 1) if among else ()
    return _shape(context, 1, cached, new, beside=beside)


def _shape(context: Context, rows: int, cached: int, new: int, **options: Any) -> Shape:
    page_size = options.pop("page_size", None) or platform_page_size()
    shape = Shape(MODEL, MODELS[MODEL], rows, cached, new, "bfloat16", page_size, **options)
    return shrink(shape) if context.tiny else shape


def shrink(shape: Shape) -> Shape:
    """Returns the same kind of step, small enough for an interpreter on a CPU."""
    beside = tuple(min(cached, 20 + 7 * index) for index, cached in enumerate(shape.beside[:2]))
    sizes = {"rows": min(shape.rows, 2), "cached": min(shape.cached, 32), "new": min(shape.new, 24), "beside": beside}
    return Shape("tiny", (2, 1, 64), kv_dtype=shape.kv_dtype, page_size=min(shape.page_size, 32), **sizes)


def name_shape(shape: Shape) -> str:
    """Returns the shape's label without the model."""
    return shape.label.removeprefix(f"{shape.model} ").removesuffix(f" {shape.kv_dtype}")


def find_impl(context: Context, shape: Shape) -> str:
    """Returns the attention implementation for a shape here."""
    return resolve_impl(context.impl, AttnShape(shape.heads[0], shape.spec, shape.dtype))[0]


def timed_impl(context: Context, shape: Shape) -> str:
    """Returns the implementation to time: `find_impl`, but never an interpreter."""
    impl = find_impl(context, shape)
    return "xla" if impl.endswith("_interpret") else impl


def compile_programs(
    shape: Shape, impl: str, depths: Sequence[int], config: Any = None
) -> list[Callable[[], jax.Array]]:
    """Returns calls of one shape's programs with `depths` layers, compiled in threads."""

    def compile_one(layers: int) -> Callable[[], jax.Array]:
        run, arguments = make_program(shape, impl, layers, config)
        return hold_pool(run.lower(*arguments).compile(), arguments)

    with ThreadPoolExecutor(len(depths)) as pool:
        return list(pool.map(compile_one, depths))


def measure_slope(context: Context, shape: Shape, impl: str, config: Any = None) -> Line:
    """Returns a layer's time by the difference of two programs, with the times of both, clocks and bytes."""
    fewest, most = TINY_SLOPE if context.tiny else SLOPE
    most = max(fewest + 1, count_layers(shape, most, POOL_BYTES))
    short, long = compile_programs(shape, impl, (fewest, most), config)
    with context.clocks.watch() as clocks:
        few, many = sample(context, short), sample(context, long)
    base = summarize(few)["median"]
    line = describe_time(context, shape, [(seconds - base) / (most - fewest) for seconds in many])
    return {
        **line,
        "impl": impl,
        "layers": [fewest, most],
        "us_of_calls": [to_us(summarize(few)), to_us(summarize(many))],
        "megabytes": shape.bytes_read / 1e6,
        "clocks": clocks,
    }


def sample(context: Context, call: Callable[[], Any]) -> list[float]:
    """Returns seconds per call by repeat, each of enough calls that reading the clock does not matter."""
    if context.tiny:
        return TINY_EFFORT.sample(call)
    once = min(Effort(repeats=2, calls=1).sample(call))
    return replace(EFFORT, calls=max(EFFORT.calls, min(MOST_CALLS, round(REPEAT_SECONDS / once)))).sample(call)


def describe_time(context: Context, shape: Shape, samples: Sequence[float]) -> Line:
    """Returns the time and rate of a shape, beside the device's limits."""
    found = summarize(samples)
    rates = context.find("probe", "rates")
    line: Line = {"us": to_us(found)}
    seconds = found["median"]
    if seconds <= 0:  # shorter than the noise
        return line
    line |= {"tb_per_s": shape.bytes_read / seconds / 1e12, "tflop_per_s": shape.flops / seconds / 1e12}
    roof = "bytes_per_second" if shape.is_decode else "flops_per_second"
    if roof in rates:
        achieved = (shape.bytes_read if shape.is_decode else shape.flops) / seconds
        line |= {"share": achieved / rates[roof], "share_of": "the copy" if shape.is_decode else "the matmul"}
    return line


def to_us(summary: dict[str, Any]) -> dict[str, Any]:
    """Converts the seconds of `summarize` to microseconds."""
    return {name: value if name == "repeats" else 1e6 * value for name, value in summary.items()}


def slope_item(context: Context, shape: Shape, impl: str | None = None, config: Any = None) -> Callable[[], Line]:
    """Returns `measure_slope` of a shape as the `run` of an item."""
    return partial(measure_slope, context, shape, impl or timed_impl(context, shape), config)

"""Other libraries' dense attention on contiguous keys, without pages: what the shapes could do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import jax
from kernel_shapes import Shape
from kernel_timing import Effort, sample_dense, sample_torch

from device_stages.items import Context, Item, NotHereError
from device_stages.measure import EFFORT, TINY_EFFORT, decode_shape, describe_time, name_shape, prefill_shape
from device_stages.results import Line


def list_items(context: Context) -> Iterator[Item]:
    shapes = [decode_shape(context, 32, 4096), *(prefill_shape(context, new) for new in (4096, 1024, 16_384))]
    for shape in shapes[: 2 if context.tiny else None]:
        yield Item(f"jax.nn {name_shape(shape)}", partial(measure_dense, context, shape))
        yield Item(f"torch {name_shape(shape)}", partial(measure_torch, context, shape))


def measure_dense(context: Context, shape: Shape) -> Line:
    """Measures cuDNN's attention through jax.nn; elsewhere XLA's."""
    implementation = "cudnn" if jax.default_backend() == "gpu" else "xla"
    found = _measure(context, shape, partial(sample_dense, implementation=implementation))
    return {**found, "implementation": implementation}


def measure_torch(context: Context, shape: Shape) -> Line:
    try:
        import torch
    except ImportError as problem:
        raise NotHereError(str(problem)) from problem
    if not torch.cuda.is_available():
        raise NotHereError("torch sees no GPU")
    return {**_measure(context, shape, sample_torch), "torch": torch.__version__}


def _measure(context: Context, shape: Shape, run: Callable[[Shape, Effort], list[float]]) -> Line:
    """Measures a peer; raises NotHereError if it cannot do the shape."""
    try:
        with context.clocks.watch() as clocks:
            samples = run(shape, TINY_EFFORT if context.tiny else EFFORT)
    except Exception as problem:  # libraries refuse with any error
        raise NotHereError(f"{type(problem).__name__}: {problem}") from problem
    return {**describe_time(context, shape, samples), "clocks": clocks}

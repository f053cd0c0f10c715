"""The parts of the decode kernel's time, and choices that are off by default or outside the tuning tables: page size,
the write of keys, the early launch of the combine, a persistent grid of prefill."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import jax
from jax import lax
from jax.experimental import pallas as pl
from kernel_shapes import Shape, make_arguments, make_program

from device_stages.items import Context, Item, NotHereError
from device_stages.measure import (
    decode_shape,
    find_impl,
    measure_slope,
    name_shape,
    prefill_shape,
    slope_item,
    timed_impl,
)
from device_stages.results import Line
from pallas_kernels import AttnShape, choose_layout, prepare_batch
from pallas_kernels.hopper import combine, decode_kernel
from pallas_kernels.hopper.attention import HopperConfig
from pallas_kernels.hopper.decode_kernel import DecodeKernel
from pallas_kernels.mosaic_gpu import compat

PAGE_SIZES = (16, 32, 128, 64)


def list_items(context: Context) -> Iterator[Item]:
    shape = decode_shape(context, 32, 4096)
    yield Item("loads without compute", partial(measure_changed, context, shape, without_compute))
    for few in (decode_shape(context, 1, 4096), shape):
        name = f"no early launch, {name_shape(few)}"
        yield Item(name, partial(measure_changed, context, few, without_early_launch))
    for prompt in (prefill_shape(context, 4096), prefill_shape(context, 1024)):
        yield Item(f"persistent, {name_shape(prompt)}", partial(measure_tuned, context, prompt, go_from_unit_to_unit))
    for page_size in () if context.tiny else PAGE_SIZES:
        sized = decode_shape(context, 32, 4096, page_size)
        yield Item(f"pages of {page_size}", slope_item(context, sized))
    for written in (shape, prefill_shape(context, 4096)):
        name = f"keys written by a kernel, {name_shape(written)}"
        yield Item(name, partial(measure_tuned, context, written, write_by_kernel))


def load_only(self: DecodeKernel, index: jax.Array, carry: Any, *, unit: Any, factor: Any, scratch: Any) -> Any:
    """`DecodeKernel.attend_tile` without the compute: waits for a tile and gives its slot back."""
    del factor
    num_slots = self.count_slots("values")
    slot = lax.rem(index, num_slots)
    for name in ("keys", "values"):
        compat.barrier_wait(scratch[f"{name}_loaded"].at[slot])
        is_awaited = index + num_slots < unit.num_tiles
        pl.when(is_awaited)(partial(compat.barrier_arrive, scratch[f"{name}_freed"].at[slot]))
    acc, largest, total = carry
    return acc, largest, total + 1.0  # the divisor of the output


@contextlib.contextmanager
def without_compute() -> Iterator[None]:
    """Makes Hopper's decode kernel load its tiles without computing; its programs are cached apart."""
    jax.clear_caches()
    with mock.patch.object(DecodeKernel, "attend_tile", load_only):
        yield
    jax.clear_caches()


@contextlib.contextmanager
def without_early_launch() -> Iterator[None]:
    """Launches every kernel of Hopper's when the one before it has ended, as is usual."""
    jax.clear_caches()
    with contextlib.ExitStack() as stack:
        for module in (decode_kernel, combine):
            stack.enter_context(mock.patch.object(module, "await_earlier_kernel", do_nothing))
        stack.enter_context(mock.patch.object(decode_kernel, "launch_next_kernel", do_nothing))
        yield
    jax.clear_caches()


def do_nothing(*, interpret: bool) -> None:
    """In place of a function of `hopper/overlap.py`."""


def measure_changed(context: Context, shape: Shape, change: Callable[[], AbstractContextManager[None]]) -> Line:
    """Measures a layer with a changed decode kernel."""
    impl = find_impl(context, shape)
    if not impl.startswith("gpu"):
        raise NotHereError(f"only the Hopper kernels have it, this is {impl}")
    with change():
        if impl.endswith("_interpret"):
            run, arguments = make_program(shape, impl, 1)
            jax.block_until_ready(run(*arguments))
            return {"impl": impl}
        return measure_slope(context, shape, impl)


def write_by_kernel(config: HopperConfig) -> HopperConfig:
    """Our kernel writes the keys, not XLA's scatter."""
    return replace(config, write="kernel")


def go_from_unit_to_unit(config: HopperConfig) -> HopperConfig:
    """A block of prefill attends several units, not one."""
    return replace(config, prefill=replace(config.prefill, persistent=True))


def measure_tuned(context: Context, shape: Shape, change: Callable[[HopperConfig], HopperConfig]) -> Line:
    """Measures a layer with a changed configuration; the timing stage measures it with the usual one."""
    impl = timed_impl(context, shape)
    if impl != "gpu":
        raise NotHereError(f"only the Hopper kernels have it, this is {impl}")
    return measure_slope(context, shape, impl, change(find_config(shape, impl)))


def find_config(shape: Shape, impl: str) -> Any:
    """Returns the kernel configuration of a step of the shape, by table or formula."""
    layout = choose_layout(impl, shape.spec)
    attention = AttnShape(shape.heads[0], replace(shape.spec, layout=layout), shape.dtype)
    prepare = partial(prepare_batch, num_tokens=shape.num_tokens, shape=attention, impl=impl)
    meta = jax.eval_shape(lambda: make_arguments(shape, 1, layout))[4:]
    batch = jax.eval_shape(partial(prepare, max_query_len=1 if shape.is_decode else None), *meta)
    return batch.work.config

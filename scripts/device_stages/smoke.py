"""The smoke test of the kernels on this device: steps of real sizes against the XLA path.

All empty slots are NaN. A repeated step must give the same bits: one that does not has a race. Nor may it matter where
in a large pool the pages of a row lie.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from kernel_shapes import MODELS, Shape, compute_exactly, make_arguments, make_program, platform_page_size

from device_stages.items import Context, Item
from device_stages.measure import decode_shape, find_impl, name_shape, prefill_shape, shrink
from device_stages.results import Line
from pallas_kernels import choose_layout
from pallas_kernels.testing.compare import RELATIVE_TOLERANCE, relative_error

REPEATS, TINY_REPEATS = 20, 1
# Tokens in the rows' pages. Units of the longer rows have more tiles than any ring has slots.
RAGGED = (*(1, 63, 64, 65, 127, 500, 640, 1000, 1023, 1535, 2048, 3000), *(4095, 5000, 6400, 7777, 8191, 12_000))
RAGGED_CHUNK = (320, 700)  # tokens in pages and new tokens of the row after them
FAR_BYTES, TINY_FAR_BYTES = 40 * 10**9, 2 * 10**6  # of the pool in which pages lie far away: past 32 bits


def list_items(context: Context) -> Iterator[Item]:
    ragged = Shape("llama-8b", MODELS["llama-8b"], 1, *RAGGED_CHUNK, "bfloat16", platform_page_size(), beside=RAGGED)
    if context.tiny:
        shapes = [shrink(replace(ragged, new=1)), shrink(ragged)]
        if find_impl(context, shapes[0]).endswith("_interpret"):  # there a chunk takes as long as all the rest
            shapes.pop()
    else:
        shapes = [decode_shape(context, 32, 4096), ragged, prefill_shape(context, 1024)]
        shapes.append(prefill_shape(context, 64, 8192))
    for shape in shapes:
        yield Item(name_shape(shape), partial(check_step, context, shape))
    for shape in (decode_shape(context, 1, 4096), prefill_shape(context, 256, 2048)):
        yield Item(f"far pages, {name_shape(shape)}", partial(check_far_pages, context, shape))


def check_step(context: Context, shape: Shape) -> Line:
    """Compares one layer with the XLA path in float32: results, written pages, and repeats with the first run."""
    impl = find_impl(context, shape)
    run, (pool, *rest) = make_program(shape, impl, 1)
    first, pool, _ = run(pool, *rest)
    layout = choose_layout("xla", shape.spec)
    expected, written = compute_exactly(shape, layout, *make_arguments(shape, 1, layout))
    error = relative_error(first, expected, shape.num_tokens)
    pages_equal = None
    if choose_layout(impl, shape.spec) == layout:
        pages_equal = bool(_same_bits(pool[1:], written[1:]))
    del written
    changed, repeats = 0, TINY_REPEATS if context.tiny else REPEATS
    for _ in range(repeats):
        again, pool, _ = run(pool, *rest)
        changed += not _same_bits(again, first)
    faults = {
        f"relative error {error:.3g}, at most {RELATIVE_TOLERANCE:g}": error >= RELATIVE_TOLERANCE,
        f"{changed} of {repeats} repeats differ": changed,
        "pages differ from those that XLA wrote": pages_equal is False,
    }
    problems = [text for text, is_so in faults.items() if is_so]
    line = {"ok": not problems, "impl": impl, "relative_error": error, "pages_equal": pages_equal, "repeats": repeats}
    return {**line, "error": "; ".join(problems)} if problems else line


def check_far_pages(context: Context, shape: Shape) -> Line:
    """Runs one layer with a row's pages at the beginning and at the end of a large pool; all bits must be equal."""
    impl = find_impl(context, shape)
    layout = choose_layout(impl, shape.spec)
    run, (pool, q, k, v, table, *meta) = make_program(shape, impl, 1)
    page = pool.nbytes // pool.shape[0]
    num_pages, own = (TINY_FAR_BYTES if context.tiny else FAR_BYTES) // page, pool.shape[0]
    place = jax.jit(
        lambda near, start: lax.dynamic_update_slice_in_dim(
            jnp.full((num_pages, *near.shape[1:]), jnp.nan, near.dtype), near, start, 0
        )
    )
    take = jax.jit(lambda pool, start: lax.dynamic_slice_in_dim(pool, start, own))
    found = []
    for start in (0, num_pages - own):
        out, large, _ = run(place(pool, start), q, k, v, table + start, *meta)
        found.append((out, take(large, start)))
        del large
    equal = [bool(_same_bits(near, far)) for near, far in zip(*found, strict=True)]
    line = {"ok": all(equal), "impl": impl, "layout": layout, "pool_gb": num_pages * page / 1e9}
    names = ("answers", "written pages")
    differ = [name for name, same in zip(names, equal, strict=True) if not same]
    return line | {"error": f"{' and '.join(differ)} differ from those of the first pages"} if differ else line


@jax.jit
def _same_bits(left: jax.Array, right: jax.Array) -> jax.Array:
    """Compares bits, so that NaN equals NaN."""
    words = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[left.dtype.itemsize]
    return jnp.all(left.view(words) == right.view(words))

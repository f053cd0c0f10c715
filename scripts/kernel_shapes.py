"""Programs with the attention of a step, to be run and timed: rows in pages, and a chain of layers over them.

A program runs several layers one after another, each on its own pages, as a model does: caches stay cold and dispatch
is paid once. Every empty slot is NaN, which must not reach any output.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import (
    AttnLayer,
    AttnParams,
    AttnShape,
    KVSpec,
    attend_with_update,
    choose_layout,
    page_bytes,
    pool_shape,
    prepare_batch,
)

MODELS = {"llama-8b": (32, 8, 128), "qwen3-0.6b": (16, 8, 128)}  # N, K, H
POOL_BYTES = 24 * 10**9  # most for all layers of one measurement
PAGE_SIZES = {"gpu": 64, "tpu": 128}  # by platform
_OTHER_PAGE_SIZE = 32
CHUNK_UNIT = 32  # chunk rows begin at multiples of it in their sequence


@dataclass(frozen=True)
class Shape:
    """One measurement: `rows` rows with `cached` tokens in pages and `new` tokens to compute.

    Rows with one new token come first; `beside` has their tokens in pages.
    """

    model: str
    heads: tuple[int, int, int]
    rows: int
    cached: int
    new: int
    kv_dtype: str
    page_size: int
    dtype: str = "bfloat16"
    beside: tuple[int, ...] = ()

    @property
    def is_decode(self) -> bool:
        return self.new == 1

    @property
    def all_rows(self) -> list[tuple[int, int]]:
        """(tokens in pages, new tokens) of every row, the rows of `beside` first."""
        return [(cached, 1) for cached in self.beside] + [(self.cached, self.new)] * self.rows

    @property
    def num_tokens(self) -> int:
        """The number of tokens to compute, T."""
        return sum(new for _, new in self.all_rows)

    @property
    def flops(self) -> float:
        """Operations of both matmuls, over the keys that each query sees."""
        num_heads, _, head_dim = self.heads
        seen = sum(new * cached + new * (new + 1) / 2 for cached, new in self.all_rows)
        return 4.0 * num_heads * head_dim * seen

    @property
    def spec(self) -> KVSpec:
        _, num_kv_heads, head_dim = self.heads
        return KVSpec(num_kv_heads, head_dim, self.page_size, self.kv_dtype)

    @property
    def bytes_read(self) -> int:
        """Bytes of the keys and values of all rows."""
        return sum(cached + new for cached, new in self.all_rows) * page_bytes(self.spec) // self.page_size

    @property
    def label(self) -> str:
        kind = (
            f"decode {self.rows} x {self.cached + 1}" if self.is_decode else f"prefill {self.new} after {self.cached}"
        )
        beside = f" beside {len(self.beside)} rows" if self.beside else ""
        return f"{self.model} {kind}{beside} {self.kv_dtype}"


def platform_page_size() -> int:
    """Returns the tokens per page in measurements on this platform."""
    return PAGE_SIZES.get(jax.default_backend(), _OTHER_PAGE_SIZE)


def list_shapes(page_size: int, *, dry_run: bool) -> Iterator[Shape]:
    if dry_run:
        tiny = ("tiny", (2, 1, 128))
        yield Shape(*tiny, rows=2, cached=63, new=1, kv_dtype="bfloat16", page_size=page_size)
        yield Shape(*tiny, rows=1, cached=32, new=32, kv_dtype="bfloat16", page_size=page_size)
        return
    for model, heads in MODELS.items():
        for kv_dtype in ("bfloat16", "float8_e4m3fn"):
            for context in (512, 4096, 32768):
                for rows in (1, 8, 32, 128, 256):
                    yield Shape(model, heads, rows, context - 1, 1, kv_dtype, page_size)
    for new, cached in ((1024, 0), (4096, 0), (16384, 0), (1024, 4096), (1024, 16384)):
        yield Shape("llama-8b", MODELS["llama-8b"], 1, cached, new, "bfloat16", page_size)
    yield Shape("llama-8b", MODELS["llama-8b"], 1, 0, 4096, "float8_e4m3fn", page_size)


def prepare_dry_run() -> None:
    """Call before JAX starts: the GPU kernels' interpreter blocks threads of XLA's pool, one per warpgroup."""
    os.environ.setdefault("NPROC", "8")


def make_program(
    shape: Shape, impl: str, layers: int, config: Any = None
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Returns `make_chain` and `make_arguments` of a shape."""
    layout = choose_layout(impl, shape.spec)
    return make_chain(shape, impl, layers, layout, config), make_arguments(shape, layers, layout)


def make_arguments(shape: Shape, layers: int, layout: str) -> tuple[jax.Array, ...]:
    """Returns the pool, q, k, v and the arguments of `prepare_batch`.

    Pages are in random order, the page table is as wide as the longest row. Queries, keys and values are independent
    and normal (see `pallas_kernels.testing.compare`).
    """
    num_heads, num_kv_heads, head_dim = shape.heads
    spec = replace(shape.spec, layout=layout)
    meta, filled = _make_rows(shape)
    keys = jax.random.split(jax.random.key(0), 4)
    dims = pool_shape(spec, layers * len(filled))
    pool = _make_pool(keys[0], jnp.tile(jnp.asarray(filled), layers), dims, spec.dtype)
    q = _draw(keys[1], (shape.num_tokens, num_heads, head_dim), shape.dtype)
    k, v = (_draw(key, (shape.num_tokens, num_kv_heads, head_dim), shape.dtype) for key in keys[2:])
    return pool, q, k, v, *map(jnp.asarray, meta)


def make_chain(shape: Shape, impl: str, layers: int, layout: str, config: Any = None) -> Callable[..., Any]:
    """Returns a jitted chain of layers over `make_arguments`, whose pool it donates.

    The chain returns (the last layer's output, the pool, the first layer's output). Each run writes the same tokens.
    """
    num_heads, _, head_dim = shape.heads
    attention = AttnShape(num_heads, replace(shape.spec, layout=layout), shape.dtype)
    params = AttnParams(scale=head_dim**-0.5)

    @partial(jax.jit, donate_argnums=0)
    def run(pool: jax.Array, q: jax.Array, k: jax.Array, v: jax.Array, *meta: jax.Array) -> tuple[jax.Array, ...]:
        batch = prepare_batch(
            *meta,
            num_tokens=shape.num_tokens,
            shape=attention,
            max_query_len=1 if shape.is_decode else None,
            impl=impl,
            config=config,
        )
        outs = []
        for layer in range(layers):
            offset = layer * (pool.shape[0] // layers)
            q, pool = attend_with_update(q, k, v, pool, batch, AttnLayer(params, page_offset=offset))
            outs.append(q)
        return outs[-1], pool, outs[0]

    return run


def compute_exactly(
    shape: Shape, layout: str, pool: jax.Array, q: jax.Array, k: jax.Array, v: jax.Array, *meta: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns the reference output [T, N, H] f32 of the first layer on `make_arguments`, and the pool after it.

    Runs the XLA path in float32 and donates `pool`.
    """
    run = make_chain(replace(shape, dtype="float32"), "xla", 1, layout)
    with jax.default_matmul_precision("highest"):  # GPUs round float32 operands to 10 bits by default
        expected, pool, _ = run(pool, *(array.astype(jnp.float32) for array in (q, k, v)), *meta)
    return expected, pool


def _make_rows(shape: Shape) -> tuple[tuple[np.ndarray, ...], np.ndarray]:
    """Returns the page table, lengths, starts and distribution of `prepare_batch`, and each page's filled slots."""
    rng = np.random.default_rng(0)
    cached, new = np.array(shape.all_rows, np.int32).T
    lens = cached + new
    widths = -(-lens // shape.page_size)
    num_pages, num_rows = int(widths.sum()) + 1, len(lens)
    filled = np.zeros(num_pages, np.int32)
    table = np.zeros((num_rows, int(widths.max())), np.int32)
    pages = iter(1 + rng.permutation(num_pages - 1))
    for row in range(num_rows):
        for column in range(widths[row]):
            table[row, column] = page = next(pages)
            filled[page] = min(max(cached[row] - column * shape.page_size, 0), shape.page_size)
    starts = np.concatenate([[0], np.cumsum(new)]).astype(np.int32)
    num_single = num_rows if shape.is_decode else len(shape.beside)
    num_chunks = 0 if shape.is_decode or shape.cached % CHUNK_UNIT else shape.rows
    distribution = np.array([num_single, num_single + num_chunks, num_rows], np.int32)
    return (table, lens, starts, distribution), filled


@partial(jax.jit, static_argnums=(1, 2))
def _draw(key: jax.Array, dims: tuple[int, ...], dtype: str) -> jax.Array:
    """Returns normal numbers, drawn in float32 and rounded to bfloat16.

    Numbers drawn in bfloat16 have a mean of -0.011, which would hide a missing value in a mean of 32k values.
    """
    return jax.random.normal(key, dims).astype(jnp.bfloat16).astype(dtype)


@partial(jax.jit, static_argnums=(2, 3))
def _make_pool(key: jax.Array, filled: jax.Array, dims: tuple[int, ...], dtype: str) -> jax.Array:
    """Returns random pages, with NaN after the `filled` slots of each."""
    held = jnp.arange(dims[2])[None, :] < filled[:, None]
    return jnp.where(held[:, None, :, None], _draw(key, dims, dtype), jnp.nan).astype(dtype)

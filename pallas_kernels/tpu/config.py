"""Block sizes of the TPU kernels, and a formula that fits any shape into the VMEM of any TPU."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import jax.numpy as jnp

from pallas_kernels.layout import LANES, page_bytes, pool_shape
from pallas_kernels.spec import AttnShape

VMEM_BUDGET = 24 << 20  # bytes for a kernel's buffers: the smallest VMEM has 64 MiB, and spills can double the use
VMEM_LIMIT = 48 << 20  # bytes that the compiler may use
TABLE_LIMIT = 512 << 10  # bytes of a page table in SMEM, which has 1 MiB
SUBLANES = 8  # rows of a tile of 32-bit elements; narrower ones have more
MIN_TILE_TOKENS = 32

_DECODE_BLOCK_BYTES = 3 << 20  # enough in flight to cover the latency of the fastest HBM
_CHUNK_BLOCK_BYTES = 2 << 20
_NUM_LEAST_BUFFERS = 2
_TILE_ROWS = 512  # query rows of a KV head per tile of a chunk
_COMPUTE_TOKENS = 512
_LONG_COMPUTE_TOKENS = 1024  # one-token rows with few KV heads, whose steps do not fill each other's gaps
_SHORT_TOKENS = 256  # by bundles, 8 heads take 1.1 times as long for 256 keys as for 128, and 1.7 times for 512
HEADS_TOGETHER = 8  # KV heads of few query rows each: their dependent steps fill each other's gaps


@dataclass(frozen=True)
class DecodeConfig:
    """Tuning of the kernel for one-token rows."""

    pages_per_block: int  # pages moved together
    compute_tokens: int  # keys per step of the softmax; a multiple of 128 and of the page size
    num_buffers: int = 3  # blocks in VMEM: one is read while the others are filled
    rows_per_step: int = 8  # rows per step of the grid
    short_tokens: int = LANES  # `compute_tokens` of short rows
    rows_together: int = 1  # rows that share a block, and are attended side by side, if they are short

    def __post_init__(self) -> None:
        for tokens in (self.compute_tokens, self.short_tokens):
            _check_sizes(self.pages_per_block, tokens)
        if self.rows_together < 1 or self.rows_per_step % self.rows_together:
            raise ValueError(
                f"DecodeConfig.rows_together must divide rows_per_step {self.rows_per_step}, got {self.rows_together}"
            )
        if self.num_buffers < 2 or self.rows_per_step < 1:
            raise ValueError(
                f"DecodeConfig needs num_buffers >= 2 and rows_per_step >= 1, got {self.num_buffers} and "
                f"{self.rows_per_step}"
            )

    def count_share(self, page_size: int) -> int:
        """The most pages of a short row, for each of which a block has room beside those of its neighbours. By bundles,
        more steps pay only if more rows share them."""
        short = self.short_tokens // page_size
        return min(self.pages_per_block // self.rows_together // short, 1 + self.rows_together // 2) * short


@dataclass(frozen=True)
class ChunkConfig:
    """Tuning of the kernel for all other rows."""

    pages_per_block: int
    compute_tokens: int
    tile_tokens: int  # positions per tile of queries; a power of two

    def __post_init__(self) -> None:
        _check_sizes(self.pages_per_block, self.compute_tokens)
        if self.tile_tokens < MIN_TILE_TOKENS or self.tile_tokens & (self.tile_tokens - 1):
            raise ValueError(
                f"ChunkConfig.tile_tokens must be a power of two of at least {MIN_TILE_TOKENS}, got {self.tile_tokens}"
            )


@dataclass(frozen=True)
class TpuConfig:
    """Static tuning of both kernels."""

    decode: DecodeConfig
    chunk: ChunkConfig
    num_cores: int = 1  # of a device; each has a part of the KV heads


def split_heads(shape: AttnShape, num_cores: int) -> tuple[AttnShape, int]:
    """The part of a shape's heads that a core attends, and the number of cores. If they cannot share, one has all."""
    spec = shape.spec
    if num_cores == 1 or spec.num_kv_heads % num_cores:
        return shape, 1
    part = replace(spec, num_kv_heads=spec.num_kv_heads // num_cores)
    return replace(shape, num_heads=shape.num_heads // num_cores, spec=part), num_cores


def _check_sizes(pages_per_block: int, compute_tokens: int) -> None:
    if pages_per_block < 1:
        raise ValueError(f"pages_per_block must be at least 1, got {pages_per_block}")
    if compute_tokens < LANES or compute_tokens % LANES:
        raise ValueError(f"compute_tokens must be a multiple of {LANES}, got {compute_tokens}")


def count_sublanes(dtype: str | jnp.dtype) -> int:
    """Rows of a tile: 8 of 32 bits, 16 of 16, 32 of 8. Copies begin and end between tiles."""
    return SUBLANES * 4 // jnp.dtype(dtype).itemsize


def compute_dtype(shape: AttnShape) -> jnp.dtype:
    """The dtype of both operands of matrix products. 8-bit pages are widened to the query's dtype."""
    pages = jnp.dtype(shape.spec.dtype)
    return jnp.dtype(shape.dtype) if pages.itemsize == 1 else jnp.promote_types(shape.dtype, pages)


def pad_group(shape: AttnShape) -> int:
    """Query heads per KV head (G), rounded up to whole tiles of the products' operand."""
    sublanes = count_sublanes(compute_dtype(shape))
    return -(-shape.group_size // sublanes) * sublanes


def find_write_unit(page_size: int) -> int:
    """Tokens per copy of a chunk's keys to a page: whole sublane tiles of any dtype, within one page."""
    return math.gcd(32, page_size)


def default_config(shape: AttnShape, *, max_query_len: int | None = None) -> TpuConfig:
    """Block sizes by formula, for a page table of any width: `clip_blocks` fits them to a narrow one."""
    block = _fit_block(shape, _CHUNK_BLOCK_BYTES, count_step_pages(shape.spec.page_size))
    tile = _fit_tile(shape, _NUM_LEAST_BUFFERS * block * page_bytes(shape.spec), max_query_len)
    chunk = ChunkConfig(block, _fit_compute(block, shape.spec.page_size, _COMPUTE_TOKENS), tile)
    return TpuConfig(_fit_decode(shape), chunk)


def _fit_decode(shape: AttnShape) -> DecodeConfig:
    """As many short rows together as make up `HEADS_TOGETHER`, if a block holds a step of each."""
    spec, step = shape.spec, count_step_pages(shape.spec.page_size)
    most = max(step, _DECODE_BLOCK_BYTES // page_bytes(spec))
    short = max(step, min(most, _SHORT_TOKENS // spec.page_size) // step * step)
    rows = DecodeConfig.rows_per_step
    while rows > 1 and (rows * spec.num_kv_heads > HEADS_TOGETHER or rows * short > most):
        rows //= 2
    block = _fit_block(shape, _DECODE_BLOCK_BYTES, short, rows)  # whole steps of a short row have the best divisors
    compute = _LONG_COMPUTE_TOKENS if spec.num_kv_heads <= 4 else _COMPUTE_TOKENS
    return DecodeConfig(
        block,
        _fit_compute(block, spec.page_size, compute),
        max(_NUM_LEAST_BUFFERS, min(4, VMEM_BUDGET * 3 // 4 // (block * page_bytes(spec)))),
        short_tokens=short * spec.page_size,
        rows_together=rows,
    )


def _fit_block(shape: AttnShape, budget: int, step: int, rows: int = 1) -> int:
    """Pages of a block: whole steps, within the budget if one is, and no more than the windows of `rows` rows need."""
    block = max(step, budget // page_bytes(shape.spec) // step * step)
    if shape.window is None:
        return block
    return min(block, -(-(shape.window // shape.spec.page_size + 2) // step) * step * rows)


def count_step_pages(page_size: int) -> int:
    """Pages of the smallest compute block, which has whole pages and whole lanes."""
    return math.lcm(LANES, page_size) // page_size


def _fit_compute(block: int, page_size: int, limit: int) -> int:
    """The most keys for one step of the softmax, up to `limit`, that divide a block of `block` pages."""
    step = count_step_pages(page_size)
    steps = block // step
    sizes = (n for n in range(1, steps + 1) if steps % n == 0)
    best = max(n for n in sizes if n == 1 or n * step * page_size <= limit)
    return best * step * page_size


def find_overflow(shape: AttnShape) -> str | None:
    """Why even the smallest blocks of a shape do not fit into VMEM; None if they do."""
    spec = shape.spec
    needed = _NUM_LEAST_BUFFERS * count_step_pages(spec.page_size) * page_bytes(spec)
    needed += MIN_TILE_TOKENS * shape.group_size * _count_tile_bytes(shape)
    if needed <= VMEM_BUDGET:
        return None
    return f"its smallest blocks take {needed >> 20} MiB of VMEM, of {VMEM_BUDGET >> 20}: a smaller page_size may help"


def _count_tile_bytes(shape: AttnShape) -> int:
    """VMEM per query row of a tile, over all KV heads: q and the output, both double-buffered, and accumulator, maximum
    and sum in float32. The tile's own keys take less than the output."""
    width = pool_shape(shape.spec, 1)[-1]
    return shape.spec.num_kv_heads * (4 * width * jnp.dtype(shape.dtype).itemsize + 4 * width + 8 * LANES)


def _fit_tile(shape: AttnShape, buffer_bytes: int, max_query_len: int | None) -> int:
    """Positions per tile: enough rows for the matrix unit, within the VMEM that the pages' buffers leave."""
    rows = min(_TILE_ROWS, (VMEM_BUDGET - buffer_bytes) // _count_tile_bytes(shape))
    longest = 1 << 30 if max_query_len is None else max_query_len
    tile = MIN_TILE_TOKENS
    while tile < longest and 2 * tile * shape.group_size <= rows:
        tile *= 2
    return tile


def clip_blocks[C: (DecodeConfig, ChunkConfig)](config: C, page_size: int, table_width: int) -> C:
    """Checks the blocks against the page size and makes them no wider than the page table."""
    step = config.compute_tokens // page_size
    if config.compute_tokens % page_size or config.pages_per_block % step:
        raise ValueError(
            f"{type(config).__name__}: compute_tokens {config.compute_tokens} must be a multiple of the page size "
            f"{page_size} and divide the {config.pages_per_block * page_size} tokens of a block"
        )
    needed = table_width
    if isinstance(config, DecodeConfig):
        short = config.short_tokens // page_size
        if config.short_tokens % page_size or config.rows_together * short > config.pages_per_block:
            raise ValueError(
                f"DecodeConfig: short_tokens {config.short_tokens} must be a multiple of the page size {page_size}, "
                f"and a block of {config.pages_per_block * page_size} tokens hold them for {config.rows_together} rows"
            )
        needed = -(-table_width // short) * short * config.rows_together
    return replace(config, pages_per_block=min(config.pages_per_block, -(-needed // step) * step))

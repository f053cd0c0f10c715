"""The portable implementation: plain XLA, any device, any head size, any number of query heads per KV head.

Online softmax (Milakov and Gimelshein, 2018; FlashAttention's recurrence) over blocks of pages, for groups of tiles
of queries (`worklist.py`). Loops end with the batch, whatever its page table could hold, and nothing of the size of a
context is ever materialised.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.layout import gather_heads, page_bytes
from pallas_kernels.platform import traced_platform
from pallas_kernels.spec import AttnLayer, AttnShape, BatchMeta, HeadParams, KVSpec
from pallas_kernels.worklist import StepRows, TileList, list_chunk_tiles, list_token_tiles

TILE_TOKENS = 32  # queries per tile of a chunk
TILE_NUMBERS = 2**19  # of a tile's queries: 128 heads of 576 would take gigabytes
# On a CPU, of one-token rows and of tiles of chunks: how many are attended together, few, since each group stops at its
# own longest context; and keys per step of the online softmax. One-token rows are bound by memory and want few, long
# steps. A chunk's tile has enough work in a short step, and shorter steps let short prompts skip more.
CPU_GROUPS, CPU_KEYS = (8, 4), (128, 64)
# Elsewhere a step costs its launches, and on a GPU a wait for the host, which reads whether the loop goes on. So steps
# are few, as long as what they gather, or the scores, fit STEP_BYTES.
GROUP, MOST_KEYS, STEP_BYTES = 64, 2048, 2**26
MASKED = -1e30  # finite, so that a row without keys stays finite


def choose_layout(spec: KVSpec) -> str:
    """Any head size as it is."""
    return "plain"


def find_obstacle(shape: AttnShape) -> str | None:
    """None: every shape works."""
    return None


def plan_work(rows: StepRows, shape: AttnShape, *, config: None = None) -> tuple[TileList, ...]:
    """One-token rows in one list, the others cut into chunk tiles in a second, which a decode bucket does not have.

    All queries of the step are each in one tile of one list.

    Raises:
        ValueError: a `config`, of which this implementation has none.
    """
    if config is not None:
        raise ValueError(f"config: portable attention has nothing to tune, got {config!r}")
    groups = CPU_GROUPS if traced_platform() == "cpu" else (GROUP, GROUP)
    if rows.is_decode:
        return (list_token_tiles(rows, rows.query_lens, group=groups[0]),)
    num_rows, num_single = rows.query_lens.shape[0], rows.distribution[0]
    longest = rows.num_tokens if rows.max_query_len is None else min(rows.max_query_len, rows.num_tokens)
    singles = list_token_tiles(rows, rows.lens_between(0, num_single), group=groups[0])
    fitting = max(1, TILE_NUMBERS // (shape.num_heads * shape.spec.head_dim))
    tile_tokens = min(TILE_TOKENS, longest, fitting)
    chunks = list_chunk_tiles(rows, rows.lens_between(num_single, num_rows), tile_tokens=tile_tokens, group=groups[1])
    return singles, chunks


def attend(
    q: jax.Array,  # [T, N, H]
    kv_pages: jax.Array,  # [num_pages, 2K, page_size, H]
    batch: BatchMeta,
    layer: AttnLayer,
) -> jax.Array:
    """Attention [T, N, V] in q's dtype over pages that already hold this step's keys and values."""
    out = _fill(q, (*q.shape[:2], batch.shape.spec.out_dim), 0, q.dtype)
    for tiles in batch.work:

        def run_group(index: jax.Array, out: jax.Array, tiles: TileList = tiles) -> jax.Array:
            group = _slice_group(tiles, index)
            tokens = group.starts[:, None] + jnp.arange(tiles.tile_tokens, dtype=jnp.int32)  # [W, B]
            is_query = jnp.arange(tiles.tile_tokens) < group.counts[:, None]
            last_keys = None if batch.last_keys is None else batch.last_keys.at[tokens].get(mode="clip")
            found = _attend_group(q.at[tokens].get(mode="clip"), kv_pages, batch, group, layer, is_query, last_keys)
            return out.at[jnp.where(is_query, tokens, q.shape[0])].set(found.astype(out.dtype), mode="drop")

        out = lax.fori_loop(0, tiles.num_groups, run_group, out)
    return out


def _slice_group(tiles: TileList, index: jax.Array) -> TileList:
    columns = (
        lax.dynamic_slice_in_dim(column, index * tiles.group, tiles.group)
        for column in (tiles.rows, tiles.starts, tiles.counts, tiles.positions, tiles.lengths)
    )
    return TileList(*columns, tiles.num_groups, tiles.tile_tokens, tiles.group, tiles.step)


def _attend_group(
    q: jax.Array,  # [W, B, N, H]
    kv_pages: jax.Array,
    batch: BatchMeta,
    group: TileList,  # W tiles of B queries
    layer: AttnLayer,
    is_query: jax.Array,  # [W, B]
    last_keys: jax.Array | None,  # [W, B], that queries see; None: as far as the group says
) -> jax.Array:
    """Attention [W, B, N, V] of W tiles, each over its own keys, block by block from the first that it sees."""
    width, tile_tokens, num_heads, head_dim = q.shape
    spec = batch.shape.spec
    page_size = spec.page_size
    heads, span = layer.heads, batch.shape.span
    num_kv_heads, group_size = spec.num_kv_heads, batch.shape.group_size
    block_pages = _choose_block(batch, width, tile_tokens)
    block_tokens = block_pages * page_size
    is_narrow = kv_pages.dtype.itemsize == 1  # 8-bit pages are read in the query's dtype
    dtype = q.dtype if is_narrow else jnp.promote_types(q.dtype, kv_pages.dtype)

    # Queries of a KV head side by side: [W, K, B * G, H].
    q = q.reshape(width, tile_tokens, num_kv_heads, group_size, head_dim).swapaxes(1, 2)
    q = q.reshape(width, num_kv_heads, tile_tokens * group_size, head_dim).astype(dtype)
    table = batch.page_table[group.rows]  # [W, M]
    query_positions = group.query_positions  # [W, B]
    ends = group.ends
    if last_keys is None:
        last_keys = query_positions
    else:
        ends = jnp.max(jnp.where(is_query, last_keys + 1, 0), axis=1)
    ends = jnp.where(group.counts > 0, ends, 0)  # [W], one past the last key seen
    begins = jnp.zeros_like(ends) if span is None else jnp.maximum(group.positions - span + 1, 0)
    blocks = begins // block_tokens  # [W], first block of each tile
    num_blocks = jnp.max((ends + block_tokens - 1) // block_tokens - blocks)

    def run_block(index: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        columns = (blocks + index)[:, None] * block_pages + jnp.arange(block_pages, dtype=jnp.int32)  # [W, C]
        page_ids = jnp.take_along_axis(table, columns, axis=1, mode="clip") + layer.page_offset
        k, v = gather_heads(kv_pages, page_ids, spec)
        key_positions = columns[:, :1] * page_size + jnp.arange(block_tokens, dtype=jnp.int32)  # [W, E]
        is_key = (key_positions >= begins[:, None]) & (key_positions < ends[:, None])
        v = jnp.where(is_key[:, None, :, None], v, 0)  # a stale slot may hold NaN, which a weight of 0 does not remove
        seen = is_key[:, None] & (key_positions[:, None] <= last_keys[:, :, None])  # [W, B, E]
        if span is not None:
            seen &= key_positions[:, None] > query_positions[:, :, None] - span
        seen = jnp.repeat(seen, group_size, axis=1)[:, None]  # [W, 1, B * G, E]
        scores = jnp.where(seen, _score(q, k.astype(dtype), layer), MASKED)
        return _mix(carry, scores, v.astype(dtype))

    carry = _begin(q, heads, tile_tokens, spec.out_dim)
    _, total, mixed = lax.fori_loop(0, num_blocks, run_block, carry)
    out = mixed / jnp.maximum(total, 1e-30)[..., None]
    v_scale = heads.values_scale(spec)
    out = out if v_scale is None else out * v_scale[:, None, None]
    out = out.reshape(width, num_kv_heads, tile_tokens, group_size, spec.out_dim).swapaxes(1, 2)
    return out.reshape(width, tile_tokens, num_heads, spec.out_dim)


def _choose_block(batch: BatchMeta, num_tiles: int, tile_tokens: int) -> int:
    """Pages of a step of the online softmax, for each of `num_tiles` tiles."""
    spec, span = batch.shape.spec, batch.shape.span
    if traced_platform() == "cpu":
        return max(1, CPU_KEYS[tile_tokens > 1] // spec.page_size)
    score_bytes = 4 * tile_tokens * batch.shape.num_heads * spec.page_size
    fitting = STEP_BYTES // (num_tiles * max(page_bytes(spec), score_bytes))
    seen = MOST_KEYS if span is None else min(MOST_KEYS, span + tile_tokens - 1)  # by a tile
    return max(1, min(fitting, -(-seen // spec.page_size), batch.page_table.shape[1]))


def _score(q: jax.Array, k: jax.Array, layer: AttnLayer) -> jax.Array:
    """[W, K, Q, H] against [W, K, E, H] -> [W, K, Q, E] in float32."""
    params, heads = layer.params, layer.heads
    scale = params.scale if heads.k_scale is None else params.scale * heads.k_scale[:, None, None]
    scores = jnp.einsum("wkqh,wkeh->wkqe", q, k, preferred_element_type=jnp.float32) * scale
    return scores if params.softcap is None else params.softcap * jnp.tanh(scores / params.softcap)


def _begin(q: jax.Array, heads: HeadParams, tile_tokens: int, out_dim: int) -> tuple[jax.Array, ...]:
    """The carry of the online softmax before the first key: largest score, total weight, weighted values."""
    _, num_kv_heads, num_queries, _ = q.shape
    if heads.sinks is None:
        largest, total = _fill(q, q.shape[:-1], MASKED), _fill(q, q.shape[:-1], 0)
    else:  # a sink is a key that every query sees, without a value
        sinks = heads.sinks.astype(jnp.float32).reshape(num_kv_heads, 1, -1)
        sinks = jnp.tile(sinks, (1, tile_tokens, 1)).reshape(num_kv_heads, num_queries)
        largest, total = _fill(q, q.shape[:-1], 0) + sinks, _fill(q, q.shape[:-1], 1)
    return largest, total, _fill(q, (*q.shape[:-1], out_dim), 0)


def _mix(carry: tuple[jax.Array, ...], scores: jax.Array, v: jax.Array) -> tuple[jax.Array, ...]:
    """One step of the online softmax, with scores [W, K, Q, E] of E more keys and their values [W, K, E, V]."""
    largest, total, mixed = carry
    new_largest = jnp.maximum(largest, jnp.max(scores, axis=-1))
    weights = jnp.exp(scores - new_largest[..., None])
    shrink = jnp.exp(largest - new_largest)
    total = total * shrink + jnp.sum(weights, axis=-1)
    added = jnp.einsum("wkqe,wkeh->wkqh", weights.astype(v.dtype), v, preferred_element_type=jnp.float32)
    return new_largest, total, mixed * shrink[..., None] + added


def _fill(like: jax.Array, shape: tuple[int, ...], value: float, dtype: jnp.dtype = jnp.float32) -> jax.Array:
    """A constant that varies over the same mesh axes as `like`: shard_map demands it of loop carries."""
    nothing = jnp.where(False, like.reshape(-1)[0], 0).astype(dtype)  # compilers fold it away
    return jnp.full(shape, value, dtype) + nothing

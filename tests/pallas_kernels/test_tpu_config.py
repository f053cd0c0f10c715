"""What the TPU kernels refuse, how they choose their blocks, and how they cut a step into tiles."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import choose_impl, prepare_batch, resolve_impl
from pallas_kernels.layout import page_bytes, pool_shape
from pallas_kernels.spec import AttnLayer, AttnParams, AttnShape, KVSpec
from pallas_kernels.targets import find_target, trace_for
from pallas_kernels.tpu import attention
from pallas_kernels.tpu.attention import choose_layout, find_config, find_obstacle
from pallas_kernels.tpu.config import (
    VMEM_BUDGET,
    ChunkConfig,
    DecodeConfig,
    TpuConfig,
    clip_blocks,
    default_config,
)
from pallas_kernels.tpu.tiles import NUM_COLUMNS, plan_tiles
from pallas_kernels.worklist import StepRows
from tests.examples import scale_examples

BF16, F32, FP8 = "bfloat16", "float32", "float8_e4m3fn"


def make_shape(
    num_heads: int = 32,
    num_kv_heads: int = 8,
    head_dim: int = 128,
    page_size: int = 128,
    dtype: str = BF16,
    pages: str = BF16,
    window: int | None = None,
) -> AttnShape:
    spec = KVSpec(num_kv_heads, head_dim, page_size, pages)
    spec = replace(spec, layout=choose_layout(spec))
    return AttnShape(num_heads, spec, dtype, window)


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        (make_shape(dtype="float16"), "queries are float16"),
        (make_shape(pages="float16"), "pages are float16"),
        (make_shape(pages=FP8, page_size=16), "multiple of 32, got 16"),
        (make_shape(page_size=8), "multiple of 16, got 8"),
        (make_shape(pages=F32, page_size=4), "multiple of 8, got 4"),
        (make_shape(num_heads=64, num_kv_heads=1), "at most 32 query heads"),
        (make_shape(num_heads=32, num_kv_heads=32, head_dim=256, page_size=256, pages=F32), "smaller page_size"),
        (AttnShape(4, KVSpec(4, 64, 16, BF16, "plain"), BF16), "layout 'paired', got 'plain'"),
        (AttnShape(4, KVSpec(4, 80, 16, BF16, "plain"), BF16), "layout 'padded', got 'plain'"),
    ],
)
def test_obstacles_say_what_would_work(shape: AttnShape, words: str) -> None:
    assert words in (find_obstacle(shape) or "")


def test_a_tpu_gets_these_kernels() -> None:
    name, _ = choose_impl("tpu", "TPU v6 lite")
    assert name == "tpu"
    assert resolve_impl(None, make_shape(), platform="tpu", device_kind="TPU v6 lite")[0] == "tpu"
    assert resolve_impl(None, make_shape(dtype="float16"), platform="tpu", device_kind="TPU v6 lite")[0] == "xla"


def test_a_table_too_large_for_smem_is_refused() -> None:
    shape, rows, width = make_shape(page_size=16), 8, 1 << 15
    q, k = (jnp.zeros((rows, heads, 128), jnp.bfloat16) for heads in (32, 8))
    batch = prepare_batch(
        jnp.zeros((rows, width), jnp.int32),
        jnp.ones(rows, jnp.int32),
        jnp.arange(rows + 1, dtype=jnp.int32),
        jnp.full(3, rows, jnp.int32),
        num_tokens=rows,
        shape=shape,
        max_query_len=1,
        impl="tpu_interpret",
    )
    pool = jnp.zeros(pool_shape(shape.spec, 2), jnp.bfloat16)
    with pytest.raises(ValueError, match=r"8 rows of 32,768 pages.*4 rows of that width or 16,384 pages"):
        attention.attend_with_update(q, k, k, pool, batch, AttnLayer(AttnParams(1.0)))


@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize("pages", [BF16, F32, FP8])
@pytest.mark.parametrize("num_kv_heads", [1, 8, 32])
@pytest.mark.parametrize("group", [1, 3, 16])
@pytest.mark.parametrize(("head_dim", "page_size"), [(64, 32), (128, 128), (128, 256), (256, 64), (80, 96)])
def test_default_blocks_fit(
    dtype: str, pages: str, num_kv_heads: int, group: int, head_dim: int, page_size: int
) -> None:
    shape = make_shape(num_kv_heads * group, num_kv_heads, head_dim, page_size, dtype, pages)
    if find_obstacle(shape) is not None:
        assert num_kv_heads == 32 or shape.num_heads * head_dim > 8192, "only the widest models may not fit"
        return
    config = default_config(shape)
    for part in (config.decode, config.chunk):
        for table_width in (1, 7, 300):
            clipped = clip_blocks(part, page_size, table_width)
            assert clip_blocks(clipped, page_size, table_width) == clipped
            assert clipped.pages_per_block <= part.pages_per_block
    assert config.decode.num_buffers * config.decode.pages_per_block * page_bytes(shape.spec) <= VMEM_BUDGET
    assert config.chunk.tile_tokens * group <= max(512, 32 * group)


@pytest.mark.parametrize(("num_kv_heads", "num_cores"), [(8, 2), (2, 2), (1, 1), (3, 1)])
def test_two_cores_share_the_heads_if_they_can(num_kv_heads: int, num_cores: int) -> None:
    shape = make_shape(4 * num_kv_heads, num_kv_heads)
    ones = jnp.ones(8, jnp.int32)
    rows = StepRows(jnp.arange(9), ones, ones, 8 * ones[:3], num_tokens=8, max_query_len=1, max_len=4096)
    with trace_for(find_target("v5p")):
        config = find_config(shape, rows)
    assert config.num_cores == num_cores
    part = make_shape(4 * num_kv_heads // num_cores, num_kv_heads // num_cores)
    assert config.decode == default_config(part, max_query_len=1).decode, "blocks are those of a core's heads"
    with trace_for(find_target("v6e")):
        assert find_config(shape, rows) == default_config(shape, max_query_len=1)


def test_blocks_follow_the_window_and_the_drafts() -> None:
    assert default_config(make_shape()).decode.pages_per_block > 3
    assert default_config(make_shape(window=128)).decode.pages_per_block == 4
    assert default_config(make_shape(), max_query_len=5).chunk.tile_tokens == 32
    assert default_config(make_shape()).chunk.tile_tokens == 128


@pytest.mark.parametrize(
    ("num_kv_heads", "rows", "longest"), [(1, 8, 768), (2, 4, 768), (3, 2, 512), (4, 2, 512), (8, 1, 256)]
)
def test_short_rows_make_up_for_few_heads(num_kv_heads: int, rows: int, longest: int) -> None:
    """All rows that a window leaves short are, and those of a narrow table."""
    decode = default_config(make_shape(32 * num_kv_heads, num_kv_heads)).decode
    assert (decode.rows_together, decode.short_tokens) == (rows, 256)
    assert decode.count_share(128) * 128 == longest
    assert clip_blocks(decode, 128, 2).count_share(128) >= 2
    windowed = default_config(make_shape(32 * num_kv_heads, num_kv_heads, window=128)).decode
    assert windowed.rows_together == rows and windowed.count_share(128) >= 2


def test_blocks_have_long_steps_where_few_pages_fit() -> None:
    """19 pages of these latents would: a prime, so that a step would have one."""
    shape = AttnShape(16, KVSpec(1, 576, 128, BF16, "padded", value_dim=512), BF16)
    decode = default_config(shape).decode
    assert (decode.pages_per_block, decode.compute_tokens, decode.rows_together) == (18, 768, 8)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: DecodeConfig(8, 128, rows_together=3), "must divide rows_per_step 8, got 3"),
        (lambda: DecodeConfig(8, 128, short_tokens=96), "multiple of 128, got 96"),
        (lambda: clip_blocks(DecodeConfig(4, 512, short_tokens=384, rows_together=2), 128, 9), "for 2 rows"),
        (lambda: clip_blocks(DecodeConfig(2, 512), 256, 9), "short_tokens 128 must be a multiple of the page size 256"),
        (lambda: DecodeConfig(0, 128), "pages_per_block"),
        (lambda: DecodeConfig(8, 96), "multiple of 128, got 96"),
        (lambda: DecodeConfig(8, 128, num_buffers=1), "num_buffers"),
        (lambda: ChunkConfig(8, 128, 48), "power of two"),
        (lambda: ChunkConfig(8, 128, 16), "at least 32"),
        (lambda: clip_blocks(DecodeConfig(3, 256), 128, 9), "divide the 384 tokens"),
        (lambda: clip_blocks(DecodeConfig(3, 128), 48, 9), "multiple of the page size"),
    ],
)
def test_bad_blocks_are_refused(make: type, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make()


MAX_ROWS, MAX_TOKENS = 10, 480
cut_tiles = jax.jit(
    lambda *rows, tile_tokens: plan_tiles(StepRows(*rows, MAX_TOKENS, max_query_len=None, max_len=4096), tile_tokens),
    static_argnames="tile_tokens",
)


@settings(deadline=None, max_examples=scale_examples(60))
@given(
    rows=st.lists(st.tuples(st.integers(0, 90), st.integers(1, 80)), max_size=6),
    num_single=st.integers(0, 3),
    tile_tokens=st.sampled_from([32, 64]),
)
def test_tiles_hold_every_token_once(rows: list[tuple[int, int]], num_single: int, tile_tokens: int) -> None:
    """Each token of a row that is not a one-token row is in one tile, at the position that its slot says."""
    rows = [(3, 1)] * num_single + rows
    padding = [0] * (MAX_ROWS - len(rows))
    query_lens = [new for _, new in rows] + padding
    starts = np.concatenate([[0], np.cumsum(query_lens)])
    distribution = [num_single, num_single, len(rows)]
    arrays = (starts, query_lens, [sum(row) for row in rows] + padding, distribution)
    plan = cut_tiles(*(np.asarray(array, np.int32) for array in arrays), tile_tokens=tile_tokens)
    columns = np.asarray(plan.columns).reshape(NUM_COLUMNS, -1)
    seen = []
    for row, block, position, begin, end in columns[:, : int(plan.num_tiles)].T:
        assert 0 <= begin < end <= tile_tokens
        seen += [(row, position + slot, block * tile_tokens + slot) for slot in range(begin, end)]
    wanted = [
        (row, computed + index, starts[row] + index)
        for row, (computed, new) in enumerate(rows)
        if row >= num_single
        for index in range(new)
    ]
    assert seen == wanted
    assert not columns[4, int(plan.num_tiles) :].any(), "unused tiles are empty"


def test_tiles_in_the_worst_case() -> None:
    """As many tiles as rows and cuts between blocks allow."""
    query_lens = np.array([31, *[48] * 9], np.int32)  # every row but the first lies across a cut
    starts = np.concatenate([[0], np.cumsum(query_lens)]).astype(np.int32)
    plan = cut_tiles(starts, query_lens, query_lens, np.array([0, 0, 10], np.int32), tile_tokens=32)
    columns = np.asarray(plan.columns).reshape(NUM_COLUMNS, -1)
    held = columns[4, : int(plan.num_tiles)] - columns[3, : int(plan.num_tiles)]
    assert held.sum() == query_lens.sum() and int(plan.num_tiles) <= columns.shape[1]


def test_config_is_static() -> None:
    """Programs are keyed by it."""
    assert hash(default_config(make_shape())) == hash(TpuConfig(*vars(default_config(make_shape())).values()))

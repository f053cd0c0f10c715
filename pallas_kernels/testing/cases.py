"""The shapes and batches on which every implementation is tested, and hostile inputs for them.

`CASES` are short and many. `LONG_CASES` do what short ones never do at the block sizes that kernels choose themselves:
a ring reuses its slots, and a row has several units, which are joined. A device with many cores would cut their rows
into units too short for that, so `choose_config` has the work list made for one core, and that of chunks for as many as
the case says.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.backends import find_backend
from pallas_kernels.layout import pool_shape
from pallas_kernels.spec import AttnParams, AttnShape, HeadParams, KVSpec
from pallas_kernels.testing.compare import RELATIVE_TOLERANCE, relative_error

# Largest relative error of any token and head against the reference on the same rounded inputs, by q's dtype.
TOLERANCE = {"float32": 2e-5, "bfloat16": RELATIVE_TOLERANCE, "float16": 2e-3}


@dataclass(frozen=True)
class Case:
    """A model's shape and one batch. `rows` are (tokens already in pages, new tokens), one-token rows first."""

    name: str
    rows: tuple[tuple[int, int], ...]
    num_heads: int = 4
    spec: KVSpec = field(default_factory=lambda: KVSpec(2, 64, 16, "float32"))
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    max_rows: int = 8  # S
    max_tokens: int = 64  # T
    table_width: int = 12  # M
    max_pages: int | None = None  # pages of all rows together; None: as many as the table has entries
    max_query_len: int | None = None
    query_dtype: str | None = None  # None: the pages' dtype if queries can have it, else bfloat16
    num_chunks: int = 0  # rows of the chunk class, after the one-token rows: they begin at multiples of 32
    is_long: bool = False
    fixed_splits: bool = False
    causal: bool = True
    is_stored: bool = False  # cross attention: the first number of `rows` counts all keys, the second queries alone
    tree: bool = False  # each new token is a root, or the child of any one before it
    chunk_sms: int = 1  # multiprocessors of the device that a long case's chunks are cut for, where kernels cut them

    @property
    def params(self) -> AttnParams:
        return AttnParams(scale=self.spec.head_dim**-0.5, window=self.window, softcap=self.softcap)

    @property
    def dtype(self) -> str:
        """The dtype of q."""
        if self.query_dtype is not None:
            return self.query_dtype
        return self.spec.dtype if self.spec.dtype in TOLERANCE else "bfloat16"

    @property
    def shape(self) -> AttnShape:
        return AttnShape(self.num_heads, self.spec, self.dtype, self.window, self.fixed_splits, self.causal, self.tree)

    def count_keys(self, row: tuple[int, int]) -> int:
        """`seq_lens` of one of `rows`."""
        return row[0] if self.is_stored else sum(row)

    def with_layout(self, layout: str) -> Case:
        """The same case on pages of another layout."""
        return replace(self, spec=replace(self.spec, layout=layout))


@dataclass(frozen=True)
class Inputs:
    """A case's arguments of `attend_with_update` and `prepare_batch`, as numpy arrays."""

    q: np.ndarray  # [T, N, H]
    k: np.ndarray  # [T, K, H]
    v: np.ndarray | None  # [T, K, H]; None for latents
    kv_pages: np.ndarray  # [num_layers * num_pages, 2K, page_size, H]
    page_table: np.ndarray  # [S, M]
    seq_lens: np.ndarray  # [S]
    query_start_loc: np.ndarray  # [S + 1]
    distribution: np.ndarray  # [3]
    heads: HeadParams
    num_pages: int  # pages of one layer
    num_layers: int
    ancestors: np.ndarray | None = None  # [T, 2] u32, with AttnShape.tree

    @property
    def meta(self) -> tuple[np.ndarray, ...]:
        return self.page_table, self.seq_lens, self.query_start_loc, self.distribution

    @property
    def num_tokens(self) -> int:
        """Tokens that are not padding."""
        return int(self.query_start_loc[-1])


def make_inputs(case: Case, seed: int = 0, *, num_layers: int = 2) -> Inputs:
    """Hostile inputs: pages are permuted, every unused slot and page (the null page too) is NaN, and entries of the
    table that are unused or have left the window name pages of other rows or of none."""
    rng = np.random.default_rng(seed)
    spec, num_rows = case.spec, len(case.rows)
    assert num_rows <= case.max_rows and sum(new for _, new in case.rows) <= case.max_tokens, case
    max_pages = case.max_rows * case.table_width if case.max_pages is None else case.max_pages
    num_pages = 2 + max_pages  # the null page, and at least one that no row has
    kv_pages = np.full(pool_shape(spec, num_layers * num_pages), np.nan, np.float32)
    free = list(rng.permutation(np.arange(1, num_pages)))

    page_table = rng.integers(0, num_pages, (case.max_rows, case.table_width)).astype(np.int32)
    seq_lens = rng.integers(0, 99, case.max_rows).astype(np.int32)  # padding rows may have any length
    query_lens = np.zeros(case.max_rows, np.int32)
    for row, (computed, new) in enumerate(case.rows):
        length = case.count_keys((computed, new))
        seq_lens[row], query_lens[row] = length, new
        oldest = 0 if case.window is None else max(0, computed - case.window + 1)  # oldest key that a query sees
        for index in range(-(-length // spec.page_size)):
            page = free.pop()
            slots = np.arange(index * spec.page_size, (index + 1) * spec.page_size)
            if slots[-1] < oldest:
                continue  # the page left the window: its entry stays stale
            page_table[row, index] = page
            filled = int(np.sum(slots < computed))
            shape = (num_layers, spec.num_kv_heads * (1 if spec.is_latent else 2), filled, spec.head_dim)
            kv_pages[page::num_pages, :, :filled] = _store(rng.standard_normal(shape), spec)

    ends = np.cumsum(query_lens)
    num_single = next((row for row, (_, new) in enumerate(case.rows) if new > 1), num_rows)
    dtype, shape = jnp.dtype(case.dtype), (case.max_tokens, spec.num_kv_heads, spec.head_dim)
    return Inputs(
        q=rng.standard_normal((case.max_tokens, case.num_heads, spec.head_dim)).astype(dtype),
        k=rng.standard_normal(shape).astype(dtype),
        v=None if spec.is_latent else rng.standard_normal(shape).astype(dtype),
        kv_pages=kv_pages.astype(jnp.dtype(spec.dtype)),
        page_table=page_table,
        seq_lens=seq_lens,
        query_start_loc=np.concatenate([[0], ends]).astype(np.int32),
        distribution=np.array([num_single, num_single + case.num_chunks, num_rows], np.int32),
        heads=_make_heads(case, rng),
        num_pages=num_pages,
        num_layers=num_layers,
        ancestors=_grow_trees(case, np.random.default_rng(seed)) if case.tree else None,
    )


def _grow_trees(case: Case, rng: np.random.Generator) -> np.ndarray:
    """[T, 2] u32: random trees, several in a row; anything for padding."""
    words = rng.integers(0, 2**63, case.max_tokens, np.uint64)
    start = 0
    for _, new in case.rows:
        for index in range(new):
            parent = rng.integers(-1, index) if index else -1
            older = words[start + parent] if parent >= 0 else np.uint64(0)
            words[start + index] = older | np.uint64(1) << np.uint64(index)
        start += new
    return np.stack([words & np.uint64(2**32 - 1), words >> np.uint64(32)], axis=1).astype(np.uint32)


def choose_config(case: Case, impl: str) -> Any:
    """The tuning that a case runs with, the `config` of `prepare_batch`: None for the device's own."""
    backend = find_backend(impl)
    if not case.is_long or not backend.splits_keys:
        return None
    config = backend.module.default_config(case.shape)
    if hasattr(config.prefill, "num_sms"):
        config = replace(config, prefill=replace(config.prefill, num_sms=case.chunk_sms))
    return replace(config, decode=replace(config.decode, num_sms=1))


def _store(values: np.ndarray, spec: KVSpec) -> np.ndarray:
    """[..., 2K or K, tokens, H] as a page of the spec's layout keeps them."""
    if spec.layout == "paired":
        return np.concatenate([values[..., 0::2, :, :], values[..., 1::2, :, :]], axis=-1)
    padding = [(0, 0)] * (values.ndim - 1)
    return np.pad(values, (*padding, (0, pool_shape(spec, 1)[-1] - spec.head_dim)))


def _make_heads(case: Case, rng: np.random.Generator) -> HeadParams:
    """Sinks if the case has them, and scales if its pages have 8 bits: not all 1, so that a lost one shows."""
    sinks = rng.standard_normal(case.num_heads).astype(np.float32) if case.sinks else None
    if case.spec.dtype in TOLERANCE:
        return HeadParams(sinks=sinks)
    k_scale, v_scale = rng.uniform(0.5, 1.5, (2, case.spec.num_kv_heads)).astype(np.float32)
    return HeadParams(sinks, k_scale, None if case.spec.is_latent else v_scale)


def largest_error(case: Case, out: jax.Array, expected: jax.Array, num_tokens: int) -> float:
    """`relative_error` over the tokens that are not padding, as a share of the case's tolerance: below 1 is right."""
    assert np.isfinite(np.asarray(out, np.float32)).all(), f"{case.name}: padding must be finite too"
    return relative_error(out, expected, num_tokens) / TOLERANCE[case.dtype]


_DECODE = ((0, 1), (1, 1), (15, 1), (16, 1), (100, 1), (150, 1), (191, 1))
_MIXED = ((0, 1), (40, 1), (130, 1), (0, 17), (16, 16), (31, 2), (120, 9))
_CHUNKS = ((40, 1), (130, 1), (0, 32), (64, 40), (96, 7))
_FP8 = "float8_e4m3fn"


def _shape(
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: str = "float32",
    page_size: int = 16,
    value_dim: int | None = None,
) -> dict:
    return {
        "num_heads": num_heads,
        "spec": KVSpec(num_kv_heads, head_dim, page_size, dtype, value_dim=value_dim),
        "table_width": -(-192 // page_size),
    }


def _latents(num_heads: int, dtype: str, page_size: int) -> dict:
    """DeepSeek's latents."""
    return _shape(num_heads, 1, 576, dtype, page_size, 512)


_ENCODER = ((0, 1), (0, 17), (16, 16), (0, 30))
_CROSS = {"causal": False, "is_stored": True}
_TREE = {"tree": True}
_WIDE, _WIDE_FP8 = _shape(8, 2, 128, "bfloat16", 64), _shape(8, 2, 128, _FP8, 64)

CASES = [
    Case("decode", _DECODE, max_tokens=8, max_query_len=1),
    Case("decode full bucket", (*_DECODE, (5, 1)), max_tokens=8, max_query_len=1),
    Case("decode one row of many", ((70, 1),), max_tokens=8, max_query_len=1),
    Case("decode all padding", (), max_tokens=8, max_query_len=1),
    Case("decode window softcap", _DECODE, max_tokens=8, max_query_len=1, window=20, softcap=2.0),
    Case("decode window of one", _DECODE, max_tokens=8, max_query_len=1, window=1),
    Case("decode 4:4 bfloat16", _DECODE, max_tokens=8, max_query_len=1, **_shape(4, 4, 64, "bfloat16")),
    Case("mixed", _MIXED),
    Case("mixed one prompt", ((0, 64),)),
    Case("mixed one chunk deep in its row", ((128, 64),)),
    Case("mixed all padding", ()),
    Case("mixed window softcap", _MIXED, window=13, softcap=5.0),
    Case("mixed window of a page", _MIXED, window=16),
    Case("short chunks", ((60, 1), (0, 5), (33, 1), (9, 1), (0, 2)), max_query_len=5),
    Case("a chunk over many tiles", ((50, 100),), max_tokens=128),
    Case("8:4 bfloat16", _MIXED, **_shape(8, 4, 64, "bfloat16")),
    Case("8:1 float16", _MIXED, **_shape(8, 1, 64, "float16")),
    Case("8:2 of 128 bfloat16, pages of 128", _MIXED, **_shape(8, 2, 128, "bfloat16", 128)),
    Case("3:1 of 16, pages of 8", _MIXED, **_shape(3, 1, 16, page_size=8)),
    Case("heads of 80, pages of 64", _MIXED, **_shape(4, 2, 80, page_size=64)),
    Case("heads of 96, window", _MIXED, **_shape(4, 2, 96), window=40),
    Case("pages wider than a block", _MIXED, **_shape(4, 2, 32, page_size=256)),
    Case("decode sinks", _DECODE, max_tokens=8, max_query_len=1, sinks=True, **_shape(4, 2, 64, "bfloat16")),
    Case(
        "decode 8:1 of 128, window, softcap, sinks",
        _DECODE,
        max_tokens=8,
        max_query_len=1,
        window=40,
        softcap=3.0,
        sinks=True,
        **_shape(8, 1, 128, "bfloat16", 32),
    ),
    Case("decode 8:2 of 256 float16", _DECODE, max_tokens=8, max_query_len=1, **_shape(8, 2, 256, "float16", 64)),
    Case("decode 16:1 of 128", _DECODE, max_tokens=8, max_query_len=1, **_shape(16, 1, 128, "bfloat16", 64)),
    Case("decode fp8 8:2 of 128", _DECODE, max_tokens=8, max_query_len=1, **_shape(8, 2, 128, _FP8, 64)),
    Case(
        "decode fp8 4:4 of 64, window", _DECODE, max_tokens=8, max_query_len=1, window=70, **_shape(4, 4, 64, _FP8, 32)
    ),
    Case("drafts verified", ((60, 3), (0, 5), (33, 2), (9, 5)), max_query_len=5, **_shape(8, 2, 128, "bfloat16")),
    Case(
        "drafts verified, 3:1, window, sinks",
        ((60, 3), (31, 2)),
        max_query_len=3,
        window=9,
        sinks=True,
        **_shape(3, 1, 64, "bfloat16"),
    ),
    Case(
        "decode, fixed splits",
        ((1299, 1), (1023, 1), (1024, 1)),
        max_rows=4,
        max_tokens=4,
        max_query_len=1,
        fixed_splits=True,
        **_shape(8, 2, 128, "bfloat16", 64) | {"table_width": 21},
    ),
    Case("mixed 8:2 of 128 bfloat16, sinks", _MIXED, sinks=True, **_shape(8, 2, 128, "bfloat16", 32)),
    Case("mixed 4:1 of 256 bfloat16", _MIXED, **_shape(4, 1, 256, "bfloat16", 64)),
    Case("mixed fp8 8:2 of 128", _MIXED, **_shape(8, 2, 128, _FP8, 64)),
    Case("mixed fp8 4:2 of 64, window, softcap", _MIXED, window=30, softcap=4.0, **_shape(4, 2, 64, _FP8, 32)),
    Case("chunks", _CHUNKS, num_chunks=3, max_tokens=128, **_shape(8, 2, 128, "bfloat16", 32)),
    Case(
        "chunks and others, window",
        (*_CHUNKS, (17, 3)),
        num_chunks=3,
        max_tokens=128,
        window=50,
        **_shape(4, 2, 64, "bfloat16", 64),
    ),
    Case(
        "chunks on edges of the step too, in the middle of pages",
        ((96, 32), (32, 33), (17, 5)),
        num_chunks=2,
        max_tokens=96,
        **_shape(8, 2, 128, "bfloat16", 64),
    ),
    Case("decode latents 16 of 576", _DECODE, max_tokens=8, max_query_len=1, **_latents(16, "bfloat16", 64)),
    Case(
        "decode latents 5 of 40, window, softcap, sinks",
        _DECODE,
        max_tokens=8,
        max_query_len=1,
        window=20,
        softcap=3.0,
        sinks=True,
        **_shape(5, 1, 40, page_size=8, value_dim=32),
    ),
    Case("decode latents fp8", _DECODE, max_tokens=8, max_query_len=1, **_latents(16, _FP8, 32)),
    Case("mixed latents 8 of 576", _MIXED, **_latents(8, "bfloat16", 32)),
    Case("mixed latents 20 of 320, sinks", _MIXED, sinks=True, **_shape(20, 1, 320, "bfloat16", 16, 256)),
    Case("mixed latents fp8", _MIXED, **_latents(8, _FP8, 64)),
    Case(
        "drafts verified, latents", ((60, 3), (0, 5), (33, 2), (9, 5)), max_query_len=5, **_latents(16, "bfloat16", 64)
    ),
    Case("chunks, latents", _CHUNKS, num_chunks=3, max_tokens=128, **_latents(16, "bfloat16", 64)),
    Case("pages of one token", ((0, 1), (9, 1), (3, 6)), **_shape(2, 1, 16, page_size=1)),
    Case("decode 8:2 of 192", _DECODE, max_tokens=8, max_query_len=1, **_shape(8, 2, 192, "bfloat16", 64)),
    Case(
        "decode fp8 8:2 of 192, fixed splits",
        ((1299, 1), (1023, 1)),
        max_rows=4,
        max_tokens=4,
        max_query_len=1,
        fixed_splits=True,
        **_shape(8, 2, 192, _FP8, 64) | {"table_width": 21},
    ),
    Case("mixed 4:1 of 192 bfloat16, softcap", _MIXED, softcap=3.0, **_shape(4, 1, 192, "bfloat16", 64)),
    Case("mixed fp8 4:2 of 192, window", _MIXED, window=30, **_shape(4, 2, 192, _FP8, 32)),
    Case("encoder", _MIXED, causal=False),
    Case("encoder 4:4 of 64 bfloat16", _ENCODER, causal=False, **_shape(4, 4, 64, "bfloat16")),
    Case("encoder fp8 8:2 of 128, softcap, sinks", _ENCODER, causal=False, softcap=3.0, sinks=True, **_WIDE_FP8),
    Case("encoder of short rows", ((0, 1), (9, 1), (0, 4), (60, 3)), max_query_len=4, causal=False, **_WIDE),
    Case("cross decode", ((150, 1), (3, 1), (64, 1)), max_query_len=1, **_CROSS, **_shape(4, 4, 64, "bfloat16")),
    Case("cross, fewer keys than queries", ((3, 4), (150, 2)), max_query_len=4, **_CROSS, **_WIDE),
    Case("cross mixed", ((40, 1), (5, 33), (130, 9)), **_CROSS, **_WIDE),
    Case("cross mixed float32, sinks", ((40, 1), (5, 33), (130, 9)), sinks=True, **_CROSS),
    Case(
        "cross, fixed splits",
        ((1299, 2), (7, 3)),
        max_query_len=4,
        fixed_splits=True,
        **_CROSS,
        **_WIDE | {"table_width": 21},
    ),
    Case("tree 8:2 of 128", ((60, 3), (0, 5), (59, 5), (9, 8)), max_query_len=8, **_TREE, **_WIDE),
    Case(
        "tree fp8 8:2 of 128, softcap, sinks",
        ((62, 6), (9, 7)),
        max_query_len=8,
        softcap=3.0,
        sinks=True,
        **_TREE,
        **_WIDE_FP8,
    ),
    Case("tree of 64 tokens", ((30, 64),), max_query_len=64, **_TREE, **_shape(1, 1, 64, "bfloat16")),
    Case("tree float32", ((130, 40), (3, 1), (0, 20)), max_query_len=40, **_TREE),
    Case("cross mixed latents", ((40, 1), (5, 33), (130, 9)), **_CROSS, **_latents(8, "bfloat16", 32)),
]


def _long(name: str, rows: tuple[tuple[int, int], ...], num_heads: int, spec: KVSpec, **options: Any) -> Case:
    """A case no larger than its rows: padding rows cost the interpreters a block each, and pages are compared."""
    pages = [-(-(computed + new) // spec.page_size) for computed, new in rows]
    sizes = {"max_rows": len(rows), "max_tokens": sum(new for _, new in rows)}
    return Case(
        name, rows, num_heads, spec, table_width=max(pages), max_pages=sum(pages), is_long=True, **sizes, **options
    )


# Few heads for the GPU kernels, whose tiles count tokens; many for the TPU kernels, whose blocks count bytes. The rows
# are as short as tests/pallas_kernels/test_long_cases.py allows.
LONG_CASES = [
    _long("long 4:1 of 128", ((700, 1), (600, 40)), 4, KVSpec(1, 128, 64, "bfloat16")),
    _long("long fp8 4:1 of 128", ((700, 1), (600, 40)), 4, KVSpec(1, 128, 64, _FP8)),
    _long("long 64:8 of 256", ((400, 1), *[(40, 1)] * 8, (520, 70)), 64, KVSpec(8, 256, 64, "bfloat16")),
    _long("turn 4:1 of 128", ((700, 1), (1100, 32)), 4, KVSpec(1, 128, 64, "bfloat16"), chunk_sms=4),
    _long(
        "turn fp8 4:1 of 128, window, softcap, sinks",
        ((700, 1), (1200, 32)),
        4,
        KVSpec(1, 128, 64, _FP8),
        window=1100,
        softcap=3.0,
        sinks=True,
        chunk_sms=4,
    ),
    _long(
        "turn 4:1 of 128, not causal",
        ((700, 1), (1100, 32)),
        4,
        KVSpec(1, 128, 64, "bfloat16"),
        causal=False,
        chunk_sms=4,
    ),
]

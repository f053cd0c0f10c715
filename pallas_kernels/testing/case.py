"""One case of attention: its shape and batch, hostile inputs for it, and how far off an answer may be."""

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
LAYER = 1  # the second of the pool's two layers: attention must find its pages behind another layer's


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
    mutual: tuple[tuple[int, int, int], ...] = ()  # (row, first, end): tokens of a row's text that see each other
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
        return AttnShape(self.num_heads, self.spec, self.dtype, self.window, self.fixed_splits, self.causal)

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
    last_keys: np.ndarray | None = None  # [T]

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
        behind = 0 if case.window is None else case.window - case.causal  # keys before its own that a query sees
        oldest = 0 if case.window is None else max(0, computed - behind)
        for index in range(-(-length // spec.page_size)):
            page = free.pop()
            slots = np.arange(index * spec.page_size, (index + 1) * spec.page_size)
            if slots[-1] < oldest:
                continue  # the page left the window: its entry stays stale
            page_table[row, index] = page
            filled = int(np.sum(slots < computed))
            shape = (num_layers, spec.num_kv_heads * (1 if spec.is_latent else 2), filled, spec.head_dim)
            kv_pages[page::num_pages, :, :filled] = store_rows(rng.standard_normal(shape), spec)

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
        last_keys=_list_last_keys(case) if case.mutual else None,
    )


def _list_last_keys(case: Case) -> np.ndarray:
    """The last key [T] that each token sees; that of padding is any."""
    found = np.zeros(case.max_tokens, np.int32)
    at = 0
    for row, (computed, new) in enumerate(case.rows):
        positions = np.arange(computed, computed + new)
        last = positions.copy()
        for _, first, end in (each for each in case.mutual if each[0] == row):
            last[(positions >= first) & (positions < end)] = end - 1
        found[at : at + new] = last
        at += new
    return found


def choose_config(case: Case, impl: str) -> Any:
    """The tuning that a case runs with, the `config` of `prepare_batch`: None for the device's own."""
    backend = find_backend(impl)
    if not case.is_long or not backend.splits_keys:
        return None
    config = backend.module.default_config(case.shape)
    if hasattr(config.prefill, "num_sms"):
        config = replace(config, prefill=replace(config.prefill, num_sms=case.chunk_sms))
    return replace(config, decode=replace(config.decode, num_sms=1))


def store_rows(values: np.ndarray, spec: KVSpec) -> np.ndarray:
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

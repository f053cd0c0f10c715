"""The shapes and batches on which every implementation is tested.

`CASES` are short and many. `LONG_CASES` do what short ones never do at the block sizes that kernels choose themselves:
a ring reuses its slots, and a row has several units, which are joined. A device with many cores would cut their rows
into units too short for that, so `choose_config` has the work list made for one core, and that of chunks for as many as
the case says.
"""

from __future__ import annotations

from typing import Any

from pallas_kernels.spec import KVSpec
from pallas_kernels.testing.case import Case

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
_GAPS = ((150, 3), (0, 0), (16, 1), (0, 0), (60, 4))  # of drafts: where all have one token, row s has token s
_CROSS = {"causal": False, "is_stored": True}
_WIDE, _WIDE_FP8 = _shape(8, 2, 128, "bfloat16", 64), _shape(8, 2, 128, _FP8, 64)

CASES = [
    Case("decode", _DECODE, max_tokens=8, max_query_len=1),
    Case("decode full bucket", (*_DECODE, (5, 1)), max_tokens=8, max_query_len=1),
    Case("decode one row of many", ((70, 1),), max_tokens=8, max_query_len=1),
    Case("decode all padding", (), max_tokens=8, max_query_len=1),
    Case("empty rows between drafts", _GAPS, max_query_len=4),
    Case("empty rows between drafts, 8:2 of 128", _GAPS, max_query_len=4, **_WIDE),
    Case("decode window softcap", _DECODE, max_tokens=8, max_query_len=1, window=20, softcap=2.0),
    Case("decode window of one", _DECODE, max_tokens=8, max_query_len=1, window=1),
    Case("decode 4:4 bfloat16", _DECODE, max_tokens=8, max_query_len=1, **_shape(4, 4, 64, "bfloat16")),
    Case("mixed", _MIXED),
    Case("mixed empty rows between others, 8:2 of 128", ((150, 1), (0, 17), (0, 0), (31, 2)), **_WIDE),
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
    Case("encoder of radius 9", _ENCODER, causal=False, window=9),
    Case("encoder of radius 1, sinks", _ENCODER, causal=False, window=1, sinks=True, **_shape(4, 4, 64, "bfloat16")),
    Case("encoder of radius 20, softcap", ((0, 1), (90, 1), (0, 62)), causal=False, window=20, softcap=3.0),
    Case("encoder of radius 33, 8:2 of 128", ((40, 1), (100, 5)), max_query_len=5, causal=False, window=33, **_WIDE),
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
    Case("cross mixed latents", ((40, 1), (5, 33), (130, 9)), **_CROSS, **_latents(8, "bfloat16", 32)),
]

# Tokens that see each other, in one tile of queries or several, up to a row's end, and some of them computed before.
_MUTUAL = {
    "rows": ((40, 1), (10, 40), (16, 16), (20, 7)),
    "max_tokens": 96,
    "mutual": ((1, 12, 41), (1, 45, 50), (2, 16, 32), (3, 15, 25)),
}
MUTUAL_CASES = [  # for implementations that take last keys
    Case("images", **_MUTUAL),
    Case("images in a window shorter than they are", window=6, sinks=True, **_MUTUAL),
    Case("images 8:2 of 128 bfloat16, window, softcap", window=30, softcap=3.0, **_MUTUAL, **_WIDE),
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

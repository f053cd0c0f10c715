"""What the gate finds that no compiler says: descriptors, fences, and indices that are too short."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pallas_kernels.testing.gate_descriptors import Descriptor
from pallas_kernels.testing.gate_fences import list_unfenced
from pallas_kernels.testing.gate_offsets import list_short_indices

POOL = Descriptor(
    bits=16,
    sizes=(3_000_000, 8, 2, 8, 64),
    strides=(8192, 1024, 64, 128, 1),
    box=(1, 8, 2, 8, 64),
    swizzle=128,
)


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"sizes": (2, *POOL.sizes), "strides": (2, *POOL.strides), "box": (1, *POOL.box)}, "6 axes, of at most 5"),
        ({"sizes": (2**31, 8, 2, 8, 64)}, "an axis of 2,147,483,648 entries"),
        ({"strides": (8192, 1028, 64, 128, 1)}, "a stride of 2,056 bytes"),
        ({"strides": (2**39, 1024, 64, 128, 1)}, "a stride of 1,099,511,627,776 bytes"),
        ({"box": (1, 257, 2, 8, 64)}, "a box of 257 entries"),
        ({"box": (1, 8, 2, 8, 128)}, "a box whose rows have 256 bytes, with a swizzle of 128"),
        ({"box": (1, 8, 2, 8, 60)}, "a box whose rows have 120 bytes"),
        ({"strides": (8192, 1024, 64, 128, 2)}, "elements that lie 2 apart"),
    ],
)
def test_what_a_driver_refuses_of_a_descriptor(changes: dict[str, tuple[int, ...]], fault: str) -> None:
    assert POOL.list_faults() == []
    assert replace(POOL, **changes).list_faults() == [fault]


def test_rows_without_a_swizzle_may_be_longer() -> None:
    assert replace(POOL, swizzle=16, box=(1, 8, 2, 8, 128)).list_faults() == []


STORE, FENCE = "st.shared.b32 [%r1], %r2;", "fence.proxy.async.shared::cta;"
WGMMA, COPY = "wgmma.mma_async.sync.aligned.m64n64k16.f32 {%r1}, %rd1, %rd2;", "cp.async.bulk.commit_group;"
STORE_TILE, SEND = (
    "stmatrix.sync.aligned.m8n8.x4.shared.b16 [%r1], {%r2};",
    "cp.async.bulk.tensor.5d.global.shared::cta",
)
FETCH, EXPECT = "cp.async.bulk.tensor.5d.shared::cta.global [%r1];", "mbarrier.arrive.expect_tx.shared.b64 %rd1, [%r1];"
ARRIVE = "mbarrier.arrive.release.cta.shared::cta.b64 _, [%r1];"


def read(*lines: str) -> list[str]:
    """What is found in a kernel of these lines."""
    body = "\n".join(line if line.startswith("$") else f"\t{line}" for line in lines)
    return list_unfenced(f".visible .entry kernel(\n\t.param .u64 p\n)\n{{\n{body}\n\tret;\n}}\n")["kernel"]


@pytest.mark.parametrize("store", [STORE, STORE_TILE])
@pytest.mark.parametrize(("reader", "name"), [(WGMMA, "wgmma.mma_async"), (SEND, SEND), (ARRIVE, "mbarrier.arrive")])
def test_a_fence_lies_between_a_store_and_what_reads_it(store: str, reader: str, name: str) -> None:
    assert read(store, reader) == [name]
    assert read(FENCE, store, reader) == [name], "a fence before the store"
    assert read(store, FENCE, reader) == []
    assert read(reader, store) == []


def test_what_writes_shared_memory_needs_no_fence() -> None:
    assert read(STORE, EXPECT, FETCH, COPY) == []


def test_every_way_through_a_kernel_is_followed() -> None:
    skipped = ["@%p1 bra $L__BB0_2;", FENCE, "$L__BB0_2:"]
    assert read(STORE, *skipped, WGMMA) == ["wgmma.mma_async"], "the fence is jumped over"
    assert read(STORE, FENCE, *skipped, WGMMA) == []
    assert read("bra $L__BB0_3;", "$L__BB0_2:", WGMMA, "ret;", "$L__BB0_3:", STORE, "bra.uni $L__BB0_2;") != []
    loop = "$L__BB0_1:", WGMMA, STORE, "@%p1 bra $L__BB0_1;"
    assert read(*loop) == ["wgmma.mma_async"], "in the next turn"
    assert read(*loop[:3], FENCE, *loop[3:]) == []
    assert read(STORE, "bra.uni $L__BB0_2;", "$L__BB0_1:", WGMMA, "$L__BB0_2:") == [], "no way leads there"
    assert read("brx.idx %r1, $L_table;") == ["a jump by a table, whose ways are not followed"]


def make_scatter(pages: int, index: str = "s32") -> str:
    lines = [
        "%fused_scatter (p: bf16[4]) -> bf16[4] {",
        f"  %param_0 = bf16[{pages},128]{{1,0}} parameter(0)",
        f"  %param_1 = {index}[4096,1]{{1,0}} parameter(1)",
        "  %param_2 = bf16[4096,128]{1,0} parameter(2)",
        f"  ROOT %scatter.1 = bf16[{pages},128]{{1,0}} scatter(%param_0, %param_1, %param_2), "
        "update_window_dims={1}, inserted_window_dims={0}, scatter_dims_to_operand_dims={0}, index_vector_dim=1",
        "}",
    ]
    return "\n".join(lines)


def test_short_indices_into_long_axes_are_found() -> None:
    assert list_short_indices(make_scatter(2**31 - 1)) == []
    assert list_short_indices(make_scatter(2**31)) == ["scatter: indices of 32 bits into an axis of 2,147,483,648"]
    assert list_short_indices(make_scatter(2**31, index="s64")) == []
    sliced = (
        "  %pool = f32[3000000000]{0} parameter(0)\n"
        "  %at = s32[] parameter(1)\n"
        "  %part = f32[8]{0} dynamic-slice(%pool, %at), dynamic_slice_sizes={8}\n"
    )
    assert list_short_indices(sliced) == ["dynamic-slice: indices of 32 bits into an axis of 3,000,000,000"]
    assert list_short_indices(sliced.replace("3000000000", "2000000000")) == []

"""What Ampere and Ada get without being here: the choice, the plan, the lowered kernels, the layouts of registers."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.mosaic.gpu import WGMMA_LAYOUT, MMALayouts, TiledLayout
from jax.experimental.mosaic.gpu.fragmented_array import Replicated

from pallas_kernels import AttnShape, KVSpec, choose_impl, prepare_batch, resolve_impl
from pallas_kernels.ampere import compat, plan
from pallas_kernels.ampere.config import AmpereConfig, TileConfig, UnitConfig
from pallas_kernels.ampere.launch import count_smem_bytes
from pallas_kernels.backends import choose_layout
from pallas_kernels.mosaic_gpu import units
from pallas_kernels.targets import TARGETS, trace_for
from pallas_kernels.testing.compile_gate import Gate, measure_attention
from pallas_kernels.testing.gate_report import find_faults
from pallas_kernels.testing.gate_shapes import list_programs
from pallas_kernels.worklist import StepRows

BF16 = KVSpec(2, 128, 64, "bfloat16")
SHAPE = AttnShape(8, BF16, "bfloat16")
DEVICES = ("a100", "l4", "b200", "rtx5090")


@pytest.fixture
def fresh_traces() -> Iterator[None]:
    """A trace of one target must not be found by the next."""
    jax.clear_caches()
    yield
    jax.clear_caches()


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("NVIDIA A100-SXM4-40GB", "ampere"),
        ("NVIDIA A100 80GB PCIe", "ampere"),
        ("NVIDIA A10G", "ampere"),
        ("NVIDIA RTX A6000", "ampere"),
        ("NVIDIA GeForce RTX 3090", "ampere"),
        ("NVIDIA L4", "ampere"),
        ("NVIDIA L40S", "ampere"),
        ("NVIDIA GeForce RTX 4090", "ampere"),
        ("NVIDIA RTX 6000 Ada Generation", "ampere"),
        ("Tesla T4", "xla"),
        ("Tesla V100-SXM2-16GB", "xla"),
        ("Quadro RTX 4000", "xla"),
        ("NVIDIA GeForce RTX 5090", "ampere"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "ampere"),
        ("NVIDIA GB200", "ampere"),
        ("NVIDIA B300 SXM6 AC", "ampere"),
        ("NVIDIA GB10", "xla"),
        ("NVIDIA H200", "gpu"),
        ("NVIDIA GH200 480GB", "gpu"),
    ],
)
def test_choice_of_devices(kind: str, name: str) -> None:
    chosen, reason = choose_impl("gpu", kind)
    assert chosen == name and kind in reason


def test_by_name_on_another_gpu_it_says_what_it_needs() -> None:
    with pytest.raises(
        ValueError, match=r"'ampere' cannot run: it needs Ampere, Ada or Blackwell .*, this is NVIDIA H200"
    ):
        resolve_impl("ampere", SHAPE, platform="gpu", device_kind="NVIDIA H200")
    with pytest.raises(ValueError, match=r"'ampere' cannot run: it runs on gpu, this is cpu"):
        resolve_impl("ampere", SHAPE, platform="cpu", device_kind="cpu")
    assert resolve_impl("ampere", SHAPE, platform="gpu", device_kind="NVIDIA L4")[0] == "ampere"


def test_a_shape_that_it_does_not_do_falls_back_with_the_reason() -> None:
    shape = AttnShape(8, replace(BF16, page_size=8), "bfloat16")
    name, reason = resolve_impl(None, shape, platform="gpu", device_kind="NVIDIA L4")
    assert name == "xla" and "page_size is a power of two from 16, this is 8" in reason


@pytest.mark.parametrize("device", DEVICES)
def test_a_step_on_the_device_gets_it(device: str) -> None:
    meta = [jax.ShapeDtypeStruct(dims, jnp.int32) for dims in ((8, 4), (8,), (9,), (3,))]
    prepare = partial(prepare_batch, num_tokens=64, shape=SHAPE, max_query_len=None)
    with trace_for(TARGETS[device]):
        batch = jax.eval_shape(prepare, *meta)
    assert batch.impl == "ampere"
    assert batch.work.config.decode.num_sms == TARGETS[device].num_cores
    assert batch.work.chunks.tile_tokens == 16  # 4 query heads each make 64 query rows


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("head_dim", [16, 64, 80, 128, 192, 256])
@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn"])
def test_default_config_fits_shared_memory(device: str, head_dim: int, dtype: str) -> None:
    spec = KVSpec(2, head_dim, 64, dtype)
    shape = AttnShape(8, replace(spec, layout=choose_layout("ampere", spec)), "bfloat16")
    target = TARGETS[device]
    with trace_for(target):
        whole, sm_bytes = plan.default_config(shape), plan.find_sm_bytes()
    config = whole.decode
    assert (whole.prefill.tile_tokens, whole.prefill.stages) == (config.tile_tokens, config.stages)
    size = count_smem_bytes(shape, config.tile_tokens, config.stages)
    assert size <= target.shared_memory_bytes == sm_bytes - 1024
    assert config.ctas_per_sm * (size + 1024) <= sm_bytes


def test_config_names_what_is_wrong() -> None:
    with pytest.raises(ValueError, match="tile_tokens must be 32 or 64, got 48"):
        TileConfig(tile_tokens=48)
    with pytest.raises(ValueError, match="stages must be at least 2, got 1"):
        UnitConfig(stages=1)
    with pytest.raises(ValueError, match=r"UnitConfig\.num_sms must be at least 1, got 0"):
        UnitConfig(num_sms=0)


def test_units_of_a_mixed_step() -> None:
    """A row of one token, split; one of 20 queries behind 100 tokens, in tiles of 16; and one without any."""
    query_lens, seq_lens = jnp.asarray([1, 20, 0]), jnp.asarray([300, 120, 0])
    rows = StepRows(jnp.asarray([0, 1, 21, 21]), query_lens, seq_lens, jnp.asarray([1, 1, 2]), 24, None, 512)
    tuning = UnitConfig(tile_tokens=32, ctas_per_sm=1, num_sms=4, min_split_tokens=96, unit_cost=0)
    config = AmpereConfig(tuning, TileConfig(tile_tokens=32))
    work = plan.plan_work(rows, replace(SHAPE, window=40), config)
    columns = [units.QUERIES, units.ROW, units.FIRST_TILE, units.NUM_TILES, units.LENGTH, units.BEGIN]
    few = np.asarray(work.few_units)[:, columns]
    assert few[few[:, 3] > 0].tolist() == [[0, 0, 8, 2, 300, 299]]  # keys 260 to 299
    chunks = np.asarray(work.chunk_units)[:, columns]
    assert chunks[chunks[:, 3] > 0].tolist() == [[0, 1, 2, 2, 120, 116], [1, 1, 1, 3, 116, 100]]
    whole = plan.plan_work(rows, SHAPE, config)
    few = np.asarray(whole.few_units)[:, columns]
    assert few[few[:, 3] > 0, 2:4].tolist() == [[0, 5], [5, 5]]


@pytest.mark.usefixtures("fresh_traces")
@pytest.mark.parametrize(
    "device", [DEVICES[0], *(pytest.param(device, marks=pytest.mark.thorough) for device in DEVICES[1:])]
)
def test_lowered_for_the_device(device: str) -> None:
    """Needs no compiler. Mosaic refuses a barrier in a copy, or a layout that does not fit, at this point."""
    target = TARGETS[device]
    wanted = ("mixed: llama-8b, fp8 pages", "drafts: llama-8b")
    for program in (program for program in list_programs(target) if program.name in wanted):
        report = measure_attention(Gate(target), program, impl="ampere")
        assert find_faults(report, target) == []
        names = {launch.name for launch in report.kernels}
        assert names == {"ampere_attention", "combine_units"} and report.impl == "ampere"


def place_elements(layout: TiledLayout, shape: tuple[int, int]) -> np.ndarray:
    """[registers, warps, lanes, vector]: the number, in `shape`, of every element that a lane holds."""
    places = np.arange(math.prod(shape)).reshape(shape)
    for tile in layout.tiling.tiles:
        kept, tiled = places.shape[: -len(tile)], places.shape[-len(tile) :]
        split = [part for size, step in zip(tiled, tile, strict=True) for part in (size // step, step)]
        outer = [len(kept) + 2 * axis for axis in range(len(tile))]
        order = [*range(len(kept)), *outer, *(axis + 1 for axis in outer)]
        places = places.reshape(*kept, *split).transpose(order)
    warps = [axis for axis in layout.warp_dims if not isinstance(axis, Replicated)]
    last = [axis % places.ndim for axis in (*warps, *layout.lane_dims, layout.vector_dim)]
    places = places.transpose([axis for axis in range(places.ndim) if axis not in last] + last)
    return places.reshape(-1, 4, 32, places.shape[-1])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("keys", [32, 64])
def test_a_result_is_an_operand_without_moving(dtype: str, keys: int) -> None:
    """What `multiply_pv` relies on when it calls the registers of one layout those of another."""
    layouts, shape = MMALayouts(jnp.dtype(dtype), m_warps=4), (compat.TILE_ROWS, keys)
    assert layouts.acc == WGMMA_LAYOUT
    result, operand = place_elements(layouts.acc, shape), place_elements(layouts.lhs, shape)
    assert len(np.unique(result)) == result.size == math.prod(shape)
    np.testing.assert_array_equal(result, operand)

"""What only long loops do, at the block sizes that kernels choose themselves: rings go round, rows have several units.

The plans say whether the cases do that, here and on the devices of the gate; the interpreters then run them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from pallas_kernels import AttnShape, prepare_batch
from pallas_kernels.ampere import kernel as ampere
from pallas_kernels.backends import choose_layout, find_backend
from pallas_kernels.hopper.prefill_static import BEGIN, END, NUM_UNITS
from pallas_kernels.mosaic_gpu import splits
from pallas_kernels.targets import TARGETS, trace_for
from pallas_kernels.testing.case import Case, choose_config, make_inputs
from pallas_kernels.testing.cases import LONG_CASES
from pallas_kernels.tpu import prefill as tpu_prefill
from pallas_kernels.tpu.config import clip_blocks
from pallas_kernels.tpu.tiles import NUM_COLUMNS
from tests.pallas_kernels import test_ampere, test_hopper_attention, test_tpu
from tests.pallas_kernels.tpu_faults import quick_interpreter

OF_128, FP8_OF_128, OF_256, TURN, FP8_TURN, OPEN_TURN = LONG_CASES
PAIRS = [
    ("gpu", OF_128),
    ("gpu", FP8_OF_128),
    ("ampere", OF_128),
    ("ampere", FP8_OF_128),
    ("tpu", OF_256),
    ("gpu", TURN),
    ("gpu", FP8_TURN),
    ("gpu", OPEN_TURN),
]


@dataclass(frozen=True)
class Loop:
    """A kernel's loop over what passes through its ring."""

    slots: int
    passes: int  # the most of any ring
    units: int  # the most of any row: runs of its keys that are joined, blocks, or tiles of its queries


def with_layout(impl: str, case: Case) -> Case:
    return case.with_layout(choose_layout(impl, case.spec))


def list_configs(impl: str, case: Case) -> list[Any]:
    """What the case runs with here, and on the devices of the gate that run an implementation; equal ones once."""
    targets = [target for target in TARGETS.values() if target.impl == impl]
    found = []
    for context in (nullcontext(), *map(trace_for, targets)):
        with context:
            found.append(choose_config(case, impl) or find_backend(impl).module.default_config(case.shape))
    return list(dict.fromkeys(found))


def plan(impl: str, case: Case, config: Any) -> Any:
    """The work of the case's step."""
    options = {"num_tokens": case.max_tokens, "shape": case.shape, "max_query_len": None, "impl": f"{impl}_interpret"}
    return prepare_batch(*make_inputs(case).meta, **options, config=config).work


def count_chunk_tiles(tiles: Any) -> int:
    """Tiles of queries of the row that has most."""
    return int(np.bincount(np.asarray(tiles.rows)[np.asarray(tiles.counts) > 0]).max())


def list_gpu_loops(case: Case, config: Any) -> Iterator[Loop]:
    work = plan("gpu", case, config)
    units = np.asarray(work.decode.units)
    yield Loop(config.decode.stages, units[:, splits.NUM_TILES].max(), int(work.decode.row_num_units.max()))
    chunk_units = np.asarray(work.chunk_units.units)
    slots = max(config.prefill.stages, config.prefill.raw_stages)
    joined = 0 if work.chunk_units.joins is None else np.asarray(work.chunk_units.joins)[:, NUM_UNITS].max()
    assert (joined > 1) == (case.chunk_sms > 1), "tiles are split where the case wants it"
    yield Loop(slots, (chunk_units[:, END] - chunk_units[:, BEGIN]).max(), joined or count_chunk_tiles(work.chunks))


def list_ampere_loops(case: Case, config: Any) -> Iterator[Loop]:
    work = plan("ampere", case, config)
    longest = [np.asarray(units)[:, ampere.NUM_TILES].max() for units in (work.few_units, work.chunk_units)]
    yield Loop(config.decode.stages, longest[0], int(work.few.row_num_units.max()))
    yield Loop(config.prefill.stages, longest[1], count_chunk_tiles(work.chunks))


def list_tpu_loops(case: Case, config: Any) -> Iterator[Loop]:
    """Both rings run on, from row to row and from tile to tile. The decode kernel's goes over steps of the grid too."""
    work = plan("tpu", case, config)
    shape: AttnShape = case.shape
    size, width = shape.spec.page_size, case.table_width
    decode, chunk = (clip_blocks(part, size, width).pages_per_block * size for part in (config.decode, config.chunk))
    blocks = [-(-(computed + 1) // decode) for computed, new in case.rows if new == 1]
    assert len(blocks) > config.decode.rows_per_step
    yield Loop(config.decode.num_buffers, sum(blocks), max(blocks))
    columns = np.asarray(work.tiles.columns).reshape(NUM_COLUMNS, -1)[:, : int(work.tiles.num_tiles)]
    rows, _, positions, begins, _ = columns
    yield Loop(tpu_prefill._NUM_BUFFERS, (-(-(positions + begins) // chunk)).max(), int(np.bincount(rows).max()))


LISTS = {"gpu": list_gpu_loops, "ampere": list_ampere_loops, "tpu": list_tpu_loops}


@pytest.mark.parametrize(("impl", "case"), PAIRS, ids=lambda value: getattr(value, "name", value))
def test_slots_are_used_again_and_rows_have_several_units(impl: str, case: Case) -> None:
    case = with_layout(impl, case)
    for config in list_configs(impl, case):
        loops = list(LISTS[impl](case, config))
        assert len(loops) == 2, "of decode and of chunks"
        for loop in loops:
            assert loop.passes > loop.slots >= 2 and loop.units > 1, (config, loop)


def test_every_long_case_runs_somewhere() -> None:
    assert {case.name for _, case in PAIRS} == {case.name for case in LONG_CASES}


# In CI one for each kernel, on the oldest jax, too.
THOROUGH = [pytest.mark.slow, pytest.mark.thorough]


def mark(case: Case, *others: Case) -> list[Any]:
    return [pytest.param(case, id=case.name), *(pytest.param(each, id=each.name, marks=THOROUGH) for each in others)]


@pytest.mark.parametrize("case", mark(TURN, FP8_OF_128, OF_128, FP8_TURN, OPEN_TURN))
def test_gpu(case: Case, capfd: pytest.CaptureFixture[str]) -> None:
    test_hopper_attention.check(with_layout("gpu", case), capfd)


@pytest.mark.parametrize("case", mark(OF_128, FP8_OF_128))
def test_ampere_kernels(case: Case, capsys: pytest.CaptureFixture[str]) -> None:
    test_ampere.check(with_layout("ampere", case), None, capsys)


@pytest.mark.slow
@pytest.mark.thorough
def test_tpu_kernels() -> None:
    with quick_interpreter():
        test_tpu.check_case(with_layout("tpu", OF_256), None)

"""The CPU kernel against the oracle, on the shared cases and on random batches; its library; its choice."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import AttnLayer, AttnShape, HeadParams, KVSpec, attend_with_update, prepare_batch, resolve_impl
from pallas_kernels.cpu import library
from pallas_kernels.cpu.attention import find_obstacle
from pallas_kernels.testing.case import LAYER, Case, largest_error, make_inputs
from pallas_kernels.testing.cases import CASES, LONG_CASES, MUTUAL_CASES
from pallas_kernels.testing.reference import attend_by_formula
from pallas_kernels.testing.runner import run_case
from tests.examples import scale_examples
from tests.pallas_kernels.cpu_library import BUILT
from tests.pallas_kernels.random_batches import draw_batches, draw_images
from tests.programs import PROGRAMS

pytestmark = BUILT

ALL = [*CASES, *LONG_CASES]
HERE = [case for case in ALL if case.spec.dtype in ("float32", "bfloat16") and case.spec.head_dim % 16 == 0]


def check_case(case: Case, seed: int = 0) -> None:
    """Every unused slot is NaN, and what the step leaves in the pages is compared, too."""
    inputs = make_inputs(case, seed)
    out, pool = run_case(case, inputs, impl="cpu")
    expected, expected_pool = attend_by_formula(case, inputs)
    assert out.dtype == inputs.q.dtype and np.isfinite(np.asarray(out, np.float32)).all()
    assert largest_error(case, out, expected, inputs.num_tokens) < 1
    null_page = LAYER * inputs.num_pages
    pools = [np.delete(np.asarray(array, np.float32), null_page, axis=0) for array in (pool, expected_pool)]
    np.testing.assert_array_equal(*pools)


@pytest.mark.parametrize("case", HERE, ids=lambda case: case.name)
def test_cases(case: Case) -> None:
    assert find_obstacle(case.shape) is None
    check_case(case)


SHAPES = [  # tiles of one query and of many, heads that do not fill a tile, latents, pages longer than a run of keys
    Case("decode", (), 8, KVSpec(2, 64, 16, "float32"), max_tokens=8, max_query_len=1, table_width=20),
    Case("decode", (), 14, KVSpec(2, 96, 8, "bfloat16"), 37, 3.0, True, max_tokens=8, max_query_len=1, table_width=40),
    Case("decode", (), 20, KVSpec(1, 48, 16, "float32", value_dim=32), max_tokens=8, max_query_len=1, table_width=20),
    Case("mixed", (), 5, KVSpec(5, 32, 16, "bfloat16"), 50, max_tokens=160, table_width=20),
    Case("mixed", (), 6, KVSpec(2, 16, 128, "float32"), None, 2.0, True, max_tokens=96, table_width=3),
    Case("mixed", (), 12, KVSpec(1, 48, 8, "bfloat16", value_dim=32), max_tokens=96, table_width=24),
    Case("mixed", (), 4, KVSpec(2, 32, 16, "float32"), 7, causal=False, max_tokens=96, table_width=12),
]


@settings(max_examples=scale_examples(60), deadline=None)
@given(case=draw_batches(SHAPES), seed=st.integers(0, 2**32 - 1))
def test_random_batches(case: Case, seed: int) -> None:
    check_case(case, seed)


TILED = [  # with windows, caps and sinks; heads of three tiles, latents, runs of a page and of 64 keys, one query row
    Case("mixed", (), 8, KVSpec(4, 64, 32, "bfloat16"), max_tokens=160, table_width=10),
    Case("mixed", (), 6, KVSpec(2, 96, 16, "bfloat16"), 50, 3.0, True, max_tokens=96, table_width=20),
    Case("mixed", (), 12, KVSpec(1, 64, 48, "bfloat16", value_dim=48), 40, max_tokens=96, table_width=4),
    Case("decode", (), 20, KVSpec(1, 64, 128, "bfloat16"), 70, max_tokens=8, max_query_len=1, table_width=3),
    Case("mixed", (), 4, KVSpec(2, 32, 16, "bfloat16"), 7, causal=False, max_tokens=96, table_width=12),
]


@settings(max_examples=scale_examples(40), deadline=None)
@given(case=draw_batches(TILED), seed=st.integers(0, 2**32 - 1))
def test_random_batches_in_tiles(case: Case, seed: int) -> None:
    """They are emulated where the processor has none."""
    with mock.patch.object(library, "has_tiles", lambda: True):
        check_case(case, seed)


SEEN = [SHAPES[4], TILED[1]]


@settings(max_examples=scale_examples(40), deadline=None)
@given(case=draw_images(SEEN), seed=st.integers(0, 2**32 - 1))
def test_tokens_of_random_images_see_each_other(case: Case, seed: int) -> None:
    with mock.patch.object(library, "has_tiles", lambda: True):
        check_case(case, seed)


@pytest.fixture(params=[False, True], ids=["vectors", "tiles"])
def each_unit(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A program knows what it was traced for, and the cache of traces does not."""
    monkeypatch.setattr(library, "has_tiles", lambda: request.param)
    jax.clear_caches()
    yield
    jax.clear_caches()


@pytest.mark.usefixtures("each_unit")
@pytest.mark.parametrize("case", MUTUAL_CASES, ids=lambda case: case.name)
def test_tokens_that_see_each_other(case: Case) -> None:
    check_case(case)


@pytest.mark.usefixtures("each_unit")
def test_nan_in_one_row_stays_in_it() -> None:
    case = Case("three", ((100, 1), (90, 1), (20, 30)), 8, KVSpec(2, 64, 16, "bfloat16"))
    inputs = make_inputs(case)
    poisoned = inputs.kv_pages.copy()
    poisoned[LAYER * inputs.num_pages + inputs.page_table[1, 0]] = np.nan
    out, _ = run_case(case, replace(inputs, kv_pages=poisoned), impl="cpu")
    clean, _ = run_case(case, inputs, impl="cpu")
    assert np.isnan(out[1]).all()
    np.testing.assert_array_equal(np.delete(out, 1, axis=0), np.delete(clean, 1, axis=0))


def test_an_answer_does_not_depend_on_other_rows() -> None:
    """Bit for bit, and so a deterministic engine may use it."""
    rows = ((100, 1), (3, 1), (20, 30), (64, 5))
    together = make_inputs(Case("together", rows))
    out, _ = run_case(Case("together", rows), together, impl="cpu")
    begin = 0
    for row, (_, new) in enumerate(rows):
        alone = Case("together", (rows[row],))
        inputs = make_inputs(alone)
        inputs.page_table[0] = together.page_table[row]
        arrays = {name: np.array(getattr(together, name)) for name in ("q", "k", "v")}
        moved = {name: np.roll(array, -begin, axis=0) for name, array in arrays.items()}
        found, _ = run_case(alone, replace(inputs, kv_pages=together.kv_pages, **moved), impl="cpu")
        np.testing.assert_array_equal(found[:new], out[begin : begin + new])
        begin += new


@pytest.mark.usefixtures("each_unit")
@pytest.mark.parametrize("window", [None, 30])
def test_an_answer_does_not_depend_on_the_other_queries_of_its_tile(window: int | None) -> None:
    whole = Case("", ((70, 40),), 6, KVSpec(2, 64, 16, "bfloat16"), window, max_tokens=64, table_width=8)
    inputs = make_inputs(whole)
    out, pool = run_case(whole, inputs, impl="cpu")
    for skipped in (1, 7, 22):
        start = inputs.query_start_loc.copy()
        start[1:] = 40 - skipped
        arrays = {name: np.roll(getattr(inputs, name), -skipped, axis=0) for name in ("q", "k", "v")}
        later = replace(inputs, query_start_loc=start, kv_pages=pool, **arrays)
        found, _ = run_case(whole, later, impl="cpu")
        np.testing.assert_array_equal(found[: 40 - skipped], out[skipped:40])
    for new in (1, 3, 9, 21):
        start = inputs.query_start_loc.copy()
        start[1:] = new
        shorter = replace(inputs, query_start_loc=start, seq_lens=np.full_like(inputs.seq_lens, 70 + new))
        found, _ = run_case(whole, shorter, impl="cpu")
        np.testing.assert_array_equal(found[:new], out[:new])


def test_scales_of_heads_apply_to_wide_pages() -> None:
    case = Case("scaled", ((40, 1), (9, 20)))
    inputs = make_inputs(case)
    scales = {name: jnp.array([2.0, 0.25]) for name in ("k_scale", "v_scale")}
    inputs = replace(inputs, heads=HeadParams(**scales))
    out, pool = run_case(case, inputs, impl="cpu")
    expected, expected_pool = attend_by_formula(case, inputs)
    assert largest_error(case, out, expected, inputs.num_tokens) < 1
    np.testing.assert_array_equal(*(np.delete(np.asarray(each), inputs.num_pages, 0) for each in (pool, expected_pool)))


def test_pages_are_written_in_place() -> None:
    case = Case("mixed", ((40, 1), (9, 20)))
    inputs = make_inputs(case)
    layer = AttnLayer(case.params, inputs.heads, inputs.num_pages)

    def step(
        pool: jax.Array, q: jax.Array, k: jax.Array, v: jax.Array, *meta: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        batch = prepare_batch(
            *meta, num_tokens=q.shape[0], shape=case.shape, max_query_len=case.max_query_len, impl="cpu"
        )
        for _ in range(3):  # layers that wait for each other
            q, pool = attend_with_update(q, k + q[:, :2], v, pool, batch, layer)
        return pool, q

    arguments = (inputs.kv_pages, inputs.q, inputs.k, inputs.v, *inputs.meta)
    memory = jax.jit(step, donate_argnums=0).lower(*arguments).compile().memory_analysis()
    assert memory.alias_size_in_bytes >= inputs.kv_pages.nbytes > memory.temp_size_in_bytes


@pytest.mark.parametrize(
    ("spec", "dtype", "words"),
    [
        (KVSpec(2, 64, 16, "float8_e4m3fn"), "bfloat16", "float8_e4m3fn"),
        (KVSpec(2, 64, 16, "float16"), "float16", "float16"),
        (KVSpec(2, 40, 16, "float32"), "float32", "multiple of 16"),
        (KVSpec(1, 48, 16, "float32", value_dim=40), "float32", "multiple of 16"),
    ],
)
def test_other_shapes_give_way_by_default_and_are_refused_by_name(spec: KVSpec, dtype: str, words: str) -> None:
    shape = AttnShape(4, spec, dtype)
    name, reason = resolve_impl(None, shape, platform="cpu", device_kind="cpu")
    assert name == "xla" and words in reason
    with pytest.raises(ValueError, match=f"'cpu' cannot run: .*{words}"):
        resolve_impl("cpu", shape, platform="cpu", device_kind="cpu")


def run_fresh(script: str, *args: Path | str) -> str:
    """Runs Python in a process that has not loaded the library, and returns what it prints."""
    head = "import sys; from pathlib import Path; from pallas_kernels.cpu import library; "
    command = [sys.executable, "-c", head + script, *map(str, args)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(library.FOLDER).parents[1])
    return done.stdout.strip()


LOAD = "print(library.load(Path(sys.argv[1])))"


def write_compiler(folder: Path, script: str) -> str:
    """Writes a compiler and returns the statement that makes it the only one."""
    compiler = folder / "compiler"
    compiler.write_text(f"#!/bin/sh\n{script}\n")
    compiler.chmod(0o755)
    return f"library.COMPILERS = ({str(compiler)!r},); "


def test_the_library_is_compiled_once_and_kept(tmp_path: Path) -> None:
    """By a compiler that has its answer ready: the tests began with the real one."""
    without = "library.COMPILERS = ('no-such-compiler',); " + LOAD
    assert "there is no C++ compiler (no-such-compiler)" in run_fresh(without, tmp_path)
    made = library._find_kept(PROGRAMS)
    assert made is not None
    copy = write_compiler(tmp_path, f'while [ "$1" != -o ]; do shift; done; cp {made} "$2"')
    assert run_fresh(copy + LOAD, tmp_path / "new" / "folder") == "None"
    (kept,) = (tmp_path / "new" / "folder").iterdir()
    assert kept.suffix == ".so" and kept.read_bytes() == made.read_bytes()
    assert run_fresh(without, tmp_path / "new" / "folder") == "None"


@pytest.mark.thorough
def test_a_kept_library_that_was_cut_is_compiled_again(tmp_path: Path) -> None:
    """To load it could end the process by a signal."""
    found = library._find_kept(PROGRAMS)  # compiled when the tests began
    assert found is not None
    kept, whole = tmp_path / found.name, found.read_bytes()
    kept.write_bytes(whole[: len(whole) // 2])
    assert run_fresh(LOAD, tmp_path) == "None"
    (made,) = tmp_path.iterdir()
    assert made.stat().st_size > len(whole) // 2
    without = "library.COMPILERS = ('no-such-compiler',); " + LOAD
    assert run_fresh(without, tmp_path) == "None"


@pytest.mark.thorough
def test_without_a_directory_nothing_is_left(tmp_path: Path) -> None:
    script = "import tempfile; tempfile.tempdir = sys.argv[1]; print(library.load(None))"
    assert run_fresh(script, tmp_path) == "None" and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("echo 'x.cc:1: error: no good' >&2; exit 3", "compiler: x.cc:1: error: no good"),
        ('while [ "$1" != -o ]; do shift; done; date > "$2"', "cannot be loaded"),
    ],
    ids=["fails", "makes nonsense"],
)
def test_a_broken_compiler_is_an_obstacle_not_an_error(script: str, words: str, tmp_path: Path) -> None:
    load = f"{write_compiler(tmp_path, script)}{LOAD}; print(library.find_obstacle())"
    first, second = run_fresh(load, tmp_path / "kept").splitlines()
    assert first == second and words in first

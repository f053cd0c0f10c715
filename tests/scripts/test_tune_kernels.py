"""The search for block sizes: what it takes for right, what it does first, and what it leaves behind."""

from __future__ import annotations

import importlib
import json
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from pallas_kernels import gather_logical
from pallas_kernels.testing.compare import RELATIVE_TOLERANCE, relative_error
from pallas_kernels.tune.search import AXES, list_neighbours
from tests.scripts.test_bench_dry_runs import ROOT, run_script

pytestmark = pytest.mark.thorough


HEADS = (4, 2, 128)
PAGE_SIZE = 64


@pytest.fixture
def tuning(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    return importlib.import_module("tune_kernels")


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as pool:
        yield pool


def make_trials(
    tuning: ModuleType, pool: ThreadPoolExecutor, context: int = 64, kv_dtype: str = "bfloat16", seconds: float = 60
) -> Any:
    shape = tuning.Shape("tiny", HEADS, 2, context - 1, 1, kv_dtype, PAGE_SIZE)
    budget = tuning.Budget(time.monotonic() + seconds)
    return tuning.Trials(shape, "gpu_interpret", tuning.DRY, budget, pool, Console(quiet=True))


class Dense:
    """Attention of the trials' rows by the formula, with weights that can be changed key by key."""

    def __init__(self, trials: Any, context: int) -> None:
        self.rows = []
        for q, pages in zip(np.asarray(trials.rest[0], np.float32), np.asarray(trials.rest[3]), strict=True):
            held = gather_logical(trials.kv_pages, pages, context, trials.shape.spec)
            k, v = (np.asarray(half, np.float32).swapaxes(0, 1) for half in held)  # [K, E, H]
            scores = q.reshape(HEADS[1], -1, HEADS[2]) @ k.swapaxes(1, 2) * HEADS[2] ** -0.5
            self.rows.append((np.exp(scores), v))

    def attend(self, begin: int = 0, end: int = 0, factor: float = 1) -> np.ndarray:
        """[rows, N, H], where the keys [begin, end) count `factor` times."""
        out = []
        for shares, v in self.rows:
            weights = np.ones(shares.shape[-1], np.float32)
            weights[begin:end] = factor
            weights = shares * weights
            out.append((weights / weights.sum(-1, keepdims=True) @ v).reshape(-1, HEADS[2]))
        return np.stack(out)


def break_output(trials: Any, context: int) -> dict[str, np.ndarray]:
    """What a kernel with one fault would answer."""
    dense, middle = Dense(trials, context), context // 2
    right = dense.attend()
    one_head, one_row, nan = right.copy(), right.copy(), right.copy()
    one_head[1, 2], one_row[1], nan[1, 3, 5] = 0, right[0], np.nan
    return {
        "zeros": np.zeros_like(right),
        "heads of a group swapped": right[:, [1, 0, 2, 3]],
        "KV heads swapped": right[:, [2, 3, 0, 1]],
        "rows swapped": right[::-1],
        "one head is zero": one_head,
        "one row is another's": one_row,
        "not a number": nan,
        "a page dropped": dense.attend(middle, middle + PAGE_SIZE, 0),
        "a page of 16 dropped": dense.attend(middle, middle + 16, 0),
        "the last page dropped": dense.attend(context - PAGE_SIZE, context, 0),
        "a page counted twice": dense.attend(middle, middle + PAGE_SIZE, 2),
        "a split dropped": dense.attend(middle, middle + 256, 0),
        "all but the first split dropped": dense.attend(256, context, 0),
    }


@pytest.mark.parametrize(("context", "kv_dtype"), [(512, "bfloat16"), (4096, "float8_e4m3fn"), (32768, "bfloat16")])
def test_faults_are_not_timed(tuning: ModuleType, pool: ThreadPoolExecutor, context: int, kv_dtype: str) -> None:
    trials = make_trials(tuning, pool, context, kv_dtype)
    trials.prepare()

    def time_output(out: Any) -> float:
        compiled: Future[Any] = Future()
        compiled.set_result(lambda kv_pages, *_: (out, kv_pages, out))
        return trials.check_and_time("a candidate", compiled)

    for name, out in break_output(trials, context).items():
        assert time_output(out) == float("inf"), name
    run = tuning.make_chain(trials.shape, "xla", 1, trials.layout)  # in bfloat16, as kernels compute
    right, trials.kv_pages, _ = run(trials.kv_pages, *trials.rest)
    assert 0 < time_output(right) < float("inf")
    assert 0 < relative_error(right, trials.expected, 2) < RELATIVE_TOLERANCE / 3


def test_shapes_that_matter_come_first(tuning: ModuleType) -> None:
    shapes = tuning.sort_shapes(list(tuning.list_shapes(PAGE_SIZE, dry_run=False)))
    labels = [shape.label for shape in shapes]
    assert labels[:6] == [
        f"llama-8b {what} bfloat16"
        for what in (
            *("decode 32 x 4096", "prefill 4096 after 0", "decode 8 x 32768"),
            *("decode 128 x 4096", "decode 256 x 512", "decode 1 x 4096"),
        )
    ]
    kinds = [(shape.model, shape.kv_dtype) for shape in shapes]
    assert kinds == sorted(kinds) and len(set(kinds)) == 4, "bfloat16 before fp8, small models last"
    known = {(shape.rows, shape.cached + shape.new, shape.new) for shape in shapes}
    assert known >= set(tuning.FIRST), "a shape that is no more"
    assert max(shape.bytes_read for shape in shapes) <= tuning.POOL_BYTES


def test_the_formula_is_stored_where_nothing_beats_it(tuning: ModuleType, pool: ThreadPoolExecutor) -> None:
    trials = make_trials(tuning, pool)
    faster = next(list_neighbours(trials.formula, trials.formula, AXES[trials.kernel]))
    entry = trials.make_result({trials.formula: 1e-3, faster: 0.99e-3}).entry
    assert entry.config["stages"] == trials.formula.stages and entry.measured["us"] == entry.measured["formula_us"]
    entry = trials.make_result({trials.formula: 1e-3, faster: 0.5e-3}).entry
    assert entry.config["stages"] == faster.stages
    assert (entry.measured["us"], entry.measured["formula_us"], entry.measured["tried"]) == (500, 1000, 2)
    assert (entry.key.tokens, entry.key.max_len) == (2, 64)


def test_a_shape_without_the_formulas_time_is_not_stored(tuning: ModuleType, pool: ThreadPoolExecutor) -> None:
    trials = make_trials(tuning, pool)
    assert trials.make_result({}) is None
    assert trials.make_result({trials.formula: float("inf"), "another": 1.0}) is None


def test_nothing_is_timed_when_time_is_up(
    tuning: ModuleType, pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning.Trials, "compile", lambda *_: None)
    monkeypatch.setattr(tuning.Trials, "prepare", lambda _: None)
    monkeypatch.setattr(tuning.Trials, "check_and_time", lambda *_: 1.0)
    assert list(make_trials(tuning, pool).measure(["one", "two"])) == [("one", 1.0), ("two", 1.0)]
    assert not list(make_trials(tuning, pool, seconds=-1).measure(["one", "two"]))


def test_without_time_all_shapes_are_left(tmp_path: Path) -> None:
    output = run_script(
        "tune_kernels.py", "--impl", "gpu_interpret", "--seconds", "0", "--results", str(tmp_path / "tuned.json")
    )
    assert "not searched for want of time: 2 shapes" in output
    assert json.loads((tmp_path / "tuned.json").read_text()) == []


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.parametrize(
    ("impl", "kind"), [("gpu_interpret", "prefill"), ("ampere_interpret", "decode"), ("tpu_interpret", "prefill")]
)
def test_tune_kernels(tmp_path: Path, impl: str, kind: str) -> None:
    results, tables, merged = tmp_path / "tuned.json", tmp_path / "tables", tmp_path / "merged"
    options = ("--only", kind, "--output", str(tables), "--results", str(results))
    output = run_script("tune_kernels.py", "--impl", impl, *options)
    assert output.count("times the formula's rate") == 1 and "wrong" not in output
    (found,) = json.loads(results.read_text())
    assert found["kernel"] == f"{impl.removesuffix('_interpret')}_{kind}" and found["measured"]["us"] > 0
    assert "1 entries" in run_script("tune_kernels.py", "--merge", str(results), "--output", str(merged))
    paths = [folder / found["device_kind"] / f"{found['kernel']}.json" for folder in (tables, merged)]
    assert paths[0].read_text() == paths[1].read_text()

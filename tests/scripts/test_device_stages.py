"""What the stages of a device day make of right and wrong kernels, and of what other programs tell them."""

from __future__ import annotations

import builtins
import importlib
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

import plain_console
from device_stages import ablation, cases, kernels, measure, sanitizer, smoke, tuning
from device_stages.items import Context, NotHereError
from device_stages.plan import STAGES
from kernel_shapes import Shape, make_arguments, make_program
from kernel_timing import count_layers, summarize

from pallas_kernels import AttnShape
from pallas_kernels.hopper.attention import default_config
from pallas_kernels.hopper.decode_kernel import DecodeKernel
from pallas_kernels.targets import TARGETS
from pallas_kernels.testing.cases import CASES, LONG_CASES
from pallas_kernels.testing.compare import RELATIVE_TOLERANCE
from pallas_kernels.testing.compile_gate import Gate, measure_attention
from pallas_kernels.testing.gate_shapes import list_programs

pytestmark = pytest.mark.thorough

MIXED = Shape("tiny", (2, 1, 64), 1, 32, 24, "bfloat16", 32, beside=(0, 31, 50))
DECODE = Shape("tiny", (2, 1, 64), 2, 63, 1, "bfloat16", 32)


@pytest.fixture
def context(tmp_path: Path) -> Context:
    return Context("a stage", tmp_path, impl="xla", tiny=True)


@pytest.mark.parametrize("shape", [MIXED, DECODE, replace(DECODE, rows=1, new=5, cached=3)])
def test_shapes_are_steps_as_an_engine_has_them(shape: Shape) -> None:
    pool, *_, lens, starts, distribution = map(np.asarray, make_arguments(shape, 2, "plain"))
    assert list(lens) == [cached + new for cached, new in shape.all_rows]
    assert list(np.diff(starts)) == [new for _, new in shape.all_rows]
    assert distribution[2] == len(lens) and (np.diff(starts)[: distribution[0]] == 1).all()
    num_cached = sum(cached for cached, _ in shape.all_rows)
    assert np.isfinite(pool.astype(np.float32)).all((1, 3)).sum() == 2 * num_cached, "every other slot is NaN"
    assert shape.bytes_read == int(lens.sum()) * 2 * 64 * 2


@pytest.fixture(scope="module")
def right() -> tuple[Any, Any]:
    """A compiled step, and what is right for it."""
    exact = smoke.compute_exactly(MIXED, "plain", *make_arguments(MIXED, 1, "plain"))
    return make_program(MIXED, "xla", 1)[0], exact


@pytest.mark.parametrize("fault", [None, "a head", "a repeat", "a page", "a NaN"])
def test_the_smoke_test_sees_a_fault(
    context: Context, monkeypatch: pytest.MonkeyPatch, right: tuple[Any, Any], fault: str | None
) -> None:
    calls, (run, exact) = 0, right

    def broken(*arguments: jax.Array) -> tuple[jax.Array, ...]:
        nonlocal calls
        calls += 1
        out, pool, first = run(*arguments)
        if fault == "a head":
            out = out.at[-1, 1].multiply(1.5)
        if fault == "a NaN":
            out = out.at[0, 0, 0].set(jnp.nan)
        if fault == "a repeat" and calls > 1:
            out = out.at[0, 0, 0].add(2.0**-7)
        if fault == "a page":
            pool = pool.at[1, 0, 0, 0].set(2.0)
        return out, pool, first

    monkeypatch.setattr(smoke, "make_program", lambda shape, *_: (broken, make_arguments(shape, 1, "plain")))
    monkeypatch.setattr(smoke, "compute_exactly", lambda *_: exact)
    found = smoke.check_step(context, MIXED)
    assert calls == 2 and found["ok"] is (fault is None)
    if fault is None:
        assert found["pages_equal"] and 0 < found["relative_error"] < RELATIVE_TOLERANCE / 2
    else:
        wanted = {"a head": "relative error 0.5", "a repeat": "1 of 1 repeats", "a page": "pages", "a NaN": "error inf"}
        assert wanted[fault] in found["error"]


def test_small_steps_have_a_part_for_every_kernel(context: Context) -> None:
    items = smoke.list_items(context)  # what compute-sanitizer runs
    steps = [item.run.args[1] for item in items if not item.name.startswith("far")]
    assert [step.is_decode for step in steps] == [True, False] and all(step.beside for step in steps)
    assert len(list(smoke.list_items(replace(context, impl="gpu_interpret")))) == 3


def test_cases_are_right_wrong_or_refused(context: Context) -> None:
    case = next(case for case in CASES if case.name == "decode")
    right = cases.prepare_case(context, case)
    found = cases.check_case(context, case, lambda: right)
    assert found["impl"] == "xla" and found["share_of_tolerance"] < 1 and "ok" not in found
    wrong = cases.check_case(context, case, lambda: (lambda: right[0]() * 1.01, right[1]))
    assert wrong["ok"] is False and "times the tolerance" in wrong["error"]
    with pytest.raises(NotHereError, match="float32"):
        cases.prepare_case(replace(context, impl="gpu_interpret"), case)


@pytest.mark.parametrize("name", ["cross mixed float32, sinks", "cross mixed latents"])
def test_cases_of_other_calls_run(context: Context, name: str) -> None:
    case = next(case for case in CASES if case.name == name)
    assert cases.check_case(context, case, lambda: cases.prepare_case(context, case))["share_of_tolerance"] < 1


def test_cases_of_the_kernels_come_first(context: Context) -> None:
    asked = replace(context, impl="gpu_interpret", tiny=False, careful=True, skip=(CASES[0].name,))
    names = [item.name for item in cases.list_items(asked)]
    wanted = {case.name: case for case in (*CASES[1:], *LONG_CASES)}
    assert sorted(names) == sorted(wanted)
    portable = [cases.is_portable(asked, wanted[name]) for name in names]
    assert portable == sorted(portable) and 0 < sum(portable) < len(portable)


def test_a_trace_is_read_by_kernels_of_devices() -> None:
    profile = jax.profiler.ProfileData.from_serialized_xspace(
        jax.profiler.ProfileData.text_proto_to_serialized_xspace(
            """
            planes { name: "/host:CPU" lines { name: "Stream" events { metadata_id: 1 duration_ps: 5000000 } }
              event_metadata { key: 1 value { id: 1 name: "host" } } }
            planes { name: "/device:GPU:0"
              lines { name: "Stream #13(Compute)"
                events { metadata_id: 1 duration_ps: 2000000 } events { metadata_id: 1 duration_ps: 3000000 }
                events { metadata_id: 2 duration_ps: 1000000 } }
              lines { name: "XLA Ops" events { metadata_id: 1 duration_ps: 9000000 } }
              event_metadata { key: 1 value { id: 1 name: "paged_decode" } }
              event_metadata { key: 2 value { id: 2 name: "scatter" } } }
            """
        )
    )
    found = kernels.read_kernels(profile)
    assert found == {"paged_decode": (pytest.approx(5e-6), 2), "scatter": (pytest.approx(1e-6), 1)}


def test_kernels_are_whole_again_behind_the_ablation(context: Context) -> None:
    whole = DecodeKernel.attend_tile
    with pytest.raises(RuntimeError), ablation.without_compute():
        assert DecodeKernel.attend_tile is ablation.load_only
        raise RuntimeError
    assert DecodeKernel.attend_tile is whole
    for change in (ablation.without_compute, ablation.without_early_launch):
        with pytest.raises(NotHereError, match="xla"):
            ablation.measure_changed(context, DECODE, change)


def test_no_kernel_waits_for_another_without_the_early_launch() -> None:
    target = TARGETS["h200"]
    program = next(program for program in list_programs(target) if program.name == "decode: llama-8b")

    def list_digests() -> list[str]:
        return [kernel.digest for kernel in measure_attention(Gate(target), program, impl="gpu").kernels]

    whole = list_digests()
    with ablation.without_early_launch():
        changed = list_digests()
    assert len(whole) == len(changed) == 2 and not set(whole) & set(changed)
    assert list_digests() == whole


@pytest.mark.parametrize("shape", [MIXED, DECODE])
def test_who_writes_keys_is_all_that_is_changed(shape: Shape) -> None:
    config = ablation.find_config(shape, "gpu_interpret")
    assert config == default_config(AttnShape(2, shape.spec, "bfloat16")) and config.write == "scatter"


def test_a_time_stands_beside_what_the_device_can_do(context: Context) -> None:
    rates = {"stage": "probe", "event": "result", "item": "rates", "bytes_per_second": 1e9, "flops_per_second": 1e12}
    line = measure.describe_time(replace(context, lines=(rates,)), DECODE, [2e-3, 1e-3, 4e-3])
    assert line["us"]["median"] == pytest.approx(2000) and line["us"]["min"] == pytest.approx(1000)
    assert line["tb_per_s"] == pytest.approx(DECODE.bytes_read / 2e-3 / 1e12)
    assert line["share"] == pytest.approx(DECODE.bytes_read / 2e-3 / 1e9) and line["share_of"] == "the copy"
    prefill = measure.describe_time(replace(context, lines=(rates,)), MIXED, [1e-3])
    assert prefill["share"] == pytest.approx(MIXED.flops / 1e-3 / 1e12)
    assert "share" not in measure.describe_time(context, DECODE, [1e-3])
    assert summarize([1.0, 3.0, 2.0]) == {"median": 2.0, "min": 1.0, "p90": pytest.approx(2.8), "repeats": 3}
    assert [count_layers(DECODE, 20, pool_bytes) for pool_bytes in (10**9, 3 * DECODE.bytes_read, 0)] == [20, 3, 1]


def test_the_slope_leaves_out_what_is_paid_per_call(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = {1: [0.011, 0.011], 2: [0.012, 0.014]}  # ten milliseconds a call
    monkeypatch.setattr(measure, "compile_programs", lambda shape, impl, depths, config: list(depths))
    monkeypatch.setattr(measure, "sample", lambda context, depth: seconds[depth])
    line = measure.measure_slope(context, DECODE, "xla")
    assert line["us"]["median"] == pytest.approx(2000) and line["layers"] == [1, 2]


TUNER = """
import pathlib, sys
results = pathlib.Path(sys.argv[sys.argv.index("--results") + 1])
{body}
"""


@pytest.mark.parametrize(
    ("body", "ok"),
    [
        ('results.write_text(\'[{"kernel": "gpu_decode"}]\')', True),
        ("results.write_text('[{\"kernel\": \"gpu_decode\"}]'); sys.exit('out of luck')", False),
        ("sys.exit('out of luck')", False),
    ],
)
def test_winners_are_kept_however_the_search_ends(
    context: Context, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, ok: bool
) -> None:
    (tmp_path / "tune_kernels.py").write_text(TUNER.format(body=body))
    monkeypatch.setattr(tuning, "SCRIPTS", tmp_path)
    line = {"ok": True} | tuning.search(replace(context, impl=None))
    assert line["ok"] is ok and line["winners"] == ("gpu_decode" in body)
    assert ok or "out of luck" in line["error"]


def test_what_has_nothing_to_tune_says_so(context: Context, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(NotHereError):
        tuning.search(context)
    (tmp_path / "tune_kernels.py").write_text("import sys; sys.exit('nothing to tune: this device runs xla')")
    monkeypatch.setattr(tuning, "SCRIPTS", tmp_path)
    with pytest.raises(NotHereError, match="this device runs xla"):
        tuning.search(replace(context, impl=None))


def test_the_sanitizers_words_are_counted() -> None:
    clean = "========= COMPUTE-SANITIZER\n========= ERROR SUMMARY: 0 errors\n"
    assert sanitizer.describe_output(0, clean) == {"ok": True, "errors": 0}
    said = "========= COMPUTE-SANITIZER\n========= Invalid __global__ read of size 16\n=========     at paged_decode\n"
    line = sanitizer.describe_output(86, f"{said}========= ERROR SUMMARY: 3 errors\n")
    assert line["ok"] is False and line["errors"] == 3 and line["error"].startswith("Invalid __global__ read")
    assert sanitizer.describe_output(1, "Segmentation fault")["errors"] is None


def test_every_stage_has_a_module_that_lists_items(context: Context) -> None:
    for stage in STAGES.values():
        module = importlib.import_module(stage.path)
        asked = replace(context, stage=stage.name, tiny=False, impl=None, careful=True)
        names = [item.name for item in module.list_items(asked)]
        assert names and len(set(names)) == len(names), stage.name


def test_without_rich_lines_are_plain(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    import_it = builtins.__import__

    def without_rich(name: str, *rest: Any) -> Any:
        if name.startswith("rich"):
            raise ImportError(name)
        return import_it(name, *rest)

    with monkeypatch.context() as patched:
        patched.setattr(builtins, "__import__", without_rich)
        importlib.reload(plain_console)
    plain_console.Console(soft_wrap=True).print("[bold]4096[/] tokens in [0, 1)", style="red")
    assert capsys.readouterr().out == "4096 tokens in [0, 1)\n"
    importlib.reload(plain_console)

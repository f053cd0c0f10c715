"""The parent of the compile gate: it goes on behind a child that dies, says what it skips, and fails what failed."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from dataclasses import replace
from importlib.metadata import requires
from pathlib import Path

import pytest
from rich.console import Console

from pallas_kernels.targets import TARGETS
from pallas_kernels.testing.gate_report import ProgramReport
from scripts.compile_step import list_encoders, list_readers, list_steps
from scripts.compile_tower import list_programs
from scripts.test_kernels import (
    KERNELS,
    NEWEST,
    OLDEST,
    STEPS,
    TOWERS,
    Job,
    find_compiler,
    find_folder,
    judge,
    list_jobs,
    list_requirements,
    main,
    make_progress,
    make_table,
    read_lines,
    run_job,
)

pytestmark = pytest.mark.thorough


ROOT = Path(__file__).parents[2]
GOOD = ProgramReport("good", "v5e", impl="xla", is_compiled=True)

CHILD = """
import os, sys
from pallas_kernels.testing.gate_report import ProgramReport
from pallas_kernels.testing.compile_gate import choose_names, make_parser
args = make_parser("").parse_args()
for name in choose_names(args, ["first", "aborts", "last"]):
    if name == "aborts":
        print("LLVM ERROR: cannot select", file=sys.stderr, flush=True)
        os.abort()
    print(ProgramReport(name, args.target, impl="xla", is_compiled=True).to_json(), flush=True)
"""


def run_script(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "scripts/test_kernels.py", *arguments]
    return subprocess.run(command, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True, check=False)


def run_code(tmp_path: Path, code: str, only: list[str] | None = None) -> tuple[list[ProgramReport], str]:
    """Returns the reports of a child with this code, and what a log says of it."""
    path, log = tmp_path / "child.py", io.StringIO()
    path.write_text(code)
    with make_progress(Console(file=log, width=200)) as progress:
        return run_job(Job((str(path),), TARGETS["v5e"]), (), None, only, progress), log.getvalue()


def test_the_gate_goes_on_behind_a_program_that_aborts(tmp_path: Path) -> None:
    (first, aborted, last), log = run_code(tmp_path, CHILD)
    assert (first.name, first.error, last.name, last.error) == ("first", "", "last", "")
    assert aborted.name == "aborts" and "ended with -6" in aborted.error and "LLVM ERROR" in aborted.error
    assert f"{tmp_path / 'child.py'}, v5e: 3 programs in " in log and len(log.splitlines()) == 1


def test_each_line_of_a_child_has_its_own_time() -> None:
    code = "import time\nfor i in range(3): time.sleep(2); print(i, flush=True)\ntime.sleep(600)"
    lines = []
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child, pytest.raises(TimeoutError):
        for line in read_lines(child, 5):
            lines.append(line)
    assert lines == ["0\n", "1\n", "2\n"]
    assert child.returncode == -9


def test_only_the_programs_asked_for_are_run(tmp_path: Path) -> None:
    (last,), _ = run_code(tmp_path, CHILD, ["last", "of another child"])
    assert last.name == "last"


def test_a_child_that_cannot_start_is_a_failure(tmp_path: Path) -> None:
    (report,), _ = run_code(tmp_path, "raise ImportError('no kernels')")
    assert "no kernels" in report.error
    assert judge([report], Console(file=io.StringIO())) == 1


def test_failures_are_counted_and_said() -> None:
    text = io.StringIO()
    bad = replace(GOOD, name="bad", alias_bytes=1, donated_bytes=2)
    assert judge([GOOD, bad, replace(bad, error="refused")], Console(file=text, width=200)) == 2
    assert "FAILED: bad for v5e: the donated pool is copied" in text.getvalue() and "refused" in text.getvalue()
    assert judge([GOOD], Console(file=text)) == 0
    assert judge([], Console(file=text)) == 1, "a gate without programs passes nothing"
    Console(file=text, width=200).print(make_table("Compiled", [GOOD, bad]))
    assert "FAILED" in text.getvalue() and "good" in text.getvalue()


def test_a_failure_is_the_exit_status(monkeypatch: pytest.MonkeyPatch) -> None:
    for reports, status in (([GOOD], 0), ([GOOD, replace(GOOD, error="refused")], 1)):
        monkeypatch.setattr("scripts.test_kernels.run_job", lambda *_, reports=reports: reports)
        monkeypatch.setattr(sys, "argv", ["test_kernels.py", "--lower-only", "--targets", "v5e"])
        assert main() == status


def test_a_compiler_that_cannot_be_installed_is_skipped_aloud(tmp_path: Path) -> None:
    done = run_script("--targets", "v5e", "--wheels", str(tmp_path / "wheels"), PIP_NO_INDEX="1")
    assert done.returncode == 0, done.stderr
    assert "SKIPPED: nothing was compiled for tpu" in done.stdout and "libtpu" in done.stdout


def test_libtpu_is_the_one_that_this_jax_wants() -> None:
    (pin,) = list_requirements("tpu")
    assert any(line.startswith(pin) for line in requires("jax") or ()) and "==" in pin
    assert all("=" in requirement for requirement in list_requirements("gpu"))


def test_the_full_gate_compiles_all_shapes_and_samples_with_the_oldest_compiler(tmp_path: Path) -> None:
    normal, everything = list_jobs(list(TARGETS)), list_jobs(list(TARGETS), full=True)
    assert {job.release for job in normal} == {NEWEST} and not any(job.full for job in normal)
    towers = [Job(TOWERS, TARGETS[name], full=True) for name in ("v5e", "v6e", "tpu7x")]
    assert all(job in everything and job not in normal for job in towers)
    assert [job for job in everything if job.full and job not in towers] == [replace(job, full=True) for job in normal]
    gpus = [target for target in TARGETS.values() if target.platform == "gpu"]
    steps = [Job(STEPS, TARGETS[name]) for name in ("v6e", "tpu7x")]
    kernels = [Job(KERNELS, target, OLDEST) for target in gpus]
    samples = [job for job in everything if not job.full]
    assert samples == [*steps, *kernels]
    assert {job.release for job in list_jobs(list(TARGETS), full=True, lower_only=True)} == {NEWEST}
    assert "nvidia-cuda-nvcc==13.0.*" in list_requirements("gpu", OLDEST)
    assert find_folder("gpu", tmp_path, OLDEST) != find_folder("gpu", tmp_path)


def test_a_report_says_which_compiler_it_is_of(tmp_path: Path) -> None:
    for wheel, number in (("nvidia-cuda-nvcc", "13.0.88"), ("libtpu", "0.0.50"), ("rich", "1.0")):
        folder = tmp_path / f"{wheel.replace('-', '_')}-{number}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {wheel}\nVersion: {number}\n")
    assert find_compiler("gpu", tmp_path) == "nvcc 13.0.88" and find_compiler("tpu", tmp_path) == "libtpu 0.0.50"
    assert find_compiler("gpu", tmp_path / "empty") == ""
    text, report = io.StringIO(), replace(GOOD, compiler="nvcc 13.0.88", error="refused")
    Console(file=text, width=200).print(make_table("Compiled", [report]))
    assert judge([report], Console(file=text, width=200)) == 1
    assert text.getvalue().count("nvcc 13.0.88") == 2


def test_the_full_gate_has_steps_of_two_gpus_and_one_with_all_layers() -> None:
    steps = list_steps(TARGETS["h200"], full=True, impl="gpu")
    *names, verify, hybrid, single, settle, _, _, _, portable = steps
    names, quantized = names[:-10], names[-10:]
    assert [name[-9:] for name in names] == ["1 devices", "1 devices", "2 devices", "2 devices"] * 6
    assert ["32 layers" in name for name in names] == [False] * 4 + [True] * 2 + [False] * 18
    assert ["mixed 2048" in name for name in quantized] == [False, True] * 5 and "awq" in quantized[-1]
    assert verify.startswith("step verify 128x2") and hybrid.startswith("step verify 128x2: qwen3.6")
    assert single.startswith("step verify 1x4: qwen3.6") and settle.startswith("settle verify 1x4: qwen3.6")
    followed = list(steps)[-4:-1]
    assert [name.split()[1] for name in followed] == ["verify", "decode", "mixed"] and "mtp" in followed[0]
    assert all([feature.note for feature in steps[name][0].features] == ["mtp"] for name in followed)
    assert "portable attention" in portable and steps[portable][0].impl == "xla"
    two = steps[next(name for name in names if "deepseek-v3" in name and "2 devices" in name)][0]
    assert two.attention[0].num_heads == 64 and two.num_devices == 2
    sample = list(list_steps(TARGETS["h200"], full=False, impl="gpu"))
    assert [name.split()[1] for name in sample] == ["mixed", "decode", "decode"]
    assert "int8 channels, 2 layers" in sample[1] and "portable attention" in sample[2]
    others = list_steps(TARGETS["tpu7x"], full=False, impl="tpu")
    assert [name.split()[1] for name in others] == ["mixed", "decode", "mixed"], "the last two of a hybrid"
    assert all(shapes.num_devices == 8 for shapes, _ in others.values())


def test_the_gate_has_whole_texts_of_encoders() -> None:
    for name, impls in (("h200", ["gpu", "xla", "xla"]), ("v5e", ["xla"] * 3)):  # windows on both sides are portable
        steps = list_encoders(TARGETS[name], full=True, impl=TARGETS[name].impl)
        assert [shapes.impl for shapes, _ in steps.values()] == impls
        assert all(shapes.model.reads_whole and bucket.tokens >= 2048 for shapes, bucket in steps.values())
        sample = list_encoders(TARGETS[name], full=False, impl=TARGETS[name].impl)
        assert list(sample) == list(steps)[: name == "h200"], "CI compiles none for a TPU"


def test_the_full_gate_has_steps_that_compute_prompts_with_images() -> None:
    for name, devices in (("h200", 1), ("v5e", 8), ("v6e", 8), ("tpu7x", 8)):
        target = TARGETS[name]
        assert bool(list_readers(target, full=False, impl=target.impl)) == (name in ("v6e", "tpu7x"))
        steps = list_readers(target, full=True, impl=target.impl)
        (qwen, bucket), (gemma, _) = steps.values()
        assert bucket.is_mixed and all(name.endswith(f"4 layers, {devices} devices") for name in steps)
        assert [len(shapes.attention) for shapes in (qwen, gemma)] == [1, 2], "windows have pages of their own"
        assert qwen.state.has_image_positions and qwen.prompt_impl is None
        assert gemma.prompt_impl is not None and gemma.prompt_impl[0] == "xla", "kernels have no last keys"
        rows = [(images.num_rows, images.tower.num_parts) for (images,) in (qwen.features, gemma.features)]
        assert rows == [(8192, 4), (512, 1)]


def test_the_gate_has_towers_of_published_models() -> None:
    rest = [(27, 4096, 1), (27, 2520, 1), (24, 4096, 1), (24, 12160, 1)]
    others = {
        "h200": [(2, 16384, 2), (27, 16384, 1), (27, 4096, 1), *rest],
        "v5e": [(2, 16384, 8), (27, 16384, 1), *rest],
    }
    for name, expected in others.items():
        target = TARGETS[name]
        (sample,), programs = list_programs(target, full=False), list_programs(target, full=True)
        sizes = [(each.num_layers, each.num_patches, each.num_devices) for each in programs.values()]
        assert sizes == [(2, 16384, 1), *expected]
        assert sample == next(iter(programs)) and "qwen3-vl-8b, 2 layers" in sample
        for each in programs.values():
            (images,) = each.make_shapes(target, target.impl).features
            assert images.tower.blocks.num_layers == each.num_layers and each.num_patches in images.sizes
            has_kernels = name == "h200" and "gemma-4" not in each.model
            assert images.impl == ("gpu" if has_kernels else "xla"), "a TPU's kernels have causal masks"


@pytest.mark.slow
@pytest.mark.thorough
def test_kernels_are_lowered_without_a_compiler() -> None:
    done = run_script("--lower-only", "--impl", "xla", "--targets", "v5e", "--only", "drafts: llama-8b")
    assert done.returncode == 0, done.stdout
    assert "drafts: llama-8b" in done.stdout and "Lowered with jax" in done.stdout

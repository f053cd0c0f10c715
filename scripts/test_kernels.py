"""Compiles every kernel for an H200, an A100, an L4 and three TPUs, without any of them, and whole engine steps for
two of them, and towers of models that read images.

The devices' own compilers come as wheels, which this script installs once into `.wheels/`. A program fails if its
compiler refuses it or complains, if a kernel spills registers or exceeds a memory of the device, if the donated KV
pool is copied, if a GPU computes something again to save memory, if products of its steps have small tiles, or if a
loop of portable attention does not end with the batch; also for faults that only a driver or a large pool would show
(docs/kernels.md). It does not show results, hangs or speed. Each target compiles a sample of the shapes
(`testing/gate_shapes.py`). `--full` compiles all shapes and tuning entries and many more steps, and the samples also
with the oldest CUDA 13 compilers; it adds steps and towers of a TPU v6e and a TPU v7x. `--lower-only` needs no compiler
and finds less.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from importlib.metadata import distributions, requires, version
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from pallas_kernels.targets import TARGETS, Target
from pallas_kernels.testing.gate_report import ProgramReport, find_faults, read_report

ROOT = Path(__file__).parents[1]
WHEELS = ROOT / ".wheels"
MARKER = ".complete"  # written last: a folder without it is not whole
INSTALL_SECONDS = 900
PROGRAM_SECONDS = 1800
LOG_COLUMNS = 180
TEXT_COLUMNS = ("program", "device", "compiler", "kernel", "")
KERNELS = ("-m", "pallas_kernels.testing.kernel_gate")
STEPS = ("scripts/compile_step.py",)
TOWERS = ("scripts/compile_tower.py",)
TITLES = {KERNELS: "kernels", STEPS: "steps", TOWERS: "towers"}
STEP_TARGETS = ("h200", "v5e")
MORE_STEP_TARGETS = ("v6e", "tpu7x")  # a sample of steps for these, where everything is asked for
TOWER_TARGETS = ("h200",)
MORE_TOWER_TARGETS = ("v5e", *MORE_STEP_TARGETS)  # where everything is asked for: on a TPU towers take minutes
NEWEST, OLDEST = "newest", "13.0"  # releases of the CUDA compilers, which are not tied to jax within a major version
CUDA_PINS = {NEWEST: ">=13.0.48,<14", OLDEST: "==13.0.*"}
CUDA_TOOLS = Path("nvidia", "cu13", "bin")  # in the wheels
COMPILERS = {"gpu": "nvidia-cuda-nvcc", "tpu": "libtpu"}  # the wheel that has each


class MissingWheelsError(Exception):
    """The wheels of a compiler cannot be installed; the message says why."""


@dataclass(frozen=True)
class Job:
    """One child program, its target, the release of the compiler if there are several, and whether all its programs
    are asked for or a sample."""

    command: tuple[str, ...]
    target: Target
    release: str = NEWEST
    full: bool = False

    @property
    def title(self) -> str:
        what = TITLES.get(self.command, " ".join(self.command))
        return f"{what}, {self.target.name}" + ("" if self.release == NEWEST else f", CUDA {self.release}")


def list_requirements(platform: str, release: str = NEWEST) -> list[str]:
    """The requirements that pip installs to compile for a platform with the jax of this environment.

    Never an unpinned libtpu: the newest one belongs to a jax that is not released yet.
    """
    if platform == "gpu":
        plugins = [f"jax-cuda13-{part}=={version('jax')}" for part in ("pjrt", "plugin")]
        return [*plugins, *(f"{wheel}{CUDA_PINS[release]}" for wheel in ("nvidia-cuda-nvcc", "nvidia-nvvm"))]
    pins = [line.split(";")[0].strip() for line in requires("jax") or () if line.startswith("libtpu")]
    if len(pins) != 1 or "==" not in pins[0]:
        raise MissingWheelsError(f"jax {version('jax')} pins no libtpu: {pins}")
    return pins


def find_folder(platform: str, directory: Path, release: str = NEWEST) -> Path:
    """Where a platform's compiler is installed, or would be."""
    suffix = "" if release == NEWEST else f"-cuda{release}"
    return directory / f"{platform}-{version('jax')}{suffix}"


def find_compiler(platform: str, folder: Path) -> str:
    """Name and version of the compiler in a folder; empty if there is none."""
    found = {wheel.metadata["Name"]: wheel.version for wheel in distributions(path=[str(folder)])}
    name = COMPILERS[platform]
    return f"{name.removeprefix('nvidia-cuda-')} {found[name]}" if name in found else ""


def prepare_wheels(platform: str, directory: Path, console: Console, release: str = NEWEST) -> Path:
    """The folder with a platform's compiler, which is installed if it is missing.

    Raises:
        MissingWheelsError: pip failed; what it said.
    """
    folder = find_folder(platform, directory, release)
    requirements = list_requirements(platform, release)
    marker = folder / MARKER
    if marker.exists() and marker.read_text().split("\n") == requirements:
        return folder
    console.print(f"Installing {', '.join(requirements)} into {folder}")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps", "--upgrade"]
    try:
        subprocess.run(
            [*pip, "--target", str(folder), *requirements],
            capture_output=True,
            text=True,
            check=True,
            timeout=INSTALL_SECONDS,
        )
    except subprocess.CalledProcessError as error:
        raise MissingWheelsError(f"pip: {error.stderr.strip().splitlines()[-1:]}") from error
    except subprocess.TimeoutExpired as error:
        raise MissingWheelsError(f"pip took more than {INSTALL_SECONDS} s") from error
    marker.write_text("\n".join(requirements))
    return folder


def make_environment(target: Target, wheels: Path | None) -> dict[str, str]:
    """The environment of a child: the target's variables, and its compiler's wheels before everything else.

    The wheels also come before ptxas on the PATH, which XLA prefers to that of a wheel.
    """
    first = {} if wheels is None else {"PYTHONPATH": str(wheels), "PATH": str(wheels / CUDA_TOOLS)}
    paths = {
        name: os.pathsep.join(part for part in (first.get(name), os.environ.get(name)) if part)
        for name in ("PYTHONPATH", "PATH")
    }
    return os.environ | dict(target.environment) | paths


def run_job(
    job: Job, options: Sequence[str], wheels: Path | None, only: Sequence[str] | None, progress: Progress
) -> list[ProgramReport]:
    """Runs one child over all its programs. A program that aborts its process is reported, and another process goes on
    after it."""
    environment = make_environment(job.target, wheels)
    command = [sys.executable, *job.command, job.target.name, *options, *(["--full"] if job.full else []), "--json"]
    compiler = "" if wheels is None else find_compiler(job.target.platform, wheels)
    start, task = time.perf_counter(), progress.add_task(job.title, total=None)
    reports: list[ProgramReport] = []
    rest = only
    while rest is None or rest:
        asked = command if rest is None else [*command, "--only", *rest]
        names, found, failure = run_child(asked, environment, lambda: progress.advance(task))
        if names is None:  # it did not start
            names = list(rest or ()) if reports else [job.title]
        progress.update(task, total=len(reports) + len(names))
        reports += [replace(report, compiler=compiler) for report in found]
        if len(found) < len(names):
            reports.append(ProgramReport(names[len(found)], job.target.name, compiler=compiler, error=failure))
            progress.advance(task)
        rest = names[len(found) + 1 :]
    progress.remove_task(task)
    if reports:
        progress.console.print(f"{job.title}: {len(reports)} programs in {time.perf_counter() - start:.0f} s")
    return reports


def run_child(
    command: Sequence[str], environment: dict[str, str], advance: Callable[[], None]
) -> tuple[list[str] | None, list[ProgramReport], str]:
    """Returns the programs that a child announced, None if it did not come so far, those that it reported, and how it
    ended if these are fewer.

    Calls `advance` behind each report.
    """
    names: list[str] | None = None
    reports: list[ProgramReport] = []
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True) as child,
    ):
        try:
            for line in read_lines(child, PROGRAM_SECONDS):
                if names is None and line.startswith("["):
                    names = json.loads(line)
                elif line.startswith("{"):
                    reports.append(read_report(line))
                    advance()
            how = f"the process ended with {child.wait()}"
        except TimeoutError:
            how = f"no end after {PROGRAM_SECONDS} s"
        errors.seek(0)
        return names, reports, f"{how}: {tail(errors.read())}"


def read_lines(child: subprocess.Popen[str], seconds: float) -> Iterator[str]:
    """Yields what a child prints, line by line.

    Raises:
        TimeoutError: a line took longer than `seconds`; the child is killed.
    """
    assert child.stdout is not None
    is_late = threading.Event()

    def end() -> None:
        is_late.set()
        child.kill()

    while True:
        timer = threading.Timer(seconds, end)
        timer.daemon = True  # whoever interrupts the script does not wait for it
        timer.start()
        line = child.stdout.readline()
        timer.cancel()
        if is_late.is_set():
            raise TimeoutError
        if not line:
            return
        yield line


def tail(text: str, lines: int = 6) -> str:
    """The last lines of a process's standard error, where compilers say why they abort."""
    return "\n".join(text.strip().splitlines()[-lines:])


def make_table(title: str, reports: Iterable[ProgramReport]) -> Table:
    """One row a program, one line a kernel."""
    table = Table(title=title)
    for column in (
        "program",
        "device",
        "compiler",
        "s",
        "temp MB",
        "launches",
        "async",
        "kernel",
        "registers",
        "spilled",
        "shared / VMEM KB",
        "",
    ):
        table.add_column(column, justify="left" if column in TEXT_COLUMNS else "right")
    for report in reports:
        kernels = tuple(dict.fromkeys(replace(kernel, digest="") for kernel in report.kernels))
        lines = (
            "\n".join(kernel.name for kernel in kernels) or (report.reason if report.impl == "xla" else ""),
            "\n".join(show(kernel.registers) for kernel in kernels),
            "\n".join(show(kernel.spill_bytes) for kernel in kernels),
            "\n".join(show(kernel.shared_memory_bytes or kernel.vmem_bytes, 1024) for kernel in kernels),
        )
        faults = find_faults(report, TARGETS[report.target])
        verdict = "[green]ok[/]" if not faults else "[red]FAILED[/]"
        temporaries = show(report.temp_bytes if report.is_compiled else None, 10**6)
        table.add_row(
            report.name,
            report.target,
            report.compiler,
            f"{report.seconds:.1f}",
            temporaries,
            show(report.launches),
            f"{report.async_pairs} of {report.collectives}" if report.collectives else "-",
            *lines,
            verdict,
        )
    return table


def show(value: int | None, unit: int = 1) -> str:
    """A figure in units, or a dash if it is unknown."""
    return "-" if value is None else f"{value / unit:,.0f}"


def judge(reports: Sequence[ProgramReport], console: Console) -> int:
    """Prints what failed and why, and returns how many programs did. No program at all is a failure too."""
    failed = 0
    for report in reports:
        faults = find_faults(report, TARGETS[report.target])
        failed += bool(faults)
        for fault in faults:
            where = f"{report.target}, {report.compiler}" if report.compiler else report.target
            console.print(f"FAILED: {report.name} for {where}: {fault}", style="red", markup=False)
    if not reports:
        console.print("FAILED: nothing was compiled", style="red")
    return failed + (not reports)


def make_console() -> Console:
    """A console as wide as the terminal, or wide enough for a line per program in a log."""
    console = Console(soft_wrap=True)
    return console if console.is_terminal else Console(soft_wrap=True, width=LOG_COLUMNS)


def make_progress(console: Console) -> Progress:
    """A bar for each job that runs. In a log, which has no bars, only the line behind each job."""
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    return Progress(*columns, console=console, transient=True)


def list_jobs(targets: Sequence[str], *, full: bool = False, lower_only: bool = False) -> list[Job]:
    """The jobs, longest first. Only a compiler makes its releases differ, so lowering has one job per target."""
    steps = [Job(STEPS, TARGETS[name], full=full) for name in targets if name in STEP_TARGETS]
    steps += [Job(STEPS, TARGETS[name]) for name in targets if full and name in MORE_STEP_TARGETS]
    steps += [Job(TOWERS, TARGETS[name], full=full) for name in targets if name in TOWER_TARGETS]
    steps += [Job(TOWERS, TARGETS[name], full=True) for name in targets if full and name in MORE_TOWER_TARGETS]
    kernels = [Job(KERNELS, TARGETS[name], full=full) for name in targets]
    if not full or lower_only:
        return [*steps, *kernels]
    on_gpus = [job for job in kernels if job.target.platform == "gpu"]
    return [*steps, *kernels, *(replace(job, release=OLDEST, full=False) for job in on_gpus)]


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--targets", nargs="+", choices=TARGETS, default=list(TARGETS))
    parser.add_argument("--part", choices=("kernels", "steps"), help="these alone; towers are steps (default: both)")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="programs of these names (default: all)")
    parser.add_argument(
        "--full",
        action="store_true",
        help="every shape, every entry of the tuning tables, more steps, one with all layers, both CUDA compilers",
    )
    parser.add_argument("--lower-only", action="store_true", help="without the devices' compilers")
    parser.add_argument("--impl", help="another implementation than the targets' own kernels, e.g. xla")
    parser.add_argument("--wheels", type=Path, default=WHEELS, help="where compilers are installed (default: .wheels)")
    parser.add_argument("--jobs", type=int, default=2, help="processes at once (default: 2)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the reports there as well")
    return parser


def main() -> int:
    args = make_parser().parse_args()
    console, start = make_console(), time.perf_counter()
    options = ["--lower-only"] if args.lower_only else []
    options += ["--impl", args.impl] if args.impl else []
    jobs = list_jobs(args.targets, full=args.full, lower_only=args.lower_only)
    jobs = [job for job in jobs if args.part is None or (args.part == "kernels") == (job.command == KERNELS)]
    wheels: dict[tuple[str, str], Path | None] = {}
    skipped = []
    for platform, release in dict.fromkeys((job.target.platform, job.release) for job in jobs):
        try:
            wheels[platform, release] = (
                None if args.lower_only else prepare_wheels(platform, args.wheels, console, release)
            )
        except MissingWheelsError as error:
            skipped.append(f"SKIPPED: nothing was compiled for {platform}: its compiler is not here: {error}")
    jobs = [job for job in jobs if (job.target.platform, job.release) in wheels]
    with make_progress(console) as progress, ThreadPoolExecutor(args.jobs) as pool:

        def run(job: Job) -> list[ProgramReport]:
            return run_job(job, options, wheels[job.target.platform, job.release], args.only, progress)

        reports = [report for batch in pool.map(run, jobs) for report in batch]
    kind = "Lowered" if args.lower_only else "Compiled"
    title = f"{kind} with jax {version('jax')} in {time.perf_counter() - start:.0f} s"
    console.print(make_table(title, reports))
    failed = judge(reports, console) if jobs else 0
    for line in skipped:
        console.print(line, style="bold yellow", markup=False)
    if args.json:
        args.json.write_text(json.dumps([asdict(report) for report in reports], indent=1) + "\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

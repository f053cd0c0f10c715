"""Checks and measures a device in ten minutes, the most important things first.

Run this first on a new GPU. Every stage runs in a process of its own, which is killed when its time is over: kernels
that were never run may abort a process or hang. Each result is on the disk, as a line of results.jsonl, before the next
item begins, and beside each figure stands what was predicted. `--resume` runs what an earlier call did not reach;
`--stage second` is for the second call. If the smoke test fails, the XLA path is measured in place of the kernels. If
the device answers no more, the day ends. The folder holds at most eight small files; results.jsonl and report.md belong
in docs/device/, tuned.txtpb where docs/bundles.md says.

Needs jax, numpy, flax, jaxtyping, tokenizers, safetensors, sentencepiece, huggingface-hub, jinja2 and rich.
`--dry-run` runs all of it on small shapes, with the kernels interpreted, on any machine.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from device_stages.child import Request, device_answers, run_stage
from device_stages.plan import GROUPS, STAGES, Stage, find_smoke_fault
from device_stages.report import write_report
from device_stages.results import append_line, is_done, read_lines

ROOT = Path(__file__).parents[1]
RESULTS, REPORT, LOG = "results.jsonl", "report.md", "log.txt"
SECONDS = 580.0
LEAST_SECONDS = 10.0  # a stage with less time is not begun
CUDA_TOOLS = ("/usr/local/cuda/bin",)  # where ptxas is if it is not on the path
DRY_ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "NPROC": "8",  # the GPU kernels' interpreter blocks threads of XLA's pool, one per warpgroup
    # Compiling takes most of a dry run.
    "XLA_FLAGS": "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true",
}
DRY_IMPL = "gpu_interpret"
DRY_PATIENCE = 20.0  # factor on time limits: interpreting on a CPU is slow


@dataclass(frozen=True)
class Day:
    """One call: where its results go, and when it ends."""

    request: Request
    end: float  # in time.monotonic seconds
    folder: Path

    @property
    def seconds_left(self) -> float:
        return self.end - time.monotonic()


def run_day(stages: Sequence[Stage], day: Day) -> None:
    """Runs the stages that are not done yet, one after the other, as time allows."""
    for stage in stages:
        results = day.request.results
        lines = read_lines(results)
        if is_done(lines, stage.name):
            print(f"{stage.name}: done before", flush=True)
            continue
        limit = min(stage.seconds, day.seconds_left)
        if limit < min(stage.seconds, LEAST_SECONDS):
            append_line(results, {"stage": stage.name, "event": "skip", "why": "no time left"})
            print(f"{stage.name}: no time left", flush=True)
            continue
        request, fault = day.request, find_smoke_fault(lines) if stage.measures else None
        if fault is not None:
            request = replace(request, impl="xla")
            print(f"{stage.name}: measures the XLA path, because of {fault}", flush=True)
        begun = time.monotonic()
        how = run_stage(stage, request, limit)
        print(f"{stage.name}: {how}, {time.monotonic() - begun:.1f} s", flush=True)
        write_report(day.folder / REPORT, read_lines(results))
        was_hurt = how != "done" or any(line["event"] == "lost" for line in read_lines(results)[len(lines) :])
        if was_hurt and not device_answers(request):
            append_line(results, {"stage": stage.name, "event": "skip", "why": "device lost"})
            print("device lost", flush=True)
            return


def make_environment(*, dry_run: bool) -> dict[str, str]:
    """Returns the environment of all stages, with this repository and CUDA's tools on the paths."""
    environment = dict(os.environ)
    paths = [str(ROOT), *filter(None, [environment.get("PYTHONPATH")])]
    environment["PYTHONPATH"] = os.pathsep.join(paths)
    environment["PYTHONUNBUFFERED"] = "1"
    if shutil.which("ptxas") is None:
        found = [folder for folder in CUDA_TOOLS if Path(folder, "ptxas").exists()]
        environment["PATH"] = os.pathsep.join([*found, environment.get("PATH", "")])
    return environment | (DRY_ENVIRONMENT if dry_run else {})


def choose_stages(names: Iterable[str], *, dry_run: bool) -> list[Stage]:
    """Returns the stages of these names and groups, in order: by default the first group, in a dry run all.

    Raises:
        ValueError: a name is unknown; lists the known ones.
    """
    names = list(names)
    if not names:
        names = list(STAGES) if dry_run else ["first"]
    wanted: set[str] = set()
    for name in names:
        if name not in GROUPS and name not in STAGES:
            raise ValueError(f"--stage must be one of {', '.join([*GROUPS, *STAGES])}, got {name!r}")
        wanted |= {stage.name for stage in GROUPS.get(name, ())} or {name}
    patience = DRY_PATIENCE if dry_run else 1.0
    return [
        replace(stage, seconds=patience * stage.seconds, item_seconds=patience * stage.item_seconds)
        for stage in STAGES.values()
        if stage.name in wanted
    ]


def prepare_results(folder: Path, resume: Path | None) -> Path:
    """Makes the folder and its results file, new or copied from `resume` (a file or its folder); returns the file."""
    folder.mkdir(parents=True, exist_ok=True)
    results = folder / RESULTS
    earlier = None if resume is None else resume / RESULTS if resume.is_dir() else resume
    if earlier is None:
        results.unlink(missing_ok=True)
    elif earlier.exists() and not (results.exists() and results.samefile(earlier)):
        shutil.copyfile(earlier, results)
    return results


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = Path(os.environ.get("OUT", "device-day"))
    parser.add_argument("--out", type=Path, default=default, metavar="FOLDER", help="default: $OUT, else ./device-day")
    parser.add_argument("--stage", nargs="+", default=[], metavar="NAME", help=f"{', '.join([*GROUPS, *STAGES])}")
    parser.add_argument(
        "--seconds", type=float, help=f"for all stages together (default: {SECONDS:g}; a dry run's more)"
    )
    parser.add_argument(
        "--resume",
        type=Path,
        nargs="?",
        const=Path(),
        metavar="FILE",
        help="go on behind these results, or those in --out; nothing in them is run again",
    )
    parser.add_argument("--impl", help="of attention; default: what the device gets")
    parser.add_argument("--report", type=Path, metavar="FILE", help="write the report of the results there and no more")
    parser.add_argument("--dry-run", action="store_true", help="small shapes, kernels interpreted, no device")
    args = parser.parse_args()
    if args.seconds is None:
        args.seconds = SECONDS * (DRY_PATIENCE if args.dry_run else 1.0)
    try:
        args.stages = choose_stages(args.stage, dry_run=args.dry_run)
    except ValueError as problem:
        parser.error(str(problem))
    return args


def main() -> int:
    args = parse_args()
    if args.report is not None:
        write_report(args.report, read_lines(args.out / RESULTS))
        return 0
    stages = args.stages
    resume = args.out if args.resume == Path() else args.resume
    results = prepare_results(args.out, resume)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))  # so that no child stays behind
    impl = args.impl or (DRY_IMPL if args.dry_run else None)
    environment = make_environment(dry_run=args.dry_run)
    request = Request(results.resolve(), (args.out / LOG).resolve(), environment, impl, tiny=args.dry_run)
    run_day(stages, Day(request, time.monotonic() + args.seconds, args.out))
    write_report(args.out / REPORT, read_lines(results))
    print((args.out / REPORT).read_text())
    lines = read_lines(results)
    unfinished = [stage.name for stage in stages if not is_done(lines, stage.name)]
    wrong = [line for line in lines if line["event"] == "lost" or line.get("ok") is False]
    return 1 if unfinished or wrong else 0


if __name__ == "__main__":
    sys.exit(main())

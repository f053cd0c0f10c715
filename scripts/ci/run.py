"""Runs the targets whose inputs changed since they last passed on this machine, and says when the others did.

`CI_FULL=1` runs all of them. `--full` is `make test-all`: the same targets with what CI leaves out, and more of them.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from scripts.ci.inputs import Repository, find_inputs, list_docs_tests, make_digest, split_target
from scripts.ci.passes import Passes, describe_machine, find_folder
from scripts.ci.targets import TARGETS, Target

ROOT = Path(__file__).parents[2]
SLOWEST = 10
NO_TESTS = 5  # pytest's status where no test is left: all of these have marks that CI leaves out
FINISHED = (0, 1, NO_TESTS)  # pytest went through every test, passed or failed


@dataclass(frozen=True)
class Job:
    """A target with the command of the Makefile that runs it, and what its pass is kept under."""

    target: Target
    command: str
    digest: str


@dataclass
class Costs:
    """What was spent: a line for each target, and CPU seconds of each test."""

    lines: list[tuple[str, float | None, float]] = field(default_factory=list)
    tests: dict[str, float] = field(default_factory=dict)

    def print(self) -> None:
        print(f"\n{'target':<24}{'seconds':>10}{'CPU seconds':>14}")
        for name, seconds, cpu_seconds in self.lines:
            print(f"{name:<24}{'' if seconds is None else f'{seconds:.0f}':>10}{cpu_seconds:>14.0f}")
        if self.tests:
            print("\nThe slowest tests, in CPU seconds:")
        for test in sorted(self.tests, key=self.tests.__getitem__, reverse=True)[:SLOWEST]:
            print(f"{self.tests[test]:8.1f}  {test}")
        print(flush=True)


def make_jobs(repository: Repository, machine: str, oldest_tests: Sequence[str], full: bool) -> list[Job]:
    jobs = []
    for whole in TARGETS:
        command = whole.full if full else whole.ci
        if command is None:
            continue
        more: Sequence[str] = ()
        if whole.name == "docs":
            more = list_docs_tests(repository)
        elif whole.name == "oldest":
            more = ("tests",) if full else oldest_tests
        for part in split_target(whole, repository, ("docs",) if full else ("docs", "thorough")):
            target = replace(part, has_rooms=part.has_rooms or full)
            inputs = find_inputs(target, repository, more)
            jobs.append(Job(target, command, make_digest(target, command, inputs, repository, machine)))
    return jobs


def group_jobs(jobs: Sequence[Job]) -> list[list[Job]]:
    """Jobs of one command run as one, so that processes start and programs compile once; what always runs, alone."""
    groups: dict[str, list[Job]] = {}
    for job in jobs:
        key = job.command if job.target.is_kept else job.target.name
        groups.setdefault(key, []).append(job)
    return list(groups.values())


def read_cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def is_in(test: str, target: Target) -> bool:
    path = test.partition("::")[0]
    return any(path == place or path.startswith(f"{place}/") for place in target.tests)


def run_group(group: Sequence[Job], passes: Passes, costs: Costs) -> bool:
    """Makes one command; what passed is kept, in a group that failed each target without a failed test."""
    tests = [path for job in group for path in job.target.tests]
    started, cpu_before = time.monotonic(), read_cpu_seconds()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "costs.json"
        command = ["make", "--no-print-directory", group[0].command, f"COSTS={file}"]
        done = subprocess.run([*command, *([f"TESTS={' '.join(tests)}"] if tests else [])], cwd=ROOT, check=False)
        found = json.loads(file.read_text()) if file.exists() else {}
    seconds, cpu_seconds = time.monotonic() - started, read_cpu_seconds() - cpu_before
    status = found.get("status")
    is_good = done.returncode == 0 or status == NO_TESTS
    results: Mapping[str, tuple[float, bool]] = found.get("tests", {})
    costs.tests |= {test: cpu for test, (cpu, _) in results.items()}
    is_group = len(group) > 1
    costs.lines.append((f"make {group[0].command}" if is_group else group[0].target.name, seconds, cpu_seconds))
    for job in group:
        own = {test: result for test, result in results.items() if is_in(test, job.target)}
        if is_group:
            costs.lines.append((f"  {job.target.name}", None, sum(cpu for cpu, _ in own.values())))
        has_passed = status in FINISHED and bool(own) and all(passed for _, passed in own.values())
        if job.target.is_kept and (is_good or (is_group and has_passed)):
            passes.keep(job.digest, job.target.name)
    return is_good


def list_oldest_tests() -> list[str]:
    command = ["make", "--silent", "--no-print-directory", "list-oldest-tests"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()


def describe_time(seconds: float) -> str:
    return time.strftime("%d %B %Y, %H:%M", time.localtime(seconds)).lstrip("0")


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="scripts.ci", description=__doc__)
    parser.add_argument("--full", action="store_true", help="with what CI leaves out, as `make test-all` has it")
    parser.add_argument("--list", action="store_true", help="only say what would run")
    args = parser.parse_args(words)
    if not args.list:
        subprocess.run(["make", "--no-print-directory", "setup"], cwd=ROOT, check=True)
    passes = Passes(find_folder(os.environ))
    passes.forget_old()
    jobs = make_jobs(Repository.read(ROOT), describe_machine(ROOT / ".venv"), list_oldest_tests(), args.full)
    stale = []
    for job in jobs:
        passed = passes.find(job.digest) if job.target.is_kept and not os.environ.get("CI_FULL") else None
        if passed is None:
            stale.append(job)
        else:
            print(f"SKIPPED {job.target.name}: it passed with the same inputs on {describe_time(passed)}", flush=True)
    if args.list:
        print("To run:", *(job.target.name for job in stale))
        return 0
    costs = Costs()
    groups = group_jobs(stale)
    for number, group in enumerate(groups, 1):
        if number == len(groups):
            costs.print()  # before the last one, whose closing lines end the output
        print(f"RUN {' '.join(job.target.name for job in group)}", flush=True)
        if not run_group(group, passes, costs):
            costs.print()
            print(f"FAILED make {group[0].command}", file=sys.stderr)
            return 1
    return 0

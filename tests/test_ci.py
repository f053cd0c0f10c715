"""What CI runs again after a change: by the floors, and nothing that passed with the same inputs."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from scripts.ci import run
from scripts.ci.floors import FLOORS, is_allowed
from scripts.ci.inputs import Repository, find_inputs, make_digest, split_target
from scripts.ci.passes import Passes, find_folder
from scripts.ci.run import Costs, Job, group_jobs, list_oldest_tests, make_jobs, run_group
from scripts.ci.targets import TARGETS, Target

ROOT = Path(__file__).parents[1]
ROOMS = {target.name: target.rooms[0] for target in TARGETS if len(target.rooms) == 1}


@cache
def read_repository() -> Repository:
    return Repository.read(ROOT)


@cache
def list_inputs() -> dict[str, set[str]]:
    repository = read_repository()
    targets = [part for target in TARGETS for part in split_target(target, repository, ("docs", "thorough"))]
    oldest = list_oldest_tests()
    return {t.name: find_inputs(t, repository, oldest if t.name == "oldest" else ()) for t in targets}


def find_reached(path: str) -> set[str]:
    return {name for name, inputs in list_inputs().items() if path in inputs}


@pytest.mark.parametrize("room", FLOORS)
def test_a_change_reaches_the_rooms_above_it_and_no_others(room: str) -> None:
    """One file of each room of each floor."""
    path = read_repository().rooms[room][0]
    reached = find_reached(path)
    for name, other in ROOMS.items():
        if name in list_inputs() and other != "pallas_kernels":
            assert (name in reached) == is_allowed(other, room), name
    assert {"e2e", "server"} <= reached or FLOORS[room] >= "F4"


@pytest.mark.parametrize(
    ("path", "reached", "spared"),
    [
        (
            "jaxserve/core/scheduler/planner.py",
            "scheduler runtime engine e2e server bench-regression",
            "pages layers models",
        ),
        ("jaxserve/core/scheduler/planner.py", "engine-above", "gate-kernels kernels docs sampling structured weights"),
        (
            "jaxserve/server/app.py",
            "server deploy-devices cli",
            "engine runtime models models-above weights-above e2e scheduler kernels gate-steps docs",
        ),
        (
            "jaxserve/families/llama.py",
            "families weights runtime e2e gate-steps oldest",
            "layers scheduler kernels gate-kernels",
        ),
        (
            "pallas_kernels/hopper/decode.py",
            "kernels gate-kernels gate-steps e2e-devices runtime-devices",
            "e2e runtime engine families layers server bench-regression docs",
        ),
        ("pallas_kernels/testing/gate_report.py", "kernels gate-kernels gate-steps", "e2e runtime server"),
        ("pallas_kernels/xla.py", "kernels gate-kernels e2e runtime runtime-devices server bench-regression", "docs"),
        ("tests/core/pages/test_pool.py", "pages", "scheduler engine e2e server"),
        ("tests/golden_cases.py", "families-above e2e server", "pages scheduler kernels gate-kernels"),
        ("docs/serving.md", "docs", "e2e server deploy engine kernels"),
        ("README.md", "docs", "e2e server deploy engine kernels"),
        ("scripts/bench_regression.toml", "bench-regression", "e2e server gate-kernels"),
        ("pyproject.toml", "pages scheduler docs server gate-kernels oldest", ""),
    ],
)
def test_a_change_runs_what_it_can_break(path: str, reached: str, spared: str) -> None:
    assert path in read_repository().files
    found = find_reached(path)
    assert set(reached.split()) <= found
    assert not set(spared.split()) & found


def test_every_test_has_a_target_and_only_one() -> None:
    repository = read_repository()
    homes: dict[str, list[str]] = {}
    for target in TARGETS:
        if target.name not in ("oldest", "ray"):  # tests of other targets, in another environment
            for path in {path for place in target.tests for path in repository.list_under(place)}:
                homes.setdefault(path, []).append(target.name)
    tests = [path for path in repository.files if re.fullmatch(r"tests/(.*/)?test_\w+\.py", path)]
    assert len(tests) > 200
    assert {path: homes.get(path) for path in tests if len(homes.get(path, [])) != 1} == {
        path: ["cluster", "nodes"] for path in tests if path.startswith("tests/tools/cluster/")
    }


def test_tests_of_pages_have_the_mark_and_no_others_read_them() -> None:
    repository = read_repository()
    for path in repository.files:
        if path.startswith("tests/") and path.endswith(".py") and path not in (*HOUSE, "tests/doc_pages.py"):
            reads = re.search(r"""['"]docs['"]|README(\.md)?['"]""", repository.read_code(path))
            assert not reads or "mark.docs" in repository.get_text(path) or path in NAMES_A_FOLDER, path


HOUSE = next(target.tests for target in TARGETS if target.name == "house")
NAMES_A_FOLDER = ("tests/tools/cli/test_prompts.py", "tests/core/weights/test_checkpoint.py")


def small() -> Repository:
    return Repository(
        {
            "pyproject.toml": b"",
            "jaxserve/__init__.py": b'_HOMES = {\n    "LLM": "jaxserve.engine.llm",\n}\n',
            "jaxserve/core/pages/pool.py": b"",
            "jaxserve/engine/llm.py": b"",
            "jaxserve/server/app.py": b"",
            "tests/core/pages/test_pool.py": b"import jaxserve.core.pages.pool\nfrom tests.helpers import help\n",
            "tests/core/pages/test_engine.py": b'"""See scripts/far.py."""\nfrom jaxserve import LLM\n',
            "tests/core/pages/test_all.py": b'command = ["-m", "jaxserve"]\nscript = ROOT / "scripts" / "near.py"\n',
            "tests/core/pages/test_gpu.py": b'devices = ("gpu",)\n',
            "tests/core/pages/test_page.py": b"pytestmark = pytest.mark." + b"docs\n",
            "tests/helpers.py": b"",
            "scripts/near.py": b"import beside\n",
            "scripts/beside.py": b"",
            "scripts/far.py": b"",
        }
    )


def test_inputs_are_what_a_test_imports_names_or_starts() -> None:
    target = Target("pages", ("tests/core/pages",), rooms=("jaxserve.core.pages",))
    pages, above, devices = split_target(target, small(), ("docs",))
    assert (pages.name, pages.tests) == ("pages", ("tests/core/pages/test_pool.py",))
    assert (above.name, above.tests) == (
        "pages-above",
        ("tests/core/pages/test_all.py", "tests/core/pages/test_engine.py"),
    )
    assert (devices.name, devices.tests) == ("pages-devices", ("tests/core/pages/test_gpu.py",))
    inputs = find_inputs(pages, small())
    assert {"jaxserve/core/pages/pool.py", "tests/helpers.py", "pyproject.toml"} <= inputs
    assert "jaxserve/engine/llm.py" not in inputs and "tests/core/pages/test_engine.py" not in inputs
    (engine,) = [replace(above, tests=("tests/core/pages/test_engine.py",))]
    inputs = find_inputs(engine, small())
    assert "jaxserve/engine/llm.py" in inputs
    assert not {"jaxserve/server/app.py", "scripts/far.py"} & inputs
    inputs = find_inputs(above, small())
    assert {"jaxserve/server/app.py", "scripts/near.py", "scripts/beside.py"} <= inputs
    assert "scripts/far.py" not in inputs


@pytest.mark.parametrize("changed", ["content", "command", "machine", "name"])
def test_a_digest_is_of_everything(changed: str) -> None:
    path = "jaxserve/core/pages/pool.py"

    def digest(files: Mapping[str, bytes], machine: str = "one", command: str = "test", name: str = "pages") -> str:
        return make_digest(Target(name), command, files, Repository(files), machine)

    files = {path: b"x = 1\n"}
    other = {
        "content": lambda: digest({path: b"x = 2\n"}),
        "command": lambda: digest(files, command="test-full"),
        "machine": lambda: digest(files, machine="another"),
        "name": lambda: digest({"jaxserve/core/pages/pond.py": b"x = 1\n"}),
    }
    assert digest(files) == digest(dict(files)) != other[changed]()


def test_passes_are_kept_in_the_cache_folder(tmp_path: Path) -> None:
    assert find_folder({"XDG_CACHE_HOME": str(tmp_path)}) == tmp_path / "jaxserve-ci"
    passes = Passes(tmp_path / "deep" / "folder")
    passes.forget_old()
    assert passes.find("a") is None
    passes.keep("a", "pages")
    assert passes.find("a") is not None
    (passes.folder / "b").write_text("{")
    assert passes.find("b") is None, "what was not written whole is no pass"


class FakeMake:
    """Stands for `subprocess.run`: writes what pytest would, and ends with a status."""

    def __init__(self, status: int, results: Mapping[str, bool], pytest_status: int | None) -> None:
        self.status, self.results, self.pytest_status = status, results, pytest_status

    def __call__(self, command: Sequence[str], **_: Any) -> subprocess.CompletedProcess[str]:
        (costs,) = [word.removeprefix("COSTS=") for word in command if word.startswith("COSTS=")]
        if self.pytest_status is not None:
            tests = {name: (1.0, passed) for name, passed in self.results.items()}
            Path(costs).write_text(json.dumps({"status": self.pytest_status, "tests": tests}))
        return subprocess.CompletedProcess(command, self.status)


A, B = "tests/a/test_a.py::test_one", "tests/b/test_b.py::test_two"


@pytest.mark.parametrize(
    ("status", "results", "pytest_status", "kept"),
    [
        (0, {A: True, B: True}, 0, "ab"),
        (2, {A: True, B: False}, 1, "a"),
        (2, {A: True}, 2, ""),  # interrupted: b never ran, and a perhaps not wholly
        (2, {A: True}, 1, "a"),  # b had no test that ran
        (2, {}, None, ""),  # pytest did not start
        (2, {}, 5, "ab"),  # every test has a mark that CI leaves out
    ],
)
def test_only_a_whole_pass_is_kept(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    status: int,
    results: dict[str, bool],
    pytest_status: int | None,
    kept: str,
) -> None:
    monkeypatch.setattr(run.subprocess, "run", FakeMake(status, results, pytest_status))
    passes, costs = Passes(tmp_path), Costs()
    group = [Job(Target(name, (f"tests/{name}",)), "test", f"digest-{name}") for name in "ab"]
    assert run_group(group, passes, costs) == (status == 0 or pytest_status == 5)
    assert "".join(name for name in "ab" if passes.find(f"digest-{name}")) == kept
    assert [name.strip() for name, *_ in costs.lines] == ["make test", "a", "b"]


def test_what_always_runs_is_never_kept_and_comes_last() -> None:
    for full in (False, True):
        jobs = make_jobs(read_repository(), "machine", (), full)
        groups = group_jobs(jobs)
        assert [job.target.name for job in groups[-1]] == ["house"]
        assert [job.target.name for job in jobs if not job.target.is_kept] == ["lint", "house"]
        commands = [group[0].command for group in groups]
        assert commands.count("test-full" if full else "test") == 2  # all that may be skipped, and the house


def test_commands_are_targets_of_the_makefile() -> None:
    makefile = (ROOT / "Makefile").read_text()
    names = {re.escape(command) for target in TARGETS for command in (target.ci, target.full) if command}
    patterns = [name.replace("gate\\-kernels", "gate-%").replace("gate\\-steps", "gate-%") for name in names]
    assert not [name for name in patterns if not re.search(rf"^{name}:", makefile, flags=re.M)]

"""docs/testing.md names every test file that CI leaves something out of, and every target that it speaks of exists."""

from __future__ import annotations

import re
from pathlib import Path

from scripts.ci.targets import TARGETS

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "testing.md").read_text()


def test_every_file_with_thorough_tests_is_on_the_page() -> None:
    paths = sorted(set((ROOT / "tests").rglob("test_*.py")) - {Path(__file__)})
    marked = [path for path in paths if "pytest.mark.thorough" in path.read_text()]
    assert len(marked) > 10
    assert not [path.name for path in marked if f"`{path.name}`" not in PAGE and f"/{path.name}`" not in PAGE]


def test_no_other_file_is_said_to_have_some() -> None:
    table = PAGE[PAGE.index("## What CI leaves out") : PAGE.index("## How many examples")]
    for name in re.findall(r"^\| `(tests/[\w/]+\.py)`", table, flags=re.M):
        assert "thorough" in (ROOT / name).read_text(), name


def test_targets_exist_and_ci_runs_those_that_it_is_said_to() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in set(re.findall(r"`make ([a-z-]+)`", PAGE)):
        assert re.search(rf"^{target}:", makefile, flags=re.M), target
    rows = re.findall(r"^\| `make ([a-z-]+)` \|.*\| (yes|no) \|$", PAGE, flags=re.M)
    in_ci = {
        target.ci.replace("-kernels", "").replace("-steps", "") if "gate" in target.ci else target.ci
        for target in TARGETS
        if target.ci
    }
    assert {name for name, is_in_ci in rows if is_in_ci == "yes"} == in_ci
    everything = {target.full for target in TARGETS}
    assert {"test-full", "test-server-full", "test-kernels-full", "test-oldest-full", "attack"} <= everything


def test_what_the_oldest_jax_is_to_run_exists() -> None:
    lines = re.findall(
        r"^OLDEST_TESTS \+?:?= \$\(addprefix ([\w/]+),([^)]*)\)", (ROOT / "Makefile").read_text(), flags=re.M
    )
    paths = [ROOT / folder / name.partition("::")[0] for folder, names in lines for name in names.split()]
    assert len(paths) >= 8
    assert not [path.name for path in paths if not path.exists()]

"""What is installed with this package: each dependency from a version on, and no further where that is a risk."""

from __future__ import annotations

import ast
import importlib.metadata
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from jaxserve.media.decode import PILLOW
from jaxserve.tools.cli.packages import LOAD_PACKAGES, SERVER_PACKAGES

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
REQUIREMENTS = [Requirement(text) for group in (PROJECT["dependencies"], *EXTRAS.values()) for text in group]
CAPPED = {"jax", "uvicorn", "ray"}  # one changes every month, of all we use private parts


def bounds(requirement: Requirement, *operators: str) -> list[Version]:
    return [Version(each.version) for each in requirement.specifier if each.operator in operators]


@pytest.mark.parametrize("requirement", REQUIREMENTS, ids=str)
def test_each_has_a_lower_bound_and_what_may_break_has_an_upper_one(requirement: Requirement) -> None:
    (lowest,) = bounds(requirement, ">=")
    upper = bounds(requirement, "<")
    assert len(upper) == (requirement.name in CAPPED)
    for bound in upper:  # releases below the next minor one may come out any day, and are taken
        assert bound > lowest and bound.micro == 0


@pytest.mark.parametrize("requirement", [Requirement(text) for text in PROJECT["dependencies"]], ids=str)
def test_what_is_installed_and_tested_is_what_is_asked_for(requirement: Requirement) -> None:
    if requirement.marker is None or requirement.marker.evaluate():
        assert requirement.specifier.contains(importlib.metadata.version(requirement.name), prereleases=True)


def test_a_package_is_asked_for_alike_everywhere() -> None:
    asked: dict[str, set[str]] = {}
    for requirement in REQUIREMENTS:
        asked.setdefault(requirement.name, set()).add(str(requirement.specifier))
    assert all(len(specifiers) == 1 for specifiers in asked.values()), asked


def test_what_a_command_says_to_install_is_what_is_asked_for() -> None:
    assert EXTRAS["images"] == [PILLOW]
    assert {*SERVER_PACKAGES.values(), *LOAD_PACKAGES.values()} <= set(PROJECT["dependencies"])


def test_tokenizers_and_the_hub_agree_at_their_lower_bounds() -> None:
    """tokenizers 0.22.0 wants huggingface-hub below 1.0."""
    lowest = {each.name: bounds(each, ">=")[0] for each in REQUIREMENTS}
    assert lowest["huggingface-hub"] < Version("1") or lowest["tokenizers"] >= Version("0.22.1")


def list_imports() -> set[str]:
    """Returns the dotted names of all modules that the installed packages import."""
    found: set[str] = set()
    for path in [*(ROOT / "jaxserve").rglob("*.py"), *(ROOT / "pallas_kernels").rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            found |= {node.module or ""} if isinstance(node, ast.ImportFrom) else set()
            found |= {alias.name for alias in node.names} if isinstance(node, ast.Import) else set()
    return found


def test_each_dependency_is_imported() -> None:
    imported = {".".join(name.split(".")[:depth]) for name in list_imports() for depth in (1, 2)}
    known = {name.replace(".", "_") for name in imported} | {"uvloop", "httptools"}  # uvicorn imports these two
    assert {Requirement(text).name.replace("-", "_") for text in PROJECT["dependencies"]} <= known


def test_private_parts_are_those_of_capped_packages() -> None:
    private = {name for name in list_imports() if any(part.startswith("_") for part in name.split(".")[1:])}
    assert {name.split(".")[0] for name in private} <= CAPPED

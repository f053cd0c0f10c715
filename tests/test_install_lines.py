"""No text tells a reader to install a package by this one's name: on PyPI it is somebody else's."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("jaxserve", "pallas_kernels", "configs", "docs", "scripts", "tests")
FILES = ("README.md", "Makefile", "pyproject.toml", ".ci/run")
SUFFIXES = {".md", ".py", ".sh", ".toml", ".txt", ".yaml", ".ipynb", ".html", ""}
# `install jaxserve` behind any flags and packages, or the name with extras; "jaxserve @ URL" names its own source.
BY_NAME = re.compile(
    r"""
    \b(?:pip|pip3|pipx|uv|uvx)\b[^\n|;&#]*?[\s'"]jaxserve(?=[\s'"`\[=<>~!,)]|$)(?!\S*\s*@)(?!/)
    | (?<![\w/.])jaxserve\\?\[[a-z0-9{][\w,{}]*\\?\](?!\s*@)
    """,
    re.VERBOSE,
)


def list_texts() -> Iterator[Path]:
    yield from (ROOT / name for name in FILES)
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*")):
            is_ours = path != Path(__file__) and not {"goldens", "node_modules"} & {*path.parts}
            if is_ours and path.is_file() and path.suffix in SUFFIXES:
                yield path


@pytest.mark.parametrize(
    "line",
    [
        "pip install jaxserve",
        "pip install 'jaxserve[router]'",
        "RUN /opt/bin/pip install --no-cache-dir jaxserve==1.0",
        "python -m pip install -U numpy jaxserve",
        "uv pip install jaxserve",
        "uvx jaxserve serve demo",
        "install jaxserve[tpu]",
        r"pip install 'jaxserve\[otel\]'",
        "pip install 'jaxserve[{extra}]'",
    ],
)
def test_forms_that_fetch_a_strangers_code_are_found(line: str) -> None:
    assert BY_NAME.search(line)


@pytest.mark.parametrize(
    "line",
    [
        "pip install .",
        "pip install '.[router]' in a checkout",
        "pip install 'dist/jaxserve-0.1.0-py3-none-any.whl[tpu]'",
        "pip install 'jaxserve[tpu] @ git+https://host/repository'",
        "cd jaxserve && pip install '.[cuda12]'",
        "pip install '.[router]'; jaxserve serve demo",
        "/opt/jaxserve/bin/pip install --no-deps .",
    ],
)
def test_forms_that_name_their_source_are_not(line: str) -> None:
    assert not BY_NAME.search(line)


def test_nobody_is_told_to_install_by_name() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()[:120]}"
        for path in list_texts()
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1)
        if BY_NAME.search(line)
    ]
    assert not found, "\n".join(found)


def test_the_readme_says_that_it_is_not_on_pypi() -> None:
    assert "not on PyPI" in (ROOT / "README.md").read_text()

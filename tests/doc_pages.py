"""Pages of docs/ that are code: their Python blocks, and tables that are written from the code."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from jaxserve.config import CompileOptions, EngineConfig
from tests.e2e.helpers import PROGRAMS

DOCS = Path(__file__).parents[1] / "docs"


def make_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Returns a table in Markdown."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(line)} |".replace("|  |", "| |") for line in lines).replace("| --- ", "|---")


def put_tables(page: str, tables: Mapping[str, str]) -> str:
    """Returns the page with these tables between `<!-- name -->` and `<!-- end of name -->`."""
    for name, table in tables.items():
        begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
        assert begin in page and end in page, name
        page = f"{page[: page.index(begin)]}{begin}\n{table}\n{page[page.index(end) :]}"
    return page


def compile_little(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines that are made without options for it compile what they use, streaming ones too, and share programs."""
    with_compile = EngineConfig.with_compile
    monkeypatch.setattr(EngineConfig, "with_compile", lambda config, _: with_compile(config, "used"))
    monkeypatch.setattr(CompileOptions, "cache_dir", PROGRAMS)


def run_blocks(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs a page's Python blocks one after the other, in one namespace."""
    compile_little(monkeypatch)
    space: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.S):
        exec(compile(block, str(page), "exec"), space)

"""Units stay small: a ratchet on files, functions and classes."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MAX_FILE, MAX_FUNCTION, MAX_CLASS = 400, 80, 250
FILES = sorted(p for top in ("jaxserve", "pallas_kernels", "scripts") for p in (ROOT / top).rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_units_are_small(path: Path) -> None:
    text = path.read_text()
    assert text.count("\n") <= MAX_FILE, f"{path.name} is too long"
    is_kernel = "pallas_kernels" in path.parts
    for node in ast.walk(ast.parse(text)):
        length = getattr(node, "end_lineno", 0) - getattr(node, "lineno", 0) + 1
        if isinstance(node, ast.ClassDef):
            assert length <= MAX_CLASS, f"{path.name}: class {node.name} has {length} lines"
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not is_kernel:
            assert length <= MAX_FUNCTION, f"{path.name}: {node.name} has {length} lines"

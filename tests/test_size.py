"""Units stay small: a ratchet on files, functions and classes."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MAX_FILE, MAX_FUNCTION, MAX_CLASS = 400, 80, 250
FILES = sorted(p for top in ("jaxserve", "pallas_kernels", "scripts") for p in (ROOT / top).rglob("*.py"))


def find_long_units(path: Path) -> list[str]:
    text, name = path.read_text(), path.relative_to(ROOT)
    found = [f"{name} is too long"] if text.count("\n") > MAX_FILE else []
    is_kernel = "pallas_kernels" in path.parts
    for node in ast.walk(ast.parse(text)):
        length = getattr(node, "end_lineno", 0) - getattr(node, "lineno", 0) + 1
        if isinstance(node, ast.ClassDef) and length > MAX_CLASS:
            found.append(f"{name}: class {node.name} has {length} lines")
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not is_kernel and length > MAX_FUNCTION:
            found.append(f"{name}: {node.name} has {length} lines")
    return found


def test_units_are_small() -> None:
    found = [line for path in FILES for line in find_long_units(path)]
    assert len(FILES) > 300
    assert not found, "\n".join(found)


def test_long_units_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.test_size.ROOT", tmp_path)
    file = tmp_path / "long.py"
    lines = "".join(f"    value_{number} = {number}\n" for number in range(MAX_CLASS + 1))
    file.write_text(f"class Long:\n{lines}\n\ndef run():\n{lines}")
    assert find_long_units(file) == [
        "long.py is too long",
        f"long.py: class Long has {MAX_CLASS + 2} lines",
        f"long.py: run has {MAX_CLASS + 2} lines",
    ]

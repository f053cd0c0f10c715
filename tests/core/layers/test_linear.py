"""Products with weights go through one door."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[3] / "jaxserve"
DOOR = PACKAGE / "core" / "layers" / "linear.py"
ROOMS = sorted(path for room in ("core/layers", "core/models", "families") for path in (PACKAGE / room).glob("*.py"))
# Products of tokens and states.
WITHOUT_WEIGHTS = [DOOR.with_name(f"{name}.py") for name in ("delta_rule", "ragged", "state_space")]
PRODUCTS = {"dot", "dot_general", "einsum", "matmul", "tensordot", "vdot"}


def list_products(source: str) -> list[int]:
    """Returns the lines that multiply matrices, by operator or by name."""
    lines = []
    for node in ast.walk(ast.parse(source)):
        is_operator = isinstance(node, ast.BinOp | ast.AugAssign) and isinstance(node.op, ast.MatMult)
        name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else None
        if is_operator or name in PRODUCTS:
            lines.append(node.lineno)
    return lines


@pytest.mark.parametrize("source", ["a @ b", "a @= b", "einsum('ij,jk', a, b)", "lax.dot_general(a, b)"])
def test_a_product_is_found(source: str) -> None:
    assert list_products(source) == [1]


def test_the_door_has_the_only_product() -> None:
    found = {path: list_products(path.read_text()) for path in ROOMS}
    assert len(found.pop(DOOR)) == 1 and all(map(found.pop, WITHOUT_WEIGHTS)) and len(found) > 20
    assert not any(found.values()), {path.name: lines for path, lines in found.items() if lines}

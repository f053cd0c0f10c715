"""Products with weights go through one door."""

from __future__ import annotations

import ast
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.core.layers.context import StepContext
from jaxserve.core.layers.linear import linear

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


def test_numbers_stay_between_the_bounds_of_a_product() -> None:
    """What goes in, and what comes out behind the bias; each of two products has bounds of its own."""
    rng = np.random.default_rng(0)
    x, weight = (rng.standard_normal(shape).astype(np.float32) for shape in ((5, 8), (2, 8, 3)))
    low = np.array([-1.0, -0.25], np.float32).reshape(2, 1, 1)
    leaf = {"weight": weight, "bias": np.float32([[1, 0, 0], [0, 2, 0]]), "in_range": np.float32([-0.5, 0.75])}
    found = linear(StepContext(mesh=None), leaf | {"out_range": jnp.stack([low, -low])}, jnp.asarray(x))
    expected = np.clip(x, -0.5, 0.75) @ weight + leaf["bias"][:, None]
    assert (np.abs(expected) > -low).any(axis=(1, 2)).all(), "some numbers are cut"
    np.testing.assert_allclose(found, np.clip(expected, low, -low), atol=1e-5)

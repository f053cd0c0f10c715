"""Every activation against its formula, in float64, at many points."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import erf, expit

from jaxserve.core.layers.activations import ACTIVATIONS, LEARNED

ALPHA_P, ALPHA_N, BETA, EPS = 0.19, -0.85, 0.5, -1e-6
SLOPE = 0.25


def softplus(x: np.ndarray | float) -> np.ndarray:
    return np.logaddexp(0.0, x)


def gelu(x: np.ndarray) -> np.ndarray:
    return x * (1.0 + erf(x / np.sqrt(2.0))) / 2.0


def gelu_tanh(x: np.ndarray) -> np.ndarray:
    return 0.5 * x * (1.0 + np.tanh(np.sqrt(2.0 / np.pi) * (x + 0.044715 * x**3)))


def silu(x: np.ndarray) -> np.ndarray:
    return x * expit(x)


def xielu(x: np.ndarray) -> np.ndarray:
    above = softplus(ALPHA_P) * x**2 + BETA * x
    below = (np.expm1(np.minimum(x, EPS)) - x) * (BETA + softplus(ALPHA_N)) + BETA * x
    return np.where(x > 0, above, below)


FORMULAS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "gelu": gelu,
    "gelu_10": lambda x: np.clip(gelu(x), -10, 10),
    "gelu_accurate": gelu_tanh,
    "gelu_fast": gelu_tanh,
    "gelu_new": gelu_tanh,
    "gelu_python": gelu,
    "gelu_python_tanh": gelu_tanh,
    "gelu_pytorch_tanh": gelu_tanh,
    "hardswish": lambda x: x * np.clip(x + 3, 0, 6) / 6,
    "laplace": lambda x: 0.5 * (1 + erf((x - 0.707107) / (0.282095 * np.sqrt(2)))),
    "leaky_relu": lambda x: np.where(x > 0, x, 0.01 * x),
    "linear": lambda x: x,
    "mish": lambda x: x * np.tanh(softplus(x)),
    "prelu": lambda x: np.where(x > 0, x, SLOPE * x),
    "quick_gelu": lambda x: x * expit(1.702 * x),
    "relu": lambda x: np.maximum(x, 0),
    "relu2": lambda x: np.maximum(x, 0) ** 2,
    "relu6": lambda x: np.clip(x, 0, 6),
    "sigmoid": expit,
    "silu": silu,
    "sqrtsoftplus": lambda x: np.sqrt(softplus(x)),
    "swish": silu,
    "tanh": np.tanh,
    "xielu": xielu,
}
PARAMETERS = {"prelu": [SLOPE], "xielu": [ALPHA_P, ALPHA_N, BETA, EPS]}
POINTS = np.concatenate([np.linspace(-30, 30, 6001), [-1e-3, -1e-6, -0.0, 0.0, 1e-6, 1e-3]]).astype(np.float32)


def test_every_activation_has_a_formula_here():
    assert set(FORMULAS) == set(ACTIVATIONS)
    assert {name: len(values) for name, values in PARAMETERS.items()} == {
        name: len(shapes) for name, shapes in LEARNED.items()
    }


@pytest.mark.parametrize("name", FORMULAS)
def test_values(name: str):
    learned = jnp.asarray(PARAMETERS.get(name, []), jnp.float32)
    got = jax.jit(lambda x: ACTIVATIONS[name](x, *learned))(POINTS)
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, FORMULAS[name](POINTS.astype(np.float64)), rtol=2e-6, atol=2e-6)


def test_the_two_gelus_differ():
    assert np.abs(ACTIVATIONS["gelu"](POINTS) - ACTIVATIONS["gelu_new"](POINTS)).max() > 1e-4

"""The activations that Hugging Face transformers knows, by their names in config.json.

Each maps a float32 array to one of the same shape. Those in LEARNED also take parameters of the layer, one scalar each.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

Wide = Float[Array, "*shape"]
Scalar = Float[Array, ""]

LEARNED: Mapping[str, Mapping[str, tuple[int, ...]]] = {
    "prelu": {"weight": (1,)},
    "xielu": {"alpha_p": (1,), "alpha_n": (1,), "beta": (), "eps": ()},
}
"""Activations with parameters: their names in a checkpoint, in the order of the function, and their shapes there."""


def _gelu_exact(x: Wide) -> Wide:
    return jax.nn.gelu(x, approximate=False)


def _gelu_tanh(x: Wide) -> Wide:
    return jax.nn.gelu(x, approximate=True)


def _laplace(x: Wide) -> Wide:
    """The distribution function of a normal distribution that resembles the squared ReLU (Ma et al. 2022)."""
    return 0.5 * (1.0 + lax.erf((x - 0.707107) / (0.282095 * math.sqrt(2.0))))


def _prelu(x: Wide, weight: Scalar) -> Wide:
    return jnp.where(x > 0, x, weight * x)


def _xielu(x: Wide, alpha_p: Scalar, alpha_n: Scalar, beta: Scalar, eps: Scalar) -> Wide:
    """Huang and Schlag 2024: a parabola above zero, the integral of an ELU below; `eps` keeps expm1 off zero."""
    above = jax.nn.softplus(alpha_p) * x * x
    below = (beta + jax.nn.softplus(alpha_n)) * (jnp.expm1(jnp.minimum(x, eps)) - x)
    return jnp.where(x > 0, above, below) + beta * x


ACTIVATIONS: Mapping[str, Callable[..., Wide]] = {
    "gelu": _gelu_exact,
    "gelu_10": lambda x: jnp.clip(_gelu_exact(x), -10.0, 10.0),
    "gelu_accurate": _gelu_tanh,
    "gelu_fast": _gelu_tanh,
    "gelu_new": _gelu_tanh,
    "gelu_python": _gelu_exact,
    "gelu_python_tanh": _gelu_tanh,
    "gelu_pytorch_tanh": _gelu_tanh,
    "hardswish": jax.nn.hard_swish,
    "laplace": _laplace,
    "leaky_relu": jax.nn.leaky_relu,
    "linear": lambda x: x,
    "mish": jax.nn.mish,
    "prelu": _prelu,
    "quick_gelu": lambda x: x * jax.nn.sigmoid(1.702 * x),
    "relu": jax.nn.relu,
    "relu2": lambda x: jnp.square(jax.nn.relu(x)),
    "relu6": jax.nn.relu6,
    "sigmoid": jax.nn.sigmoid,
    "silu": jax.nn.silu,
    "sqrtsoftplus": lambda x: jnp.sqrt(jax.nn.softplus(x)),
    "swish": jax.nn.silu,
    "tanh": jnp.tanh,
    "xielu": _xielu,
}

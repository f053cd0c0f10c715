"""What `update_weights` accepts: exactly the model's parameters, in any of three forms."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxserve.core.weights import check_update
from jaxserve.core.weights.paths import flatten_specs, unflatten
from jaxserve.errors import WeightsError
from tests.core.weights.checkpoints import BF16, D, expected_params, make_specs, make_tensors

SPECS = make_specs()


def flat_params() -> dict[str, np.ndarray]:
    return expected_params(make_tensors())


def assert_accepted(new_params: Any, leaves: dict[str, Any]) -> None:
    checked = check_update(SPECS, new_params)
    assert list(checked) == list(flatten_specs(SPECS)[0])
    assert all(checked[name] is leaf for name, leaf in leaves.items())


def test_forms() -> None:
    flat = flat_params()
    nested = unflatten(SPECS, flat)
    assert_accepted(nested, flat)
    assert_accepted(dict(reversed(flat.items())), flat)
    assert_accepted({**nested, "layers": tuple(nested["layers"])}, flat)
    assert_accepted({**nested, "layers": dict(enumerate(nested["layers"]))}, flat)
    assert_accepted({**nested, "layers": {str(i): layer for i, layer in enumerate(nested["layers"])}}, flat)
    mixed = {"embed": flat["embed"], "final_norm": flat["final_norm"], "layers.0": nested["layers"][0]}
    assert_accepted(mixed | {name: leaf for name, leaf in flat.items() if name.startswith("layers.1.")}, flat)


def test_other_float_dtypes_and_jax_arrays() -> None:
    flat = flat_params()
    flat["embed"] = jnp.asarray(flat["embed"], jnp.bfloat16)
    flat["final_norm"] = flat["final_norm"].astype(np.float16)
    flat["layers.0.norm"] = flat["layers.0.norm"].astype(BF16)
    assert_accepted(flat, flat)


class Layer(nnx.Module):
    def __init__(self, values: dict[str, Any]) -> None:
        for name, value in values.items():
            setattr(self, name, nnx.Param(jnp.asarray(value)))


class Model(nnx.Module):
    def __init__(self, tree: dict[str, Any], *, dropout: bool = False) -> None:
        self.embed = nnx.Param(jnp.asarray(tree["embed"]))
        self.final_norm = nnx.Param(jnp.asarray(tree["final_norm"]))
        self.layers = nnx.List([Layer(layer) for layer in tree["layers"]])
        if dropout:
            self.dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(0))


def test_nnx_state() -> None:
    flat = flat_params()
    module = Model(unflatten(SPECS, flat), dropout=True)
    checked = check_update(SPECS, nnx.state(module, nnx.Param))
    for name, value in flat.items():
        assert isinstance(checked[name], jax.Array)
        np.testing.assert_array_equal(checked[name], value, err_msg=name)
    with pytest.raises(WeightsError, match=r"hold \d .*'dropout"):
        check_update(SPECS, nnx.state(module))
    with pytest.raises(WeightsError, match=r"pass nnx\.state"):
        check_update(SPECS, module)


def without(*names: str) -> dict[str, Any]:
    return {name: leaf for name, leaf in flat_params().items() if name not in names}


def deleted() -> jax.Array:
    array = jnp.ones(D)
    array.delete()
    return array


@pytest.mark.parametrize(
    ("new_params", "message"),
    [
        (without("embed"), r"lack 1 of 8 parameters: 'embed'"),
        (without("embed") | {"embedding": np.ones(1)}, r"lack 1 of 8 .*'embed', and hold 1 .* 'embedding'"),
        ({}, r"lack 8 of 8 parameters: .* and 4 more"),
        (None, r"lack 8 of 8"),
        (flat_params() | {"layers": [{"norm": np.ones(D)}]}, r"layers\.0\.norm: is given twice"),
        (flat_params() | {"layers.2.norm": np.ones(D)}, r"hold 1 .*'layers\.2\.norm'"),
        (flat_params() | {"layers": []}, None),
        (without() | {"embed": [1.0]}, r"lack 1 .*'embed'"),
        (without() | {"embed": 1.0}, r"embed: .*not float"),
        (without() | {"embed": None}, r"embed: .*not NoneType"),
        (without() | {"final_norm": np.ones(D + 1, np.float32)}, r"final_norm: has shape \(9,\), .* needs \(8,\)"),
        (without() | {"final_norm": np.ones(D)}, r"final_norm: has dtype float64"),
        (without() | {"final_norm": np.ones(D, np.int32)}, r"final_norm: has dtype int32"),
        (without() | {"final_norm": deleted()}, r"final_norm: is a deleted array"),
        (without() | {(1, 2): np.ones(D)}, r"key \(1, 2\)"),
    ],
)
def test_refusals(new_params: Any, message: str | None) -> None:
    if message is None:
        check_update(SPECS, new_params)
        return
    with pytest.raises(WeightsError, match=message):
        check_update(SPECS, new_params)

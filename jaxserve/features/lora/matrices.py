"""The matrices of a model that adapters may change, and the modules that each is made of."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from jaxserve.core.layers.adapters import adapter_axes
from jaxserve.core.layers.linear import PROJECTIONS
from jaxserve.core.models.base import DecoderConfig, ParamSpec, WeightSource
from jaxserve.errors import ConfigError, shorten
from jaxserve.families.registry import FAMILIES, list_params

_WEIGHT = ".weight"
_TEXT_LAYERS = tuple(
    f"{module}layers" for module in ("", "model.", "language_model.", "model.language_model.", "language_model.model.")
)
"""Names of the layers of one and the same text model: alone, with a head, and in a model that sees images."""


@dataclass(frozen=True)
class AdaptedMatrix:
    """A matrix [..., in, out] of a layer. `modules` are the places, among those that it is made of, of the adapted."""

    layer: int
    path: tuple[str, ...]  # of its leaf
    spec: ParamSpec
    source: WeightSource
    modules: tuple[int, ...]

    def bank_specs(self, num_slots: int, rank: int, dtype: str) -> dict[str, ParamSpec]:
        """Returns the adapters of all slots: `a` [in, slots * n * rank] and `b` [..., slots * n * rank, out]."""
        *lead, width, out = self.spec.shape
        inner, axes = num_slots * len(self.modules) * rank, adapter_axes(self.spec.axes)
        return {
            "a": ParamSpec((width, inner), dtype, axes["a"], "zeros"),
            "b": ParamSpec((*lead, inner, out), dtype, axes["b"], "zeros"),
        }


def list_matrices(config: DecoderConfig, targets: tuple[str, ...] = ()) -> list[AdaptedMatrix]:
    """Returns the matrices with a module that adapters may change.

    Args:
        config: without quantization.
        targets: the ends of the names of these modules; empty: every module.

    Raises:
        ConfigError: no module has one of these names.
    """
    found, missing, known = [], set(targets), set[str]()
    for name, parameter in list_params(config).items():
        top, *path = name.split(".")
        if top != "layers" or path[-1] != "weight" or path[-2] not in PROJECTIONS or "experts" in path:
            continue
        layer, modules = int(path[0]), []
        for place, tensor in enumerate(parameter.source.names):
            known.add(tensor.removesuffix(_WEIGHT).split(".")[-1])
            names = [target for target in targets if f".{tensor}".endswith(f".{target}{_WEIGHT}")]
            missing -= set(names)
            if names or not targets:
                modules.append(place)
        if modules:
            leaf = tuple(path[1:-1])
            found.append(AdaptedMatrix(layer, leaf, parameter.spec, parameter.source, tuple(modules)))
    if missing:
        name = min(missing)
        message = f"{shorten(name)} is no module of the model that adapters can change"
        raise ConfigError(f"{message}; some are {', '.join(sorted(known))}", field="lora_target_modules", value=name)
    return found


def list_modules(config: DecoderConfig, matrix: AdaptedMatrix) -> tuple[list[str], ...]:
    """Returns, for each form of files, the names of the matrix' modules below its layer ("self_attn.q_proj")."""
    prefix, forms = f"{FAMILIES[config.family].trunk.layers}.{matrix.layer}.", []
    form: WeightSource | None = matrix.source
    while form is not None:
        if all(name.startswith(prefix) for name in form.names):
            forms.append([name.removeprefix(prefix).removesuffix(_WEIGHT) for name in form.names])
        form = form.otherwise
    return tuple(forms)


def list_layer_names(config: DecoderConfig) -> tuple[str, ...]:
    """Returns the names that the list of layers has in the models whose text model this is."""
    own = FAMILIES[config.family].trunk.layers
    return _TEXT_LAYERS if own in _TEXT_LAYERS else (own, own.partition(".")[2])


def nest(config: DecoderConfig, leaves: Iterator[tuple[AdaptedMatrix, Any]]) -> dict[str, Any]:
    """Returns a canonical tree of values of matrices."""
    layers: list[dict[str, Any]] = [{} for _ in range(config.num_layers)]
    for matrix, value in leaves:
        node = layers[matrix.layer]
        for key in matrix.path[:-1]:
            node = node.setdefault(key, {})
        node[matrix.path[-1]] = value
    return {"layers": layers}


def join(leaves: Mapping[str, Any], bank: Mapping[str, Any], own: Any) -> dict[str, Any]:
    """Returns a layer's leaves with the adapters of those that the bank has."""
    joined = dict(leaves)
    for name, each in bank.items():
        is_matrix = "a" in each and "b" in each
        joined[name] = (
            {**leaves[name], "adapters": {**each, "own": own}} if is_matrix else join(leaves[name], each, own)
        )
    return joined

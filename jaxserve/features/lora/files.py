"""Reads an adapter in PEFT's format, as what one slot of the bank holds."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from jaxserve.core.models.base import DecoderConfig
from jaxserve.core.weights.reader import LOADABLE_DTYPES, SafetensorsCheckpoint, open_safetensors
from jaxserve.errors import WeightsError, shorten
from jaxserve.families.registry import ignored_weights
from jaxserve.features.lora.matrices import AdaptedMatrix, list_layer_names, list_matrices, list_modules
from jaxserve.features.lora.peft_config import read_peft_config
from jaxserve.lora_options import LORA_RANKS

ADAPTER_FILE, _PICKLE = "adapter_model.safetensors", "adapter_model.bin"
_ROOT = "base_model.model."
_TENSOR = re.compile(r"(?P<module>.+)\.lora_(?P<side>[AB])\.weight")
_KINDS: Mapping[str, str] = {
    "lora_embedding_": "adapters of embeddings are not served",
    "lora_magnitude_vector": "weight-decomposed adapters (DoRA) are not served",
    "experts": "adapters of routed experts are not served",
    "router": "adapters of routers are not served",
    ".gate.": "adapters of routers are not served",
    "shared_expert_gate": "adapters of a shared expert's gate are not served",
    "kv_b_proj": "its matrix is absorbed into those around it, so it cannot have an adapter",
    "embed": "adapters of embeddings are not served",
    "lm_head": "adapters of heads are not served",
}
Slot = dict[str, np.ndarray]
"""What a slot holds of a matrix of n modules: `a` [in, n * rank] and `b` [..., n * rank, out]."""


class AdapterFiles:
    """The files of one adapter, checked against a model before anything is read."""

    def __init__(self, folder: Path, config: DecoderConfig, matrices: list[AdaptedMatrix], max_rank: int) -> None:
        """Opens the files.

        Raises:
            ConfigError: adapter_config.json is missing or malformed, or says what is not served.
            WeightsError: a tensor is missing, doubled, of another shape or not one of the model's, or the rank is too
                large; names it.
        """
        self._peft, self._tensors = read_peft_config(folder), _open_tensors(folder)
        self._config, self._matrices, self._max_rank = config, matrices, max_rank
        self._prefix = ""
        self._modules = self._find_modules()
        self._check()

    def read(self, dtype: np.dtype) -> Iterator[tuple[AdaptedMatrix, Slot]]:
        """Yields what a slot holds of each matrix, zeros where the adapter has none; WeightsError: it is not finite."""
        for matrix in self._matrices:
            yield matrix, self._build(matrix, dtype)

    def _find_modules(self) -> dict[str, str]:
        """Returns the name in the files of each adapted module, by its name from its layer on ("0.mlp.up_proj")."""
        found: dict[str, str] = {}
        names = sorted(list_layer_names(self._config), key=len, reverse=True)
        ignored = [re.compile(pattern) for pattern in ignored_weights(self._config)]
        known = {
            f"{matrix.layer}.{module}"
            for matrix in list_matrices(self._config)
            for form in list_modules(self._config, matrix)
            for module in form
        }
        for name in sorted(self._tensors.names):
            match = _TENSOR.fullmatch(name.removeprefix(_ROOT)) if name.startswith(_ROOT) else None
            module = name if match is None else match["module"]
            prefix = next((each for each in names if module.startswith(f"{each}.")), None)
            if match is None or prefix is None:
                raise self._refuse(name, _describe(name))
            place = module[len(prefix) + 1 :]
            weights = [f"{each}.{place}.weight" for each in names]
            if place not in known and any(pattern.fullmatch(weight) for pattern in ignored for weight in weights):
                continue  # it changes nothing: the model does not use the module
            if found.setdefault(place, module) != module:
                raise self._refuse(name, f"stands beside {shorten(found[place])}, which is the same module")
            self._prefix = prefix
        return found

    def _check(self) -> None:
        left = dict(self._modules)
        shapes = ((matrix, place, name) for matrix in self._matrices for place, name in self._list_places(matrix))
        for matrix, place, name in shapes:
            module = left.pop(name, None)
            if module is not None:
                self._check_module(module, matrix.source.shapes[place])
            elif self._peft.targets_module(f"{self._prefix}.{name}"):
                raise self._refuse(f"{_ROOT}{self._prefix}.{name}.lora_A.weight", "is missing, by target_modules")
        if left:
            module = min(left.values())
            raise self._refuse(f"{_ROOT}{module}", _describe(module))
        if not self._modules:
            raise WeightsError("has no matrices for any module of this model", field=str(self._tensors.path))

    def _list_places(self, matrix: AdaptedMatrix) -> list[tuple[int, str]]:
        """Returns the place of each of a matrix' modules, and its name, in the form that the files have."""
        forms = [[f"{matrix.layer}.{name}" for name in form] for form in list_modules(self._config, matrix)]
        form = next((form for form in forms if not self._modules.keys().isdisjoint(form)), forms[0])
        return [(place, form[place]) for place in matrix.modules]

    def _check_module(self, module: str, shape: tuple[int, ...]) -> None:
        """Checks the two tensors of a module whose weight has a shape [out, in]."""
        rank, (rows, columns) = self._peft.find_rank(module), shape
        if rank > self._max_rank:
            fits = next((each for each in LORA_RANKS if each >= rank), None)
            fits = f"max_lora_rank={fits} would fit" if fits else f"none above {LORA_RANKS[-1]} is served"
            raise self._refuse(f"{_ROOT}{module}", f"has rank {rank}, above max_lora_rank={self._max_rank}; {fits}")
        for side, wanted in (("A", (rank, columns)), ("B", (rows, rank))):
            name = f"{_ROOT}{module}.lora_{side}.weight"
            if name not in self._tensors.names:
                raise self._refuse(name, "is missing")
            if self._tensors.shape(name) != wanted:
                raise self._refuse(name, f"must have shape {list(wanted)}, got {list(self._tensors.shape(name))}")
            if (kind := self._tensors.dtype_name(name)) not in LOADABLE_DTYPES:
                raise self._refuse(name, f"must be one of {', '.join(LOADABLE_DTYPES)}, got {kind}")

    def _build(self, matrix: AdaptedMatrix, dtype: np.dtype) -> Slot:
        """Returns A and B of a matrix.

        The family's function that fuses its modules gets B [out, n * rank] of each in the place of a weight [out, in],
        in columns of the module's own. It moves the rows of either in the same way.
        """
        width, count, rank = matrix.spec.shape[-2], len(matrix.modules), self._max_rank
        a = np.zeros((width, count, rank), np.float32)
        parts = [np.zeros((rows, count, rank), np.float32) for rows, _ in matrix.source.shapes]
        for column, (place, name) in enumerate(self._list_places(matrix)):
            module = self._modules.get(name)
            if module is not None:
                down, up = (self._read(f"{_ROOT}{module}.lora_{side}.weight") for side in "AB")
                a[:, column, : len(down)] = down.T
                parts[place][:, column, : len(down)] = np.float32(self._peft.find_scale(module)) * up
        built = matrix.source.build(*(part.reshape(len(part), -1) for part in parts))
        b = built[(slice(None),) * len(built.shape)]
        slot = {"a": a.reshape(width, -1).astype(dtype), "b": np.ascontiguousarray(b).astype(dtype)}
        if not all(np.isfinite(each.astype(np.float32)).all() for each in slot.values()):
            name = ".".join(matrix.path)
            raise self._refuse(f"layer {matrix.layer}", f"its {name} is not finite as {dtype.name}")
        return slot

    def _read(self, name: str) -> np.ndarray:
        tensor = self._tensors.read(name).astype(np.float32)
        if not np.isfinite(tensor).all():
            raise self._refuse(name, "has values that are not finite")
        return tensor

    def _refuse(self, name: str, reason: str) -> WeightsError:
        return WeightsError(f"{shorten(name)} {reason}", field=str(self._tensors.path), value=name)


def _open_tensors(folder: Path) -> SafetensorsCheckpoint:
    file = folder / ADAPTER_FILE
    if not file.is_file():
        pickled = f"; {_PICKLE} is a pickle, which is never opened" if (folder / _PICKLE).exists() else ""
        raise WeightsError(f"there is no {ADAPTER_FILE}{pickled}", field=str(folder))
    return open_safetensors(file)


def _describe(name: str) -> str:
    """Returns why a module cannot have an adapter."""
    reason = next((reason for part, reason in _KINDS.items() if part in f"{name}."), None)
    return f"is not served: {reason}" if reason else "is no module of this model that an adapter can change"

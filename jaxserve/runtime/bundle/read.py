"""Loads the programs of a bundle, where they are exactly those that would be compiled."""

from __future__ import annotations

import hashlib
import pickle
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
from jax.experimental import serialize_executable
from jax.sharding import Mesh

from jaxserve.errors import ConfigError, shorten
from jaxserve.runtime.bundle.manifest import describe_target, identify, read_manifest, read_program
from jaxserve.runtime.identity import find_any_difference
from jaxserve.runtime.memory import DeviceUse
from jaxserve.runtime.shapes import Shapes


class Bundle:
    """A bundle for this engine, on these devices."""

    def __init__(self, folder: Path, shapes: Shapes, mesh: Mesh) -> None:
        """Raises ConfigError if the directory is no bundle, or one for something else; the message names what."""
        if shapes.processor is not None:
            message = "a bundle has no program with a logits processor; leave one of the two out"
            raise ConfigError(message, field="bundle", value=str(folder))
        self._folder, self._manifest = folder, read_manifest(folder)
        self._devices = list(mesh.devices.flat)
        _require_same(self._manifest.facts, describe_target(shapes, mesh), folder)

    @property
    def digest(self) -> str:
        """Tells bundles apart."""
        return hashlib.sha256(self._manifest.to_json().encode()).hexdigest()

    @property
    def num_pages(self) -> tuple[int, ...]:
        """The pages of each KV group, for which the programs were compiled."""
        return self._manifest.num_pages

    @property
    def use(self) -> DeviceUse | None:
        """Bytes of a device that the programs take; None on CPU."""
        return None if self._manifest.use is None else DeviceUse(**self._manifest.use)

    def load(self, kind: str, key: Any) -> Any:
        """Returns a compiled program, as `ProgramCompiler.compile` does; ConfigError if its file is not as it was."""
        file = self._manifest.programs.get(identify((kind, key)))
        if file is None:
            message = f"{self._folder} has no program {identify((kind, key))}; build it again"
            raise ConfigError(message, field="bundle", value=str(self._folder))
        payload, skeletons = pickle.loads(zlib.decompress(read_program(self._folder, file)))
        trees = [jax.tree.structure(skeleton) for skeleton in skeletons]
        return serialize_executable.deserialize_and_load(payload, *trees, execution_devices=self._devices)


def _require_same(stored: Mapping[str, Any], here: Mapping[str, Any], folder: Path) -> None:
    found = find_any_difference(stored, here)
    if found is None:
        return
    name, there, this = found
    message = (
        f"{folder} was built with {name} {shorten(there)}, and here it is {shorten(this)}; "
        "build it again for this engine, or start with what it was built for"
    )
    raise ConfigError(message, field="bundle", value=str(folder))

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

from jaxserve.core.runtime.identity import find_any_difference
from jaxserve.core.runtime.memory import DeviceUse
from jaxserve.core.runtime.shapes import Shapes
from jaxserve.errors import ConfigError, shorten
from jaxserve.features.bundle.manifest import describe_target, identify, read_file, read_manifest
from pallas_kernels.cpu.library import digest, load_content


class Bundle:
    """A bundle on these devices."""

    def __init__(self, folder: Path, mesh: Mesh) -> None:
        """Loads the CPU kernels of the bundle, if they are for this processor.

        Raises ConfigError if the directory is no bundle.
        """
        self._folder, self._manifest, self._mesh = folder, read_manifest(folder), mesh
        library = self._manifest.library
        if library is not None and self._manifest.facts.get("cpu") == digest():
            load_content(read_file(folder, library))

    @property
    def is_tested(self) -> bool:
        """Whether its kernels passed their self-test where it was built."""
        return self._manifest.tested

    def require(self, shapes: Shapes) -> None:
        """Raises ConfigError if it is for something else than this engine; the message names what."""
        if shapes.processor is not None:
            message = "a bundle has no program with a logits processor; leave one of the two out"
            raise ConfigError(message, field="bundle", value=str(self._folder))
        _require_same(self._manifest.facts, describe_target(shapes, self._mesh), self._folder)

    @property
    def digest(self) -> str:
        """Tells bundles apart."""
        return hashlib.sha256(self._manifest.to_json().encode()).hexdigest()

    @property
    def num_pages(self) -> tuple[int, ...]:
        """The pages of each KV group, for which the programs were compiled."""
        return self._manifest.num_pages

    @property
    def num_snapshots(self) -> int:
        """Those of recurrent states, likewise."""
        return self._manifest.num_snapshots

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
        payload, skeletons = pickle.loads(zlib.decompress(read_file(self._folder, file)))
        trees = [jax.tree.structure(skeleton) for skeleton in skeletons]
        return serialize_executable.deserialize_and_load(
            payload, *trees, execution_devices=list(self._mesh.devices.flat)
        )


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

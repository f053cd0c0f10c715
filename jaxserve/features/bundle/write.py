"""Compiles every program of an engine and writes them as a bundle."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import pickle
import shutil
import tempfile
import threading
import zlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
from jax.experimental import serialize_executable

from jaxserve.core.runtime.compile import Progress, compile_programs
from jaxserve.core.runtime.memory import CachePlan, DeviceUse
from jaxserve.core.runtime.shapes import Shapes
from jaxserve.core.runtime.step_programs import ProgramKey
from jaxserve.errors import ConfigError
from jaxserve.features.bundle.manifest import MANIFEST, BundleFile, Manifest, identify
from pallas_kernels.cpu.library import read_content

_LIBRARY = "cpu-kernels.so"


def write_bundle(
    folder: Path,
    facts: Mapping[str, Any],
    shapes: Shapes,
    plan: CachePlan,
    use: DeviceUse | None,
    make: Callable[[str, Any], Any],
    wanted: Iterable[ProgramKey],
    *,
    tested: bool,
    progress: Progress | None = None,
) -> Manifest:
    """Compiles `wanted` programs by `make` and writes them to a new directory; it is there whole, or not at all.

    Args:
        facts: `describe_target` of the engine.
        use: bytes of a device that the programs take; None on CPU.
        tested: the kernels passed their self-test on a device of this kind.

    Raises:
        ConfigError: the directory exists, or cannot be made.
    """
    refuse_target(folder)
    scratch = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    files: dict[str, BundleFile] = {}
    lock = threading.Lock()

    def write(kind: str, key: Any) -> None:
        # At once: on a CPU, a program with a sort cannot be serialized any more after its first run.
        data = serialize(make(kind, key))
        with lock:
            name = f"{len(files):03}-{kind}.bin"
            files[identify((kind, key))] = _describe(name, data)
        (scratch / name).write_bytes(data)

    try:
        compile_programs(write, wanted, threads=shapes.config.compile.compile_threads, progress=progress)
        described = None if use is None else dataclasses.asdict(use)
        library = read_content() if shapes.platform == "cpu" else None
        if library is not None:
            (scratch / _LIBRARY).write_bytes(library)
        manifest = Manifest(
            facts,
            tuple(plan.num_pages),
            plan.num_snapshots,
            described,
            dict(sorted(files.items())),
            None if library is None else _describe(_LIBRARY, library),
            tested,
        )
        (scratch / MANIFEST).write_text(manifest.to_json())
        for path in (scratch, *scratch.iterdir()):
            path.chmod(0o755 if path.is_dir() else 0o644)
        os.rename(scratch, folder)
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise
    return manifest


def _describe(name: str, data: bytes) -> BundleFile:
    return BundleFile(name, hashlib.sha256(data).hexdigest(), len(data))


def refuse_target(folder: Path) -> None:
    """Raises ConfigError where a bundle cannot be made: the directory is there already, or its parent is not."""
    if os.path.lexists(folder):
        message = f"{folder} exists, and no bundle is overwritten; remove it, or give another name"
        raise ConfigError(message, field="output", value=str(folder))
    if not folder.parent.is_dir() or not os.access(folder.parent, os.W_OK | os.X_OK):
        message = f"{folder} cannot be made: {folder.parent} is not a directory that this user may write to"
        raise ConfigError(message, field="output", value=str(folder))


def serialize(program: Any) -> bytes:
    """Returns a compiled program as bytes, with the trees of its arguments and results.

    JAX's trees of dataclasses cannot be pickled. Dataclasses can: they are filled with the numbers of their leaves.
    """
    payload, *trees = serialize_executable.serialize(program)
    skeletons = [jax.tree.unflatten(tree, range(tree.num_leaves)) for tree in trees]
    return zlib.compress(pickle.dumps((payload, skeletons)), level=1)  # a quarter of the bytes

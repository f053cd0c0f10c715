"""Loads the tower of a model that reads images from the model's own checkpoint."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from jax.sharding import Mesh

from jaxserve.core.models.tower import TowerConfig
from jaxserve.core.sharding import AxisRules
from jaxserve.core.weights.load import Progress, stream_pieces
from jaxserve.core.weights.paths import unflatten
from jaxserve.core.weights.reader import LOADABLE_DTYPES, open_checkpoint
from jaxserve.errors import WeightsError
from jaxserve.families.towers import find_tower, tower_param_specs


def load_tower(
    config: TowerConfig,
    path: Path,
    *,
    mesh: Mesh,
    rules: AxisRules,
    progress: Progress | None = None,
    allow_nonfinite: bool = False,
) -> Any:
    """Returns the tower's parameters as the tree of `tower_param_specs`, sharded over `mesh`.

    Raises WeightsError as `load_safetensors` does, for the tensors of the tower alone, and for a tower with quantized
    tensors.
    """
    tower = find_tower(config)
    sources = {name: parameter.source for name, parameter in tower.table(config).items()}
    _refuse_quantized(path, tuple(f"{module}." for module in tower.modules))
    others = rf"(?!(?:{'|'.join(map(re.escape, tower.modules))})\.).*"
    specs = tower_param_specs(config)
    options = {"mesh": mesh, "rules": rules, "progress": progress, "allow_nonfinite": allow_nonfinite}
    pieces = stream_pieces(path, specs, sources, (others,), whole=True, is_shared=True, **options)
    return unflatten(specs, {piece.name: piece.array for piece in pieces})


def _refuse_quantized(path: Path, prefixes: tuple[str, ...]) -> None:
    """Raises WeightsError for a tensor of the tower that holds no plain numbers."""
    checkpoint = open_checkpoint(path)
    for name in sorted(checkpoint.names):
        dtype = checkpoint.dtype_name(name)
        if name.startswith(prefixes) and dtype not in LOADABLE_DTYPES:
            known = ", ".join(sorted(LOADABLE_DTYPES))
            message = f"is stored as {dtype}, and quantized towers are not read: only those of {known}"
            raise WeightsError(message, field=name, value=dtype)

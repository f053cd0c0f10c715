"""Writes checkpoints in safetensors, one file of some gigabytes after the other."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxserve.core.weights.file_formats import INDEX_FILE, SINGLE_FILE, has_weights
from jaxserve.errors import WeightsError

_CONFIG = "config.json"
MAX_FILE_BYTES = 4 * 2**30


def refuse_target(folder: Path) -> None:
    """Raises WeightsError for a directory that holds weights already, or something in its place."""
    if folder.exists() and (not folder.is_dir() or has_weights(folder)):
        raise WeightsError("already exists; choose another directory, or remove it first", field=str(folder))


def write_checkpoint(
    folder: Path,
    tensors: Iterable[tuple[str, np.ndarray]],
    hf_config: Mapping[str, Any],
    *,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> int:
    """Writes config.json, then tensors as they come, to a directory; returns the bytes of all tensors.

    Raises WeightsError if it cannot be written.
    """
    refuse_target(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / _CONFIG).write_text(json.dumps(dict(hf_config), indent=2) + "\n", encoding="utf-8")
        return _write_files(folder, tensors, max_file_bytes)
    except OSError as error:
        raise WeightsError(f"cannot be written: {error}", field=str(folder)) from error


def _write_files(folder: Path, tensors: Iterable[tuple[str, np.ndarray]], max_file_bytes: int) -> int:
    from safetensors.numpy import save_file

    files: list[list[str]] = []
    waiting: dict[str, np.ndarray] = {}
    total = size = 0

    def flush() -> None:
        file = folder / _name_part(len(files))
        save_file(waiting, file, {"format": "np"})
        file.chmod((folder / _CONFIG).stat().st_mode)  # safetensors lets nobody else read it
        files.append(list(waiting))
        waiting.clear()

    for name, tensor in tensors:
        if waiting and size + tensor.nbytes > max_file_bytes:
            flush()
            size = 0
        waiting[name] = np.ascontiguousarray(tensor)
        size, total = size + tensor.nbytes, total + tensor.nbytes
    flush()
    _name_files(folder, files, total)
    return total


def _name_part(index: int) -> str:
    return f"part-{index}.safetensors"


def _name_files(folder: Path, files: list[list[str]], total: int) -> None:
    """Gives the files their final names, which count them all, and writes the index of several."""
    if len(files) == 1:
        (folder / _name_part(0)).rename(folder / SINGLE_FILE)
        return
    weight_map = {}
    for index, names in enumerate(files):
        file = f"model-{index + 1:05d}-of-{len(files):05d}.safetensors"
        (folder / _name_part(index)).rename(folder / file)
        weight_map |= dict.fromkeys(names, file)
    text = json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2)
    (folder / INDEX_FILE).write_text(text + "\n", encoding="utf-8")

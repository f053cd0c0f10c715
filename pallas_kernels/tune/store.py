"""Writes tuning tables, and result files that travel from the device where they were measured."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pallas_kernels.backends import choose_layout, find_backend
from pallas_kernels.spec import AttnShape, KVSpec
from pallas_kernels.tune.search import PARTS
from pallas_kernels.tune.table import KERNELS, Entry, apply_config, read_entry, read_list

_DEVICE = "device_kind"


@dataclass(frozen=True)
class Result:
    """An entry and its device."""

    device_kind: str
    entry: Entry

    def asdict(self) -> dict[str, Any]:
        """The result as JSON."""
        return {_DEVICE: self.device_kind, **self.entry.asdict()}


def write_results(path: Path, results: Iterable[Result]) -> None:
    """One JSON list, whole or not at all."""
    _write_json(path, [result.asdict() for result in results])


def read_results(path: Path) -> list[Result]:
    """The results in a file of `write_results`.

    Raises:
        ValueError: the file holds no such list, or the kernel no longer takes an entry; names the field.
    """
    return [_read_result(values, where) for values, where in read_list(path, path.name)]


def save_results(results: Sequence[Result], directory: Path) -> list[Path]:
    """Merges results into the tables of their devices, replacing entries with the same key; returns the tables."""
    tables: dict[Path, list[Entry]] = {}
    for result in results:
        tables.setdefault(directory / result.device_kind / f"{result.entry.kernel}.json", []).append(result.entry)
    for path, entries in tables.items():
        held = read_list(path, f"{path.parent.name}/{path.name}") if path.exists() else []
        old = [read_entry(values, where) for values, where in held]
        by_key = {(entry.key, entry.version): entry for entry in (*old, *entries)}
        path.parent.mkdir(parents=True, exist_ok=True)
        _write_json(path, [entry.asdict() for entry in by_key.values()])
    return list(tables)


def _read_result(values: Any, where: str) -> Result:
    if not isinstance(values, dict) or not isinstance(values.get(_DEVICE), str):
        raise ValueError(f"{where}.{_DEVICE}: missing, or not a text")
    kind = values[_DEVICE]
    if not kind or kind in (".", "..") or "/" in kind or "\\" in kind:
        raise ValueError(f"{where}.{_DEVICE}: {kind!r} cannot name a folder")
    entry = read_entry({name: value for name, value in values.items() if name != _DEVICE}, where)
    if entry.kernel not in KERNELS:
        raise ValueError(f"{where}.kernel: must be one of {', '.join(KERNELS)}, got {entry.kernel!r}")
    if entry.version != KERNELS[entry.kernel]:
        raise ValueError(f"{where}.version: {entry.kernel} is at {KERNELS[entry.kernel]}, got {entry.version}")
    try:
        apply_config(_find_formula(entry), entry.config)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where}.config: {entry.kernel} does not take it: {error}") from error
    return Result(kind, entry)


def _find_formula(entry: Entry) -> Any:
    """The formula's configuration of the entry's kernel."""
    key, impl = entry.key, entry.kernel.split("_", maxsplit=1)[0]
    spec = KVSpec(key.num_kv_heads, key.head_dim, key.page_size, key.kv_dtype)
    shape = AttnShape(key.num_heads, replace(spec, layout=choose_layout(impl, spec)), key.dtype)
    return getattr(find_backend(impl).module.default_config(shape), PARTS[entry.kernel])


def _write_json(path: Path, values: Any) -> None:
    """Replaces the file at once: a reader, or a run that is cut off, leaves the old file or the new one."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(json.dumps(values, indent=1) + "\n")
    partial.replace(path)

"""The tuning table: what was measured to be best, in `data/<device kind>/<kernel>.json`.

A file holds a list of entries:

    {"kernel": "gpu_decode", "version": 1,
     "key": {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128, "page_size": 64, "dtype": "bfloat16",
             "kv_dtype": "bfloat16", "window": false, "tokens": 256, "max_len": 8192},
     "config": {...},
     "measured": {"us": 0.0, "gb_per_s": 0.0, "jax": "...", "driver": "...", "date": "..."}}

`config` is what the kernel's own tuning dataclass takes; `measured` is null for an entry that differs from the kernel's
formula for another reason than a measurement. A table only answers; nothing is measured while serving, because another
configuration gives other rounding.
"""

from __future__ import annotations

import json
import logging
import math
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

from pallas_kernels.platform import traced_device_kind
from pallas_kernels.spec import AttnShape

logger = logging.getLogger(__name__)

DATA = Path(__file__).parent / "data"

# The kernels that read the table. A version changes when old measurements say nothing of the new code.
KERNELS = {
    "gpu_decode": 1,
    "gpu_prefill": 1,
    "ampere_decode": 1,
    "ampere_prefill": 1,
    "tpu_decode": 1,
    "tpu_prefill": 1,
}

_ENTRY = {"kernel": str, "version": int, "key": dict, "config": dict, "measured": (dict, type(None))}
_MEASURED = {"us": (int, float), "jax": str, "driver": str, "date": str}
_RATES = ("gb_per_s", "tflop_per_s")  # one of them
_NEAR = 2.0  # buckets may differ by this much in all, in factors of two


@dataclass(frozen=True)
class TuneKey:
    """What a kernel's best configuration depends on, on one device."""

    num_heads: int  # N
    num_kv_heads: int  # K
    head_dim: int  # H
    page_size: int
    dtype: str  # of q
    kv_dtype: str
    window: bool  # whether there is one
    tokens: int  # T of the bucket; a decode bucket's are its rows
    max_len: int | None = None  # tokens that a row of the page table holds; None: the kernel does not know

    @property
    def discrete(self) -> tuple[int | str | bool, ...]:
        """What must be equal: all but the buckets."""
        return tuple(getattr(self, f.name) for f in fields(self) if f.name not in ("tokens", "max_len"))


@dataclass(frozen=True)
class Entry:
    """One line of a table."""

    kernel: str
    version: int
    key: TuneKey
    config: dict[str, Any]
    measured: dict[str, Any] | None


def lookup(
    kernel: str, version: int, device_kind: str, key: TuneKey, *, directory: Path = DATA
) -> dict[str, Any] | None:
    """The configuration of the entry whose key is equal, else of the nearest one that differs in its buckets only and
    by no more than a factor of four in all; None if there is none: the kernel then asks its formula.

    Raises:
        ValueError: the kernel is not one that has a table, or its file is malformed; names the field.
    """
    if kernel not in KERNELS:
        raise ValueError(f"kernel must be one of {', '.join(KERNELS)}, got {kernel!r}")
    found = [entry for entry in read_entries(directory, device_kind, kernel) if entry.version == version]
    near = [(measure_distance(entry.key, key), index) for index, entry in enumerate(found)]
    distance, index = min(near, default=(math.inf, 0))
    if distance > _NEAR:
        _log_miss(kernel, version, device_kind, key)
        return None
    return dict(found[index].config)


def tune[Config](
    kernel: str, version: int, formula: Config, shape: AttnShape, *, tokens: int, max_len: int | None = None
) -> Config:
    """The formula's configuration, with what the table of the device being traced for says in its place."""
    found = lookup(kernel, version, traced_device_kind(), tune_key(shape, tokens=tokens, max_len=max_len))
    if found is None:
        return formula
    values = {name: tuple(value) if isinstance(value, list) else value for name, value in found.items()}
    return replace(formula, **values)  # type: ignore[type-var]


def tune_key(shape: AttnShape, *, tokens: int, max_len: int | None = None) -> TuneKey:
    """The key of a shape in a bucket of `tokens`."""
    spec = shape.spec
    return TuneKey(
        num_heads=shape.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        page_size=spec.page_size,
        dtype=shape.dtype,
        kv_dtype=spec.dtype,
        window=shape.window is not None,
        tokens=tokens,
        max_len=max_len,
    )


def measure_distance(entry: TuneKey, key: TuneKey) -> float:
    """Factors of two between the buckets of two keys; infinite when something else differs."""
    if entry.discrete != key.discrete:
        return math.inf
    distance = abs(math.log2(entry.tokens / key.tokens))
    if entry.max_len is not None and key.max_len is not None:
        distance += abs(math.log2(entry.max_len / key.max_len))
    return distance


@cache
def read_entries(directory: Path, device_kind: str, kernel: str) -> tuple[Entry, ...]:
    """The entries of one file; none if there is no file. Read once per process."""
    path = directory / device_kind / f"{kernel}.json"
    if not path.exists():
        return ()
    where = f"{device_kind}/{path.name}"
    try:
        entries = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: not JSON: {error}") from error
    if not isinstance(entries, list):
        raise ValueError(f"{where}: must be a list of entries, got {type(entries).__name__}")
    return tuple(_read_entry(entry, f"{where}[{index}]") for index, entry in enumerate(entries))


def _read_entry(values: Any, where: str) -> Entry:
    _check_fields(values, _ENTRY, where)
    key = values["key"]
    kinds = {f.name: _KEY_TYPES[str(f.type)] for f in fields(TuneKey)}
    _check_fields(key, kinds, f"{where}.key")
    for name in ("tokens", "max_len"):
        if key[name] is not None and key[name] < 1:
            raise ValueError(f"{where}.key.{name}: must be at least 1, got {key[name]}")
    measured = values["measured"]
    if measured is not None:
        rates = [name for name in _RATES if name in measured]
        if len(rates) != 1:
            raise ValueError(f"{where}.measured: must have one of {' and '.join(_RATES)}, got {sorted(measured)}")
        _check_fields(measured, {**_MEASURED, rates[0]: (int, float)}, f"{where}.measured")
    return Entry(values["kernel"], values["version"], TuneKey(**key), values["config"], measured)


_KEY_TYPES: dict[str, Any] = {"int": int, "str": str, "bool": bool, "int | None": (int, type(None))}


def _check_fields(values: Any, wanted: dict[str, Any], where: str) -> None:
    """ValueError for the first field that is missing, unknown or of another type."""
    if not isinstance(values, dict):
        raise ValueError(f"{where}: must be an object with {', '.join(wanted)}, got {values!r}")
    unknown = [name for name in values if name not in wanted]
    if unknown:
        raise ValueError(f"{where}.{unknown[0]}: unknown field; there are {', '.join(wanted)}")
    for name, kinds in wanted.items():
        if name not in values:
            raise ValueError(f"{where}.{name}: missing")
        is_bool = isinstance(values[name], bool)
        if not isinstance(values[name], kinds) or (is_bool and kinds is not bool):
            raise ValueError(f"{where}.{name}: {values[name]!r} is of the wrong type")


@cache
def _log_miss(kernel: str, version: int, device_kind: str, key: TuneKey) -> None:
    """Once per key."""
    logger.debug(
        "no tuning entry of %s version %d on %s for %s: its formula decides", kernel, version, device_kind, key
    )

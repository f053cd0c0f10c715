"""The tuning table: what was measured to be best, in `data/<device kind>/<kernel>.json`.

A file holds a list of entries:

    {"kernel": "gpu_decode", "version": 1,
     "key": {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128, "page_size": 64, "dtype": "bfloat16",
             "kv_dtype": "bfloat16", "window": false, "tokens": 256, "max_len": 8192},
     "config": {...},
     "measured": {"us": 0.0, "formula_us": 0.0, "tried": 0, "gb_per_s": 0.0, "jax": "...", "driver": "...",
                  "date": "..."}}

`config` holds fields of the kernel's tuning dataclass. `measured` holds the time of one layer, the time with the
formula's configuration, and the number of candidates tried. If nothing was faster than the formula, its configuration
is the entry's. `measured` is null for an entry that was not measured. Nothing is measured while serving: another
configuration rounds differently, so a measurement could change answers.
"""

from __future__ import annotations

import json
import logging
import math
from dataclasses import asdict, dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

from pallas_kernels.platform import traced_device_kind
from pallas_kernels.spec import AttnShape
from pallas_kernels.worklist import StepRows

logger = logging.getLogger(__name__)

DATA = Path(__file__).parent / "data"

# The kernels that have a table, and their versions. A version is raised with any change to a kernel that moves its best
# configuration: entries of other versions do not count.
KERNELS = {
    "gpu_decode": 1,
    "gpu_prefill": 1,
    "ampere_decode": 1,
    "ampere_prefill": 1,
    "tpu_decode": 1,
    "tpu_prefill": 1,
}

_ENTRY = {"kernel": str, "version": int, "key": dict, "config": dict, "measured": (dict, type(None))}
_MEASURED = {"us": (int, float), "formula_us": (int, float), "tried": int, "jax": str, "driver": str, "date": str}
_RATES = ("gb_per_s", "tflop_per_s")  # an entry has one of them
_NEAR = 2.0  # how much buckets may differ in total, in factors of two


@dataclass(frozen=True)
class TuneKey:
    """What a kernel's best configuration depends on, on one device.

    The buckets `tokens` and `max_len` are known when a step is compiled. `max_len` is a capacity, not the length of any
    row: a server's is max_model_len, and its rows are mostly shorter. A context is measured with a page table of its
    own width, so a server finds what was measured at its largest context.
    """

    num_heads: int  # N
    num_kv_heads: int  # K
    head_dim: int  # H
    page_size: int
    dtype: str  # q's
    kv_dtype: str
    window: bool  # whether the layer has one
    tokens: int  # the bucket's tokens T for a prefill kernel, its rows for a decode kernel
    max_len: int  # tokens that a row of the page table holds

    @property
    def discrete(self) -> tuple[int | str | bool, ...]:
        """The fields that must be equal: all but the buckets."""
        return tuple(getattr(self, f.name) for f in fields(self) if f.name not in ("tokens", "max_len"))


@dataclass(frozen=True)
class Entry:
    """One line of a table."""

    kernel: str
    version: int
    key: TuneKey
    config: dict[str, Any]
    measured: dict[str, Any] | None

    def asdict(self) -> dict[str, Any]:
        """The entry as JSON."""
        return asdict(self)


def lookup(kernel: str, device_kind: str, key: TuneKey, *, directory: Path = DATA) -> dict[str, Any] | None:
    """The configuration of the entry with this key, else of the nearest whose buckets differ by a factor of four in
    total at most. None if there is none: the kernel then uses its formula.

    Among equally near entries the shorter context wins, then fewer tokens: buckets are upper bounds of what they hold.

    Raises:
        ValueError: the kernel has no table, or its file is malformed; names the field.
    """
    if kernel not in KERNELS:
        raise ValueError(f"kernel must be one of {', '.join(KERNELS)}, got {kernel!r}")
    found = [entry for entry in read_entries(directory, device_kind, kernel) if entry.version == KERNELS[kernel]]
    near = [(measure_distance(e.key, key), e.key.max_len, e.key.tokens, index) for index, e in enumerate(found)]
    distance, *_, index = min(near, default=(math.inf, 0))
    if distance > _NEAR:
        _log_miss(kernel, device_kind, key)
        return None
    return dict(found[index].config)


def tune[Config](kernel: str, formula: Config, shape: AttnShape, rows: StepRows) -> Config:
    """The formula's configuration, with the fields that the table of the device being traced for has."""
    key = tune_key(kernel, shape, num_rows=rows.max_rows, num_tokens=rows.num_tokens, max_len=rows.max_len)
    found = lookup(kernel, traced_device_kind(), key)
    return formula if found is None else apply_config(formula, found)


def apply_config[Config](formula: Config, values: dict[str, Any]) -> Config:
    """The formula's configuration with the fields of an entry's `config`.

    Raises:
        TypeError, ValueError: the configuration has no such field, or refuses its value.
    """
    values = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
    return replace(formula, **values)  # type: ignore[type-var]


def tune_key(kernel: str, shape: AttnShape, *, num_rows: int, num_tokens: int, max_len: int) -> TuneKey:
    """The key of a kernel's shape in a bucket."""
    spec = shape.spec
    return TuneKey(
        num_heads=shape.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        page_size=spec.page_size,
        dtype=shape.dtype,
        kv_dtype=spec.dtype,
        window=shape.window is not None,
        tokens=num_rows if kernel.endswith("_decode") else num_tokens,
        max_len=max_len,
    )


def measure_distance(entry: TuneKey, key: TuneKey) -> float:
    """Factors of two between the buckets of two keys; infinite if anything else differs."""
    if entry.discrete != key.discrete:
        return math.inf
    return abs(math.log2(entry.tokens / key.tokens)) + abs(math.log2(entry.max_len / key.max_len))


@cache
def read_entries(directory: Path, device_kind: str, kernel: str) -> tuple[Entry, ...]:
    """The entries of one file; none if there is no file. Read once per process."""
    path = directory / device_kind / f"{kernel}.json"
    if not path.exists():
        return ()
    return tuple(read_entry(values, where) for values, where in read_list(path, f"{device_kind}/{path.name}"))


def read_list(path: Path, name: str) -> list[tuple[Any, str]]:
    """The values of a JSON list, each with its place for error messages.

    Raises:
        ValueError: the file holds no JSON list; calls it `name`.
    """
    try:
        found = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{name}: not JSON: {error}") from error
    if not isinstance(found, list):
        raise ValueError(f"{name}: must be a list of entries, got {type(found).__name__}")
    return [(values, f"{name}[{index}]") for index, values in enumerate(found)]


def read_entry(values: Any, where: str) -> Entry:
    """One entry from JSON; ValueError names the wrong field, after `where`."""
    _check_fields(values, _ENTRY, where)
    key = values["key"]
    kinds = {f.name: _KEY_TYPES[str(f.type)] for f in fields(TuneKey)}
    _check_fields(key, kinds, f"{where}.key")
    for name in ("tokens", "max_len"):
        if key[name] < 1:
            raise ValueError(f"{where}.key.{name}: must be at least 1, got {key[name]}")
    measured = values["measured"]
    if measured is not None:
        rates = [name for name in _RATES if name in measured]
        if len(rates) != 1:
            raise ValueError(f"{where}.measured: must have one of {' and '.join(_RATES)}, got {sorted(measured)}")
        _check_fields(measured, {**_MEASURED, rates[0]: (int, float)}, f"{where}.measured")
    return Entry(values["kernel"], values["version"], TuneKey(**key), values["config"], measured)


_KEY_TYPES: dict[str, Any] = {"int": int, "str": str, "bool": bool}


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
def _log_miss(kernel: str, device_kind: str, key: TuneKey) -> None:
    """Once per key."""
    version = KERNELS[kernel]
    logger.debug(
        "no tuning entry of %s version %d on %s for %s: its formula decides", kernel, version, device_kind, key
    )

"""The file in which XLA keeps what it has measured: for each fused computation the kernel, or the tiles, to take.

XLA finds a result by the device's figures and the computation's text. Equal products of all layers, and of models of
any depth, have one text, since each layer's parameters are arrays of their own on GPUs.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

_VERSION = "version: 3"  # of the file's format
_ENTRY = re.compile(r"^results \{\n(.*?)^\}$", re.MULTILINE | re.DOTALL)
_TEXT = r'^  {}: "((?:[^"\\]|\\.)*)"$'
_DEVICE = re.compile(_TEXT.format("device"), re.MULTILINE)
_HLO = re.compile(_TEXT.format("hlo"), re.MULTILINE)
_CHOICE = re.compile(r"^  result \{\n.*?^  \}$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class TunedResult:
    """What is best for one computation on one device."""

    device: str  # its figures, as XLA writes them
    hlo: str  # the computation, with escapes
    choice: str  # XLA's `AutotuneResult`, as text


def read_results(text: str) -> list[TunedResult]:
    """Returns the results in a text file that XLA has dumped; ValueError if it is none, or has another format."""
    if not text.startswith(_VERSION):
        raise ValueError(f"results of XLA's tuning begin with {_VERSION!r}, got {text[:40]!r}")
    return [_read_entry(entry) for entry in _ENTRY.findall(text)]


def _read_entry(text: str) -> TunedResult:
    device, hlo, choice = (pattern.search(text) for pattern in (_DEVICE, _HLO, _CHOICE))
    if device is None or hlo is None or choice is None:
        raise ValueError(f"no result of XLA's tuning: {text[:200]!r}")
    return TunedResult(device[1], hlo[1], choice[0])


def write_results(results: Iterable[TunedResult]) -> str:
    """Returns the text of a file that XLA loads, whatever its version.

    Each entry that XLA dumps has a number that it raises with the code of its kernels. It takes entries without one for
    its own.
    """
    entries = (f'results {{\n  device: "{each.device}"\n  hlo: "{each.hlo}"\n{each.choice}\n}}' for each in results)
    return "\n".join([_VERSION, *entries, ""])


def take_products(results: Iterable[TunedResult]) -> list[TunedResult]:
    """Returns the results for products, the first of each."""
    kept: dict[str, TunedResult] = {}
    for each in results:
        if " dot(" in each.hlo or "custom-call(" in each.hlo:
            kept.setdefault(each.hlo, each)
    return list(kept.values())

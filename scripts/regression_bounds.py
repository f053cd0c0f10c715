"""Bounds of figures in a TOML file, and which figures breach them, for `bench_regression.py`.

A table of the file is a group of figures. A bound is the one value that is right, or `{ least = ..., most = ... }`, of
which either may be left out. Groups below `times` only warn.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

WARNING_GROUP = "times"
Figure = int | float | str


@dataclass(frozen=True)
class Bound:
    """What a figure may be. A bound is inclusive."""

    least: Figure | None = None
    most: Figure | None = None

    @classmethod
    def parse(cls, value: Any) -> Bound:
        """Returns the bound that a TOML value stands for; ValueError if it is none."""
        if isinstance(value, int | float | str):
            return cls(value, value)
        if isinstance(value, dict) and value and set(value) <= {"least", "most"}:
            return cls(**value)
        raise ValueError(f"a bound is a value or a table of `least` and `most`, got {value!r}")

    def describe_breach(self, found: Figure) -> str | None:
        """Returns by how much a figure breaches the bound, in words; None if it does not."""
        if isinstance(found, str):
            return None if found == self.least else f"is {found!r}, and not {self.least!r}"
        for bound, is_breach, side in ((self.most, _is_above, "above"), (self.least, _is_below, "below")):
            if bound is not None and is_breach(found, bound):
                assert not isinstance(bound, str)
                away = abs(found - bound)
                share = f" ({away / abs(bound):,.1%} of it)" if bound else ""
                return f"is {found:,.6g}, {side} its bound {bound:,.6g} by {away:,.6g}{share}"
        return None


def _is_above(found: Any, bound: Any) -> bool:
    return bool(found > bound)


def _is_below(found: Any, bound: Any) -> bool:
    return bool(found < bound)


@dataclass(frozen=True)
class Breach:
    """A figure that is not what was committed."""

    name: str  # group and figure
    text: str
    only_warns: bool


def read_bounds(path: Path) -> dict[str, Bound]:
    """Returns the bounds of a file by name, group first.

    Raises:
        ValueError: a bound is none.
    """
    return {name: Bound.parse(value) for name, value in flatten(tomllib.loads(path.read_text(encoding="utf-8")))}


def flatten(table: Mapping[str, Any], group: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the entries of nested tables by their whole names; a table of `least` and `most` is an entry."""
    for name, value in table.items():
        if isinstance(value, Mapping) and not (value and set(value) <= {"least", "most"}):
            yield from flatten(value, f"{group}{name}.")
        else:
            yield f"{group}{name}", value


def find_breaches(
    figures: Mapping[str, Figure], bounds: Mapping[str, Bound], left_out: Mapping[str, str], file: str
) -> list[Breach]:
    """Returns what is not as committed: figures beyond their bound, without one, or bounds without a figure.

    Args:
        left_out: why figures that have a bound were not measured here, by name.
        file: where bounds are written, for the messages.
    """
    found = []
    for name in dict.fromkeys((*bounds, *figures)):
        if name in left_out:
            continue
        if name not in figures:
            text: str | None = "has a bound and was not found. If the change is meant, take the bound out of"
        elif name not in bounds:
            text = "has no bound. If it is new on purpose, write one into"
        elif (text := bounds[name].describe_breach(figures[name])) is not None:
            text += ". If the change is meant, write the new bound into"
        if text is not None:
            group, _, key = name.rpartition(".")
            line = f": [{group}] {_show_key(key)}" + (f" = {_show_value(figures[name])}" if name in figures else "")
            found.append(Breach(name, f"{name} {text} {file}{line}", name.split(".")[0] == WARNING_GROUP))
    return found


def _show_key(key: str) -> str:
    return key if key.replace("_", "").replace("-", "").isalnum() else f'"{key}"'


def _show_value(value: Figure) -> str:
    if isinstance(value, str):
        return f'"{value}"'
    return f"{value:.4g}" if isinstance(value, float) else str(value)

"""The memory that this process may use: the machine's, or the least limit of its cgroups."""

from __future__ import annotations

import os
import posixpath
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

HOST_SHARE = 0.9  # of it that an engine's parts may take on purpose; the rest is for the process itself
# memory.high counts as well: a process above it is throttled, and an engine never gives its pools back.
_LIMIT_FILES = {"cgroup2": ("memory.max", "memory.high"), "cgroup": ("memory.limit_in_bytes",)}
_ESCAPE = re.compile(r"\\([0-7]{3})")  # mountinfo writes blanks in paths as octal


@dataclass(frozen=True)
class _Mount:
    """A mounted cgroup hierarchy with memory limits. `root` is the cgroup mounted at `point`."""

    kind: str
    root: str
    point: str


def host_memory_bytes(root: Path = Path("/")) -> int:
    """Returns the bytes this process may use: the least of the machine's memory and the limits of its cgroups.

    Limits are read from its own cgroup and all visible parents, v1 and v2. `root` is the directory that holds proc and
    the mounted hierarchies.
    """
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]  # v1 writes "no limit" as a huge number
    groups = _read_groups(root)
    for mount in _read_mounts(root):
        if mount.kind in groups:
            limits += _read_limits(root, mount, groups[mount.kind])
    return min(limits)


def _read_groups(root: Path) -> dict[str, str]:
    """Returns the path of this process's cgroup by the kind of hierarchy."""
    groups = {}
    for line in _read_lines(root / "proc/self/cgroup"):
        number, controllers, path = line.split(":", 2)
        if number == "0" and not controllers:
            groups["cgroup2"] = path
        elif "memory" in controllers.split(","):
            groups["cgroup"] = path
    return groups


def _read_mounts(root: Path) -> Iterator[_Mount]:
    for line in _read_lines(root / "proc/self/mountinfo"):
        place, _, source = line.partition(" - ")
        kind, _, options = source.split(" ", 2)
        if kind == "cgroup2" or (kind == "cgroup" and "memory" in options.split(",")):
            group, point = (_ESCAPE.sub(lambda match: chr(int(match[1], 8)), path) for path in place.split(" ")[3:5])
            yield _Mount(kind, group, point)


def _read_limits(root: Path, mount: _Mount, path: str) -> Iterator[int]:
    """Yields the limits in bytes of the cgroup `path` and its parents, up to the mount point."""
    point = root / mount.point.lstrip("/")
    inside = posixpath.relpath(posixpath.normpath(path), posixpath.normpath(mount.root))
    if inside.split("/")[0] == "..":  # outside this mount, as in containers: the mount's own limits are nearest
        inside = "."
    group = point / inside
    for folder in (group, *group.parents):
        for name in _LIMIT_FILES[mount.kind]:
            text = "".join(_read_lines(folder / name))
            if text.isdigit():  # v2 writes "max" for none
                yield int(text)
        if folder == point:
            return


def _read_lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:  # no such system, hierarchy or controller
        return []

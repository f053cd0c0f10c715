"""What this process may use, by the files that the kernel shows: cgroups of both versions, nested and in containers."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from jaxserve.core.runtime.host_memory import host_memory_bytes

MIB = 2**20
MACHINE = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
V2 = "30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate"
V1 = "31 23 0:27 / /sys/fs/cgroup/memory rw shared:5 - cgroup cgroup rw,memory"
CPU = "32 23 0:28 / /sys/fs/cgroup/cpu rw shared:6 - cgroup cgroup rw,cpu,cpuacct"
UNLIMITED = "9223372036854771712"

CASES = {
    # name: (/proc/self/cgroup, mounts, files under /sys/fs/cgroup, what is found)
    "own": ("0::/user.slice/a.scope", V2, {"user.slice/a.scope/memory.max": 500 * MIB}, 500 * MIB),
    "parent": ("0::/a/b", V2, {"a/b/memory.max": 500 * MIB, "a/memory.max": 300 * MIB}, 300 * MIB),
    "max": ("0::/a/b", V2, {"a/b/memory.max": "max", "a/memory.max": "max"}, MACHINE),
    "high": ("0::/a", V2, {"a/memory.max": 500 * MIB, "a/memory.high": 400 * MIB}, 400 * MIB),
    "sibling": ("0::/a/b", V2, {"a/c/memory.max": MIB, "b/memory.max": MIB}, MACHINE),
    "container": ("0::/", V2, {"memory.max": 500 * MIB}, 500 * MIB),
    "outside of the namespace": ("0::/../../other", V2, {"memory.max": 500 * MIB}, 500 * MIB),
    "part of the hierarchy": (
        "0::/docker/1/child",
        V2.replace(" / ", " /docker/1 ", 1),
        {"memory.max": 500 * MIB, "child/memory.max": 400 * MIB},
        400 * MIB,
    ),
    "no process of it": ("0::/gone (deleted)", V2, {"memory.max": "max"}, MACHINE),
    "v1": ("5:memory:/a\n4:cpu,cpuacct:/b", V1, {"memory/a/memory.limit_in_bytes": 500 * MIB}, 500 * MIB),
    "v1 without a limit": ("5:memory:/a", V1, {"memory/a/memory.limit_in_bytes": UNLIMITED}, MACHINE),
    "v1 parent": (
        "5:memory:/a/b",
        V1,
        {"memory/a/b/memory.limit_in_bytes": UNLIMITED, "memory/a/memory.limit_in_bytes": 300 * MIB},
        300 * MIB,
    ),
    "v1 container": (
        "5:memory:/docker/1",
        V1.replace(" / ", " /docker/1 ", 1),
        {"memory/memory.limit_in_bytes": 500 * MIB},
        500 * MIB,
    ),
    "v1 other controllers": ("4:cpu,cpuacct:/a", CPU, {"cpu/a/memory.limit_in_bytes": MIB}, MACHINE),
    "both": (
        "5:memory:/a\n0::/a",
        f"{CPU}\n{V1}\n{V2.replace('/sys/fs/cgroup', '/sys/fs/cgroup/unified')}",
        {"memory/a/memory.limit_in_bytes": 300 * MIB},
        300 * MIB,
    ),
    "blanks": (
        "0::/a b",
        V2.replace("/sys/fs/cgroup", "/sys/fs/cgroup/my\\040groups"),
        {"my groups/a b/memory.max": 7 * MIB},
        7 * MIB,
    ),
    "more than the machine": ("0::/a", V2, {"a/memory.max": 2 * MACHINE}, MACHINE),
}


@pytest.mark.parametrize("name", CASES)
def test_limits(tmp_path: Path, name: str) -> None:
    groups, mounts, files, expected = CASES[name]
    disk = "22 1 8:1 / / rw,relatime - ext4 /dev/sda1 rw"
    written = {"proc/self/cgroup": groups, "proc/self/mountinfo": f"{disk}\n{mounts}"}
    written |= {f"sys/fs/cgroup/{path}": str(value) for path, value in files.items()}
    for path, text in written.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(f"{text}\n")
    assert host_memory_bytes(tmp_path) == expected


def test_a_system_without_these_files_has_its_machines_memory(tmp_path: Path) -> None:
    assert host_memory_bytes(tmp_path) == MACHINE
    assert 0 < host_memory_bytes() <= MACHINE

"""Passes that are kept: one small file for each, in the user's cache folder and never in the repository."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

KEPT_DAYS = 90
OPTIONAL = ("nginx", "chromium")


def find_folder(environment: Mapping[str, str]) -> Path:
    caches = environment.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(caches) / "jaxserve-ci"


def describe_machine(site: Path) -> str:
    """What a pass depends on beside files: the Python, the packages installed in `site`, the compiler, the CPU, and
    programs without which some tests are skipped.

    The environment of the oldest jax is not looked at, since it may not be there yet: what pins it is in the Makefile,
    and everything else in it is as new as here.
    """
    packages = sorted(path.name for path in site.glob("lib/python*/site-packages/*.dist-info"))
    compiler = shutil.which("c++")
    version = ""
    if compiler:
        version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False).stdout
    programs = [name for name in OPTIONAL if shutil.which(name)]
    return "\n".join([sys.version, platform.machine(), _describe_cpu(), version, *programs, *packages])


def _describe_cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return "\n".join(sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))}))


class Passes:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def find(self, digest: str) -> float | None:
        """When it passed, if it did."""
        try:
            return float(json.loads((self.folder / digest).read_text())["time"])
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def keep(self, digest: str, target: str) -> None:
        """Written whole or not at all, so that a run that is stopped here keeps nothing."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=self.folder, delete=False) as file:
            json.dump({"target": target, "time": time.time()}, file)
        os.replace(file.name, self.folder / digest)

    def forget_old(self) -> None:
        if self.folder.is_dir():
            for path in self.folder.iterdir():
                if path.stat().st_mtime < time.time() - KEPT_DAYS * 24 * 3600:
                    path.unlink(missing_ok=True)

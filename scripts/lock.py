"""Writes the lock files that images install from: every package, build requirements included, with version and hash.

    python scripts/lock.py

pip resolves the requirements of `pyproject.toml` for this interpreter and machine: run it with Python 3.12 on x86-64
Linux, as in the images. Nothing is installed.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

from rich.console import Console

ROOT = Path(__file__).resolve().parents[1]
# The lock file of each image, and its extras.
LOCKS = {"lock-cpu.txt": "otel", "lock-cuda.txt": "cuda13,otel", "lock-tpu.txt": "tpu,otel"}
HEADER = """\
# Written by scripts/lock.py for Python 3.12 on x86-64 Linux, from .[{extras}]. Do not edit.
"""


def resolve(extras: str) -> list[dict[str, Any]]:
    """Returns pip's report of each package that a build and an installation would need."""
    builders = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet", "--report", "-"]
    done = subprocess.run([*command, f".[{extras}]", *builders], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"pip could not resolve .[{extras}]:\n{done.stderr}")
    found: list[dict[str, Any]] = json.loads(done.stdout)["install"]
    return found


def write_lock(packages: list[dict[str, Any]], extras: str) -> str:
    """Returns the lock file: one line for each package but jaxserve itself.

    Raises:
        KeyError: the index gave no hash of a package.
    """
    lines = []
    for package in packages:
        name, version = package["metadata"]["name"].lower().replace("_", "-"), package["metadata"]["version"]
        if name != "jaxserve":
            lines.append(
                f"{name}=={version} --hash=sha256:{package['download_info']['archive_info']['hashes']['sha256']}"
            )
    return HEADER.format(extras=extras) + "\n".join(sorted(lines)) + "\n"


def main() -> None:
    console = Console()
    for name, extras in LOCKS.items():
        with console.status(f"resolving .[{extras}] ..."):
            text = write_lock(resolve(extras), extras)
        (ROOT / "configs" / "deploy" / name).write_text(text)
        console.print(f"configs/deploy/{name}: {text.count('==')} packages")


if __name__ == "__main__":
    main()

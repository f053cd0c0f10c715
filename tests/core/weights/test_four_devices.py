"""Runs `four_devices.py` in a process of its own: the number of CPU devices is fixed when JAX starts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def test_four_devices() -> None:
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=4"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", str(Path(__file__).with_name("four_devices.py"))],
        env={**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr  # pytest fails when it finds no tests
    assert "15 passed" in done.stdout

"""Published config.json files of well-known models, packaged so that plans and benchmarks need no download."""

from __future__ import annotations

import importlib.resources
import json
from functools import cache
from pathlib import Path
from typing import Any


@cache
def _config_dir() -> Path:
    packaged = Path(str(importlib.resources.files("jaxserve"))) / "configs"
    return packaged if packaged.is_dir() else Path(__file__).parents[1] / "configs"  # a source checkout


def list_presets() -> list[str]:
    """Returns the names that `load_preset` knows."""
    return sorted(path.stem for path in (_config_dir() / "models").glob("*.json"))


def load_preset(name: str) -> dict[str, Any] | None:
    """Returns the config.json of a preset, or None when there is none of that name."""
    path = _config_dir() / "models" / f"{name}.json"
    return json.loads(path.read_text()) if name in list_presets() else None


def demo_model_dir() -> Path:
    """Returns the directory of the demo model that ships with the package."""
    return Path(str(importlib.resources.files("jaxserve"))) / "demo"


def demo_head_dir() -> Path:
    """Returns the directory of the EAGLE-3 head for the demo model."""
    return demo_model_dir() / "eagle3"

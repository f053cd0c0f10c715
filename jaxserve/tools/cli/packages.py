"""Packages that only the commands that serve, or put load on servers, need.

The others run without: a borrowed machine often has JAX, but no web framework, and nothing can be installed there.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module

from jaxserve.errors import MissingPackageError

# What pip is to install, by the name of the import.
SERVER_PACKAGES = {
    "fastapi": "fastapi>=0.120",
    "pydantic": "pydantic>=2.12",
    "uvicorn": "uvicorn>=0.38,<0.55",
    "httptools": "httptools>=0.7.1",
    "httpx": "httpx>=0.28",
    "prometheus_client": "prometheus-client>=0.23.1",
}
LOAD_PACKAGES = {name: SERVER_PACKAGES[name] for name in ("httptools", "httpx", "prometheus_client")}


def require_packages(command: str, packages: Mapping[str, str]) -> None:
    """Imports packages that a command needs.

    Raises:
        MissingPackageError: some cannot be imported; all of them are named, so that one installation is enough.
    """
    faults: dict[str, ImportError] = {}
    for name in packages:
        try:
            import_module(name)
        except ImportError as error:
            faults[name] = error
    if faults:
        first = next(iter(faults.values()))
        reason = " ".join(str(first).split())
        wanted = " ".join(f"'{packages[name]}'" for name in faults)
        message = f"{command} needs {', '.join(faults)}, which cannot be imported ({reason}); pip install {wanted}"
        raise MissingPackageError(message) from first

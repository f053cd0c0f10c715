"""The bodies of the admin port that load and unload adapters (vLLM's fields)."""

from __future__ import annotations

from jaxserve.server.protocol.fields import Body


class LoadAdapter(Body):
    """Loads an adapter."""

    lora_name: str
    lora_path: str  # below `lora_dir`
    load_inplace: bool = False  # in place of one of the same name


class UnloadAdapter(Body):
    """Unloads an adapter."""

    lora_name: str

"""rich's console if rich is installed, else one with plain lines: a machine with an accelerator may have only jax."""

from __future__ import annotations

import re

try:
    from rich.console import Console
except ImportError:

    class Console:  # type: ignore[no-redef]
        """What scripts ask of rich's."""

        def __init__(self, **_: object) -> None:
            pass

        def print(self, *values: object, **_: object) -> None:
            print(*(re.sub(r"\[/?[a-z ]*\]", "", str(value)) for value in values), flush=True)


__all__ = ["Console"]

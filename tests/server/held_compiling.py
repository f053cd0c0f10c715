"""`jaxserve serve` where compiling does not end: of all programs, or with `--serve-while-warming` of those for later.

Takes the flags of `jaxserve serve`. Its state lasts until a signal, on a fast machine, too, and costs no compiling.
"""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from jaxserve.core.runtime.compile import ProgramCompiler
from jaxserve.engine.async_engine import AsyncLLM
from jaxserve.tools import cli

_compile, _compile_rest = ProgramCompiler.compile, AsyncLLM.compile_rest
_is_held = threading.Event()


def compile_or_hold(compiler: ProgramCompiler, kind: str, key: Any) -> Any:
    if _is_held.is_set():
        threading.Event().wait()
    return _compile(compiler, kind, key)


def hold_rest(llm: AsyncLLM, progress: Any) -> None:
    _is_held.set()
    _compile_rest(llm, progress)


if __name__ == "__main__":
    ProgramCompiler.compile = compile_or_hold  # type: ignore[method-assign]
    AsyncLLM.compile_rest = hold_rest  # type: ignore[method-assign]
    if "--serve-while-warming" not in sys.argv:
        _is_held.set()
    sys.exit(cli.main())

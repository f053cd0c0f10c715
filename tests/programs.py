"""Where tests keep compiled programs. All test processes of a machine share it, so equal programs compile once.

JAX's keys hold the program, its options and the version of jaxlib. Programs that call back into Python, as the
interpreters of kernels do, are never kept. Tests of compiling and of the cache use empty folders of their own.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

PROGRAMS = Path(tempfile.gettempdir()) / "jaxserve-test-programs"

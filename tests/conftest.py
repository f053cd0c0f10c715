"""What every test process needs before JAX starts."""

from __future__ import annotations

import os

from tests.examples import register_profiles

# The interpreter of GPU kernels blocks threads of XLA's CPU pool, one per warpgroup. The pool has as many threads as
# there are cores, and on two of them it can deadlock.
os.environ.setdefault("NPROC", "8")

register_profiles()

"""A kernel that a CPU runs as a device would its own: portable attention on pages of another layout, with faults.

`serve_kernel` makes it the implementation "gpu", which the device chooses.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import backends, xla
from pallas_kernels.backends import Backend
from pallas_kernels.layout import update_kv_pages
from pallas_kernels.spec import AttnLayer, AttnShape, BatchMeta, KVSpec

FAULTS = {  # and what the self-test says of them
    "wrong values": "wrong values: relative error",
    "wrong in chunks": "mixed batch: it gave wrong values: relative error",
    "one key lost": "wrong values: relative error",
    "NaN": "NaN",
    "wrong keys": "wrong keys or values",
    "writes elsewhere": "pages that are not its own",
    "does not compile": "NotImplementedError: no such layout",
}
_fault = ""


def choose_layout(spec: KVSpec) -> str:
    return "padded"


def find_obstacle(shape: AttnShape) -> str | None:
    return None


plan_work = xla.plan_work


def attend_with_update(
    q: jax.Array, k: jax.Array, v: jax.Array, kv_pages: jax.Array, batch: BatchMeta, layer: AttnLayer
) -> tuple[jax.Array, jax.Array]:
    if _fault == "does not compile":
        raise NotImplementedError("no such layout\nand much more")
    pool = update_kv_pages(k, v, kv_pages, batch, layer)
    out = xla.attend(q, pool, batch, layer)
    if _fault == "wrong values":
        out = out * 1.1
    elif _fault == "wrong in chunks" and batch.max_query_len is None:
        out = jnp.roll(out, 1, axis=1)
    elif _fault == "one key lost":  # the oldest of the first row
        lost = pool.at[batch.page_table[0, 0] + layer.page_offset, :, 0].set(0)
        out = xla.attend(q, lost, batch, layer)
    elif _fault == "NaN":
        out = jnp.where(jnp.arange(q.shape[0])[:, None, None] == 0, jnp.nan, out)
    elif _fault == "wrong keys":
        pool = update_kv_pages(2 * k, v, kv_pages, batch, layer)
    elif _fault == "writes elsewhere":
        pool = pool.at[0].set(0)  # the other layer's null page
    return out, pool


@contextmanager
def serve_kernel(fault: str = "") -> Iterator[None]:
    """Within it the kernel is this process's device's own."""
    backend = Backend("tests.pallas_kernels.cpu_kernel", "cpu", "this CPU", fused=True)
    assert not fault or fault in FAULTS, fault
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(backends._BACKENDS, "gpu", backend)
        patch.setattr(backends, "choose_impl", lambda *_: ("gpu", "a kernel for this CPU"))
        patch.setattr(sys.modules[__name__], "_fault", fault)
        jax.clear_caches()  # a trace of another fault must not be found
        try:
            yield
        finally:
            jax.clear_caches()

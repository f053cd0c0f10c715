"""Puts one fault at a time into a copy of the sources and asks whether CI's tests of the room see it.

    python scripts/mutate.py [--rooms scheduler pages] [--json FILE]

A fault that no test sees is printed as missed, and the script ends with status 1. It is run by hand when tests leave
CI: each fault starts its own pytest. What is replaced stands once in its file, so the table cannot go stale unseen.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
OPTIONS = ("-x", "-q", "-p", "no:cacheprovider", "-m", "not thorough and not docs", "--hypothesis-profile", "quick")


@dataclass(frozen=True)
class Fault:
    """Two in each room: text of a file, what takes its place, and the tests of CI that are to see it."""

    room: str
    file: str
    old: str
    new: str
    tests: str


FAULTS = (
    Fault(
        "scheduler",
        "jaxserve/core/scheduler/policy.py",
        "return max((*batch.decoding[-1:], *batch.prefilling[-1:]), key=age)",
        "return min((*batch.decoding[-1:], *batch.prefilling[-1:]), key=age)",
        "tests/core/scheduler",
    ),
    Fault(
        "scheduler",
        "jaxserve/core/scheduler/policy.py",
        "priority - waiting_priority >= threshold",
        "priority - waiting_priority > threshold",
        "tests/core/scheduler/test_tiers.py",
    ),
    Fault(
        "pages",
        "jaxserve/core/pages/manager.py",
        "max(0, position - group.window + 1) // self.page_size",
        "max(0, position - group.window + 2) // self.page_size",
        "tests/core/pages/test_manager.py",
    ),
    Fault(
        "pages",
        "jaxserve/core/pages/pool.py",
        "if self._keys[page] is None and key not in self._index:",
        "if self._keys[page] is None:",
        "tests/core/pages/test_pool.py",
    ),
    Fault(
        "runtime",
        "jaxserve/core/runtime/buckets.py",
        "if bucket.width == width and bucket.rows >= num_rows:",
        "if bucket.width == width and bucket.rows > num_rows:",
        "tests/core/runtime/test_buckets.py",
    ),
    Fault(
        "runtime",
        "jaxserve/core/runtime/inputs.py",
        "entries = [(group * rows + row) * length + index",
        "entries = [(row * rows + group) * length + index",
        "tests/core/runtime/test_inputs.py",
    ),
    Fault(
        "sampling",
        "jaxserve/core/sampling/shaping.py",
        "jnp.where(logits > 0, 1 / inputs.repetition, inputs.repetition)",
        "jnp.where(logits < 0, 1 / inputs.repetition, inputs.repetition)",
        "tests/core/sampling/test_shaping.py tests/core/sampling/test_transformers.py",
    ),
    Fault(
        "sampling",
        "jaxserve/core/sampling/draw.py",
        "jnp.where(scaled >= threshold, jnp.exp(scaled), 0)",
        "jnp.where(scaled > threshold, jnp.exp(scaled), 0)",
        "tests/core/sampling/test_draw.py",
    ),
    Fault(
        "layers",
        "jaxserve/core/layers/rope.py",
        "second * cos + first * sin",
        "second * cos - first * sin",
        "tests/core/layers/test_rope.py tests/core/layers/test_blocks.py",
    ),
    Fault(
        "layers",
        "jaxserve/core/layers/norm.py",
        "(1.0 + weight if config.unit_offset else weight)",
        "(weight if config.unit_offset else weight)",
        "tests/core/layers/test_blocks.py",
    ),
    Fault(
        "families",
        "jaxserve/core/models/moe_config.py",
        "index >= num_dense for index",
        "index > num_dense for index",
        "tests/families/test_published_configs.py tests/families/test_parity.py",
    ),
    Fault(
        "families",
        "jaxserve/families/llama.py",
        "qkv_bias=bias, out_bias=bias",
        "qkv_bias=bias, out_bias=False",
        "tests/families/test_weight_sources.py tests/families/test_parity.py",
    ),
    Fault(
        "server",
        "jaxserve/server/keys.py",
        "return max(0, least)",
        "return least",
        "tests/server/test_keys.py",
    ),
    Fault(
        "server",
        "jaxserve/server/budget.py",
        "if budget.held + wanted > budget.limit:",
        "if budget.held > budget.limit:",
        "tests/server/test_body.py",
    ),
    Fault(
        "tokenizers",
        "jaxserve/tokenizers/stream.py",
        "piece[0] & 0xC0 != 0x80",
        "piece[0] & 0xC0 == 0x80",
        "tests/tokenizers/test_stream.py",
    ),
    Fault(
        "tokenizers",
        "jaxserve/tokenizers/stream.py",
        "self._pending = data[consumed:]",
        'self._pending = b""',
        "tests/tokenizers/test_stream.py",
    ),
    Fault(
        "structured",
        "jaxserve/features/grammars/matcher.py",
        "if self.version != version or not self._may_walk or self._has_ended",
        "if not self._may_walk or self._has_ended",
        "tests/features/grammars/test_drafts.py",
    ),
    Fault(
        "structured",
        "jaxserve/features/grammars/gbnf.py",
        "if not _RULE.search(grammar) or _LARK.search(grammar):",
        "if not _RULE.search(grammar):",
        "tests/features/grammars/test_gbnf.py",
    ),
    Fault(
        "kernels",
        "pallas_kernels/xla.py",
        "seen &= key_positions[:, None] > query_positions[:, :, None] - params.window",
        "seen &= key_positions[:, None] >= query_positions[:, :, None] - params.window",
        "tests/pallas_kernels/test_xla.py",
    ),
    Fault(
        "kernels",
        "pallas_kernels/cpu/paged_attention.cc",
        "std::max(int64_t{0}, tile.position - p.window + 1)",
        "std::max(int64_t{0}, tile.position - p.window + 2)",
        "tests/pallas_kernels/test_cpu.py",
    ),
)


def copy_sources(folder: Path) -> None:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for path in filter(None, listed.split("\0")):
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes((ROOT / path).read_bytes())


def find_catcher(fault: Fault, folder: Path) -> str | None:
    """Returns the first test that fails with the fault in the copy, None if all pass; leaves the copy as it was."""
    path = folder / fault.file
    text = path.read_text()
    assert text.count(fault.old) == 1, f"{fault.file} has no longer one: {fault.old}"
    path.write_text(text.replace(fault.old, fault.new))
    try:
        command = [sys.executable, "-m", "pytest", *OPTIONS, *fault.tests.split()]
        environment = os.environ | {"PYTHONPATH": str(folder)}
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    finally:
        path.write_text(text)
    if done.returncode == 0:
        return None
    found = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, flags=re.M)
    return found[1] if found else f"status {done.returncode}: {done.stdout[-200:]}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rooms", nargs="+", choices=sorted({fault.room for fault in FAULTS}))
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what was found there as well")
    args = parser.parse_args()
    results = []
    with tempfile.TemporaryDirectory() as folder:
        copy_sources(Path(folder))
        for fault in FAULTS:
            if args.rooms is None or fault.room in args.rooms:
                catcher = find_catcher(fault, Path(folder))
                results.append(asdict(fault) | {"catcher": catcher})
                print(f"{fault.room:<12}{fault.new.strip()[:70]}\n            {catcher or 'MISSED'}", flush=True)
    if args.json:
        args.json.write_text(json.dumps(results, indent=1) + "\n")
    return 1 if any(result["catcher"] is None for result in results) else 0


if __name__ == "__main__":
    sys.exit(main())

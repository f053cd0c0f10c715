"""Whether quantized checkpoints give the same greedy tokens on one device and on four."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

from tests.e2e.helpers import generate_ids, greedy, make_llm
from tests.golden_cases import load_case


def main() -> None:
    """Takes a golden case's name, a quantized folder made of it, an orbax one or "", and so on; prints flags."""
    arguments, same = sys.argv[1:], []
    for name, folder, converted in zip(arguments[0::3], arguments[1::3], arguments[2::3], strict=True):
        golden, four = load_case(name), {"tensor_parallel_size": 4}
        ways = [(folder, {}), (folder, four)]
        if converted:
            ways.append((converted, four))
        if "moe" in name:
            ways.append((folder, four | {"enable_expert_parallel": True}))
        found = [
            generate_ids(make_llm(dataclasses.replace(golden, path=Path(path)), **options), golden.prompts, greedy(16))
            for path, options in ways
        ]
        same.append(all(tokens == found[0] for tokens in found))
    print(json.dumps(same))

"""Device values reach the host in one line only: nothing in the step's path may wait for the device by accident."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[1] / "jaxserve"
STEP_PATH = [
    "core/runtime/runner.py",
    "features/host_tier/page_copies.py",
    "features/speculation/lookup_tokens.py",
    "features/speculation/lookups.py",
    "features/speculation/drafter.py",
    "features/host_tier/feature.py",
    "core/runtime/step.py",
    "core/runtime/device_state.py",
    "engine/engine.py",
    "engine/output.py",
]
WAITING = {"tolist", "item", "device_get", "block_until_ready", "asarray", "array"}
ALLOWED = {
    ("core/runtime/runner.py", "result"),
    ("core/runtime/runner.py", "warm_up"),
    ("core/runtime/runner.py", "warm_thread"),
    ("features/host_tier/page_copies.py", "_is_ready"),  # of copies that ran beside a step, when its results are taken
    ("features/host_tier/page_copies.py", "allocate"),  # as the next, at the start of an engine
    ("features/host_tier/page_copies.py", "time_copies"),
}
JNP = {"jnp"}  # jnp.asarray makes a device value, it does not fetch one


def find_fetches(path: str) -> list[str]:
    found = []
    for function in ast.walk(ast.parse((ROOT / path).read_text())):
        if not isinstance(function, ast.FunctionDef) or (path, function.name) in ALLOWED:
            continue
        for node in ast.walk(function):
            if not isinstance(node, ast.Call):
                continue
            if isinstance(node.func, ast.Attribute) and node.func.attr in WAITING:
                owner = node.func.value.id if isinstance(node.func.value, ast.Name) else ""
                if owner not in JNP:
                    found.append(f"{path}:{node.lineno} {ast.unparse(node.func)}")
            elif isinstance(node.func, ast.Name) and node.func.id == "float":
                found.append(f"{path}:{node.lineno} float()")
    return found


def test_only_the_future_fetches() -> None:
    assert [line for path in STEP_PATH for line in find_fetches(path)] == []


def test_the_rule_sees_what_it_forbids() -> None:
    assert "core/runtime/memory.py" not in STEP_PATH
    assert find_fetches("core/weights/place.py"), "new weights pass through the host, and the rule must see it there"


def test_device_put_stands_once() -> None:
    calls = [(ROOT / path).read_text().count("jax.device_put(") for path in [*STEP_PATH, "core/sharding.py"]]
    assert sum(calls) == 1

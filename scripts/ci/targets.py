"""The targets: what is run or skipped as a whole. Each has tests, or a command of the Makefile that has none."""

from __future__ import annotations

from dataclasses import dataclass

from scripts.ci.floors import FLOORS

# Read by tests alone: what they say about the docs is of no use to other targets.
DOCS = ("docs/", "README.md")
# The rules of the house read every file, so any change would run them: nothing is gained by keeping that they passed.
HOUSE = (
    "tests/test_layering.py",
    "tests/test_size.py",
    "tests/test_transfers.py",
    "tests/test_dependencies.py",
    "tests/test_install_lines.py",
    "tests/test_testing_page.py",
    "tests/test_ci.py",
)


@dataclass(frozen=True)
class Target:
    """`ci` and `full` are targets of the Makefile, for CI and for `make test-all`; None where it has no part in it.

    Inputs are the tests, what they import, the rooms below that, and `files`: paths, or folders if they end in a slash.
    Tests of a room that look above it are a target of their own (`inputs.split_target`), so that the others need not
    run when what lies above changes. `is_closed` says that `files` are all, and what these import is none.
    `has_rooms`: the rooms that the tests look into are inputs.
    """

    name: str
    tests: tuple[str, ...] = ()
    ci: str | None = "test"
    full: str | None = "test-full"
    files: tuple[str, ...] = ()
    rooms: tuple[str, ...] = ()
    is_closed: bool = False
    has_rooms: bool = True
    is_kept: bool = True


def _room(path: str, *more: str) -> Target:
    return Target(path.rpartition("/")[2], (f"tests/{path}", *more), rooms=(f"jaxserve.{path.replace('/', '.')}",))


TARGETS = (
    Target("lint", ci="lint", full="lint", is_kept=False),
    Target(
        "values",
        tuple(
            f"tests/test_{name}.py"
            for name in (
                *("config", "errors", "files", "quantization_config", "sampling_params", "speculative_config"),
                *("vllm_options", "vllm_names", "devices", "device_kinds", "gguf_file", "media_options"),
            )
        ),
        rooms=tuple(room for room, floor in FLOORS.items() if floor.startswith("F1")),
    ),
    *(_room(path) for path in ("workers", "media", "core/pages", "core/scheduler", "tokenizers", "features/grammars")),
    _room("core/layers", "tests/core/test_sharding.py"),
    _room("families", "tests/test_golden_cases.py"),
    *(_room(path) for path in ("core/sampling", "core/weights", "core/runtime", "features/quantization")),
    *(_room(f"features/{name}") for name in ("speculation", "host_tier", "lora", "bundle", "recording", "multinode")),
    *(_room(path) for path in ("engine", "tools/simulation")),
    Target("tools", ("tests/tools/test_convert.py", "tests/tools/test_doctor.py"), rooms=("jaxserve.tools.convert",)),
    Target("e2e", ("tests/e2e",), rooms=("jaxserve.engine",)),
    *(_room(f"tools/{name}") for name in ("bench", "cluster", "cli")),
    Target("scripts", ("tests/scripts",)),
    Target("deploy", ("tests/test_deploy.py", "tests/test_kubernetes.py"), files=("configs/deploy/",)),
    # Pages say much about the code, and would be tested with each change of it: `make test-all` does so.
    Target("docs", ci="test-docs", full="test-docs-full", files=(*DOCS, "configs/deploy/"), has_rooms=False),
    Target("server", ("tests/server",), ci="test-server", full="test-server-full"),
    # Before the kernels' tests, of which some use the compilers that it fetches.
    Target(
        "gate-kernels",
        ci="test-gate-kernels",
        full="test-gate-kernels-full",
        files=("scripts/test_kernels.py", "pallas_kernels/"),
        is_closed=True,
    ),
    Target(
        "gate-steps",
        ci="test-gate-steps",
        full="test-gate-steps-full",
        files=("scripts/test_kernels.py", "scripts/compile_step.py", "scripts/compile_tower.py"),
    ),
    Target(
        "kernels",
        ("tests/pallas_kernels",),
        ci="test-kernels",
        full="test-kernels-full",
        rooms=("pallas_kernels",),
    ),
    Target("oldest", ci="test-oldest", full="test-oldest-full"),
    Target(
        "bench-regression",
        ci="bench-regression",
        full="bench-regression",
        files=("scripts/bench_regression.py", "scripts/bench_regression.toml"),
    ),
    Target("nodes", ("tests/nodes", "tests/tools/cluster"), ci=None, full="test-cluster"),
    Target(
        "ray",
        ("tests/tools/cluster/test_ray_serve.py", "tests/tools/cluster/test_ray_options.py"),
        ci=None,
        full="test-ray",
    ),
    Target("agents", ("tests/agents",), ci=None, full="test-agents"),
    Target("attack", ci=None, full="attack", files=("scripts/attack_server.py",)),
    # Last, because it always runs: the output of CI ends with pytest's own lines.
    Target("house", HOUSE, is_kept=False),
)

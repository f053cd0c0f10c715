"""The floors of the house: a module imports from lower floors or its own package only."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

from scripts.ci.floors import FLOORS, HOST_ROOMS, find_room, is_allowed

ROOT = Path(__file__).parents[1]
QUANTIZATION = "jaxserve.features.quantization"  # a format of matrices, which drafters have like any model


def list_modules() -> list[tuple[str, Path]]:
    paths = [*(ROOT / "jaxserve").rglob("*.py"), *(ROOT / "pallas_kernels").rglob("*.py")]
    return [(".".join(p.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"), p) for p in sorted(paths)]


def list_imports(path: Path) -> list[str]:
    """Every import of the file, also inside functions and for type checkers only."""
    names = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide floors"
            names += [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]
    return names


def test_imports_go_down() -> None:
    wrong = []
    for module, path in list_modules():
        if module in ("jaxserve", "jaxserve.core", "jaxserve.tools", "jaxserve.demo"):
            continue  # the front door, which loads everything lazily, folders of rooms, and the model's files
        room = find_room(module)
        assert room is not None, f"{module} is on no floor: add it to FLOORS in scripts/ci/floors.py"
        targets = {imported: find_room(imported) for imported in list_imports(path)}
        wrong += [
            f"{module} ({FLOORS[room]}) imports {imported} ({FLOORS[target]})"
            for imported, target in targets.items()
            if target is not None and not is_allowed(room, target)
        ]
    assert not wrong, "\n".join(wrong)


def test_core_knows_no_feature() -> None:
    """Nor a tool; and of the features, only `choose.py` knows more than one."""
    wrong = []
    for module, path in list_modules():
        room = find_room(module) or ""
        above = [name for name in list_imports(path) if name.startswith(("jaxserve.features.", "jaxserve.tools."))]
        if room.startswith("jaxserve.core."):
            wrong += [f"{module} imports {name}" for name in above]
        elif room.startswith("jaxserve.features."):
            wrong += [f"{module} imports {name}" for name in above if find_room(name) not in (room, QUANTIZATION)]
    assert not wrong, "\n".join(wrong)


def test_no_modules_import_each_other() -> None:
    """Nor in a circle of several, nor for types only: a circle is one module in several files."""
    paths = {module: path for module, path in list_modules() if module != "jaxserve"}  # the front door names them all
    ahead = {
        module: [name for name in list_imports(path) if name in paths and name != module]
        for module, path in paths.items()
    }
    for circle in find_circles(ahead):
        raise AssertionError(" -> ".join(circle))


def find_circles(ahead: dict[str, list[str]]) -> list[list[str]]:
    """Walks of a graph that come back to where they were; none where there is none, each circle at least once."""
    circles: list[list[str]] = []
    done: set[str] = set()

    def walk(module: str, way: list[str]) -> None:
        if module in way:
            circles.append([*way[way.index(module) :], module])
        elif module not in done:
            for name in ahead[module]:
                walk(name, [*way, module])
            done.add(module)

    for module in ahead:
        walk(module, [])
    return circles


def test_circles_are_found() -> None:
    assert find_circles({"a": ["b", "c"], "b": ["c"], "c": [], "d": ["a"]}) == []
    assert find_circles({"a": ["b"], "b": ["c"], "c": ["b"]}) == [["b", "c", "b"]]


def test_pallas_kernels_stand_alone() -> None:
    for module, path in list_modules():
        if module.startswith("pallas_kernels"):
            roots = {name.split(".")[0] for name in list_imports(path)} - set(sys.stdlib_module_names)
            assert roots <= {"jax", "jaxlib", "numpy", "ml_dtypes", "pallas_kernels"}, f"{module} imports {roots}"


def find_loaded(imports: str, heavy: str) -> str:
    """Imports in a fresh interpreter; returns which of the heavy modules that loaded."""
    code = f"import sys, {imports}; print(*(set({heavy!r}.split()) & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    return done.stdout.strip()


def test_host_rooms_leave_jax_alone() -> None:
    assert find_loaded(", ".join(HOST_ROOMS), "jax numpy") == ""


def test_importing_jaxserve_loads_nothing_heavy() -> None:
    assert find_loaded("jaxserve", "jax numpy rich tokenizers flax llguidance") == ""
    assert find_loaded("jaxserve.core.layers.norm", "jax numpy") != "", "the check must see what is loaded"


def test_environment_is_read_in_config_only() -> None:
    for module, path in list_modules():
        text = path.read_text()
        if module != "jaxserve.config":
            assert "os.environ" not in text and "getenv" not in text, f"{module} reads the environment"

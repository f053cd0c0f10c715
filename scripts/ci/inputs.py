"""The inputs of a target: the files that it depends on. It errs on the side of too many.

A name in a string counts like an import.
"""

from __future__ import annotations

import ast
import hashlib
import re
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path

from scripts.ci.floors import ACCELERATOR_FILES, FLOORS, find_room, list_rooms_below
from scripts.ci.targets import Target

# What every target depends on. conftest.py sets up JAX and keeps programs; what it imports for that is no input of all.
COMMON = ("pyproject.toml", "Makefile", ".python-version", "tests/conftest.py", "tests/__init__.py")
FRONT_DOOR = "jaxserve/__init__.py"  # loads each of its names when it is asked for
_MODULES = re.compile(r"\b(?:jaxserve|pallas_kernels|tests|scripts)(?:\.\w+)+")
_FROM = re.compile(r"\bfrom (jaxserve|(?:jaxserve|pallas_kernels|tests|scripts)(?:\.\w+)*) import (\([^)]*\)|[^\n]*)")
_EVERYTHING = re.compile(r"'-m', 'jaxserve'|\bimport jaxserve\b(?!\.)|/ 'jaxserve'\)\.rglob")
_SCRIPTS = re.compile(r"'scripts'|\bscripts/")
# How a test names a GPU, a TPU, or a kernel for one.
_ACCELERATORS = re.compile(
    r"_interpret|[hH][12]00|[aA]100|\bv[56][ep]\b|'(?:gpu|cuda|tpu)'|\bTARGETS\b|find_target|trace_for"
    r"|\b(?:ampere|hopper|mosaic_gpu|tpu|tune|(?:compile|kernel)_gate|gate_(?:programs|report|shapes))\b"
)
_HOME = re.compile(r'^    "(\w+)": "(jaxserve[\w.]+)"', flags=re.M)
_TOP_ROOM = max(FLOORS, key=FLOORS.__getitem__)


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


class Repository:
    """The files that git knows or would add, by path."""

    def __init__(self, files: Mapping[str, bytes]) -> None:
        self.files = dict(files)
        self._code: dict[str, str] = {}
        self._modules: dict[str, set[str]] = {}

    @classmethod
    def read(cls, root: Path) -> Repository:
        command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        listed = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout
        paths = [path for path in listed.split("\0") if path and (root / path).is_file()]
        return cls({path: (root / path).read_bytes() for path in paths})

    def get_text(self, path: str) -> str:
        return self.files[path].decode()

    def read_code(self, path: str) -> str:
        """A module as Python writes it, with single quotes, without comments and docstrings."""
        if path not in self._code:
            tree = ast.parse(self.get_text(path))
            for node in ast.walk(tree):
                body = getattr(node, "body", None)
                if isinstance(body, list):
                    node.body = [each for each in body if not _is_text(each)] or [ast.Pass()]  # type: ignore[attr-defined]
            self._code[path] = ast.unparse(tree)
        return self._code[path]

    def list_under(self, place: str) -> list[str]:
        """A file, or the files of a folder."""
        folder = place.rstrip("/") + "/"
        return [path for path in self.files if path == place or path.startswith(folder)]

    @cached_property
    def homes(self) -> dict[str, str]:
        """The modules of the names that the package itself has."""
        return dict(_HOME.findall(self.get_text(FRONT_DOOR)))

    @cached_property
    def rooms(self) -> dict[str, list[str]]:
        """The files of each room; those that no room has are on the lowest floor."""
        found: dict[str, list[str]] = {room: [] for room in FLOORS}
        for path in self.files:
            if path.startswith(("jaxserve/", "pallas_kernels/")):
                module = path.removesuffix(".py").replace("/", ".")
                found[find_room(module) or "pallas_kernels"].append(path)
        return found

    def list_modules(self, path: str) -> set[str]:
        """Every module that a file names."""
        if path not in self._modules:
            self._modules[path] = self.find_modules(self.read_code(path))
        return self._modules[path]

    def find_modules(self, text: str) -> set[str]:
        names = set(_MODULES.findall(text))
        for module, imported in _FROM.findall(text):
            words = re.findall(r"\w+", re.sub(r"\bas \w+", "", imported))
            homes = self.homes if module == "jaxserve" else {}
            names |= {homes.get(word, f"{module}.{word}") for word in words}
        if _EVERYTHING.search(text):
            names.add(_TOP_ROOM)
        return names

    def find_file(self, module: str) -> str | None:
        """The file of tests or scripts that a dotted name is in, or lies in."""
        parts = module.split(".")
        for count in range(len(parts), 0, -1):
            stem = "/".join(parts[:count])
            for path in (f"{stem}.py", f"{stem}/__init__.py"):
                if path in self.files:
                    return path
        return None


def list_docs_tests(repository: Repository) -> list[str]:
    """The files with tests of what pages say."""
    files = [path for path in repository.files if path.startswith("tests/") and path.endswith(".py")]
    return [path for path in files if "pytest.mark.docs" in repository.get_text(path)]


def find_inputs(target: Target, repository: Repository, tests: Iterable[str] = ()) -> set[str]:
    """Returns the paths of a target's inputs. `tests` are what the Makefile gives it, beside its own."""
    places = [*target.tests, *(test.partition("::")[0] for test in tests), *target.files]
    files = {path for place in places for path in repository.list_under(place)}
    rooms: set[str] = set()
    if not target.is_closed:
        files, rooms = follow(files, repository)
    files |= {path for path in COMMON if path in repository.files} | set(_list_data(repository))
    if target.has_rooms:
        below = {path for room in rooms for below in list_rooms_below(room) for path in repository.rooms[below]}
        if not names_accelerator(files, repository):
            below = {path for path in below if not path.startswith(ACCELERATOR_FILES)}
        files |= below | ({FRONT_DOOR} if rooms else set())
    return files


def names_accelerator(files: Iterable[str], repository: Repository) -> bool:
    """Whether one of these tests and scripts names a GPU, a TPU, or a kernel for one."""
    read = (path for path in files if path.startswith(("tests/", "scripts/")) and path.endswith(".py"))
    read = (path for path in read if not path.startswith("scripts/ci/"))
    return any(_ACCELERATORS.search(repository.read_code(path)) for path in read)


def follow(files: Iterable[str], repository: Repository) -> tuple[set[str], set[str]]:
    """Returns these files with all tests and scripts that they use, and the rooms that they name."""
    waiting, found, rooms = list(files), set[str](), set[str]()
    while waiting:
        path = waiting.pop()
        if path in found:
            continue
        found.add(path)
        if path.startswith(("tests/", "scripts/")) and path.endswith(".py"):
            modules = repository.list_modules(path)
            rooms |= {room for module in modules for room in (find_room(module),) if room}
            waiting += _find_files(path, modules, repository)
    return found, rooms


def split_target(target: Target, repository: Repository, marks: Iterable[str]) -> list[Target]:
    """Returns the target without files that are wholly of these marks; apart, its tests that look above its rooms, and
    those that name an accelerator.
    """
    if not target.tests or not target.is_kept:
        return [target]
    pattern = re.compile(rf"^pytestmark = .*\b({'|'.join(marks)})\b", flags=re.M)
    files = [path for place in target.tests for path in repository.list_under(place)]
    files = [path for path in files if Path(path).name.startswith("test_") and path.endswith(".py")]
    files = sorted(path for path in files if not pattern.search(repository.get_text(path)))
    below = {below for room in target.rooms for below in list_rooms_below(room)}
    parts: dict[str, list[str]] = {target.name: [], f"{target.name}-above": [], f"{target.name}-devices": []}
    for path in files:
        used, rooms = follow([path], repository)
        if "pallas_kernels" not in target.rooms and names_accelerator(used, repository):
            parts[f"{target.name}-devices"].append(path)
        else:
            parts[f"{target.name}-above" if target.rooms and not rooms <= below else target.name].append(path)
    return [replace(target, name=name, tests=tuple(tests)) for name, tests in parts.items() if tests]


def _find_files(path: str, modules: Iterable[str], repository: Repository) -> list[str]:
    """What one of the tests and scripts imports of them, the fixtures beside it, and files that it names."""
    code, folder = repository.read_code(path), path.rpartition("/")[0]
    found = {repository.find_file(module) for module in modules if module.startswith(("tests.", "scripts."))}
    found.add(f"{folder}/conftest.py")
    beside = [p for p in repository.list_under(folder) if p.rpartition("/")[0] == folder and "/test_" not in p]
    words = set(re.findall(r"\w+", code)) if path.startswith("tests/") else _name_scripts(code)
    found |= {other for other in beside if Path(other).name.split(".")[0] in words}
    if path.startswith("tests/") and _SCRIPTS.search(code):
        named = _name_scripts(code)
        found |= {other for other in repository.list_under("scripts") if Path(other).name.split(".")[0] in named}
    return [other for other in found if other in repository.files and other not in COMMON]


def _name_scripts(code: str) -> set[str]:
    """Scripts import those beside them by their bare names, and other files are named with their endings."""
    imported = re.findall(r"\b(?:from|import) (\w+)", code)
    return {*imported, *re.findall(r"(\w+)\.(?:py|toml|json|ipynb|sh)\b", code)}


def _list_data(repository: Repository) -> list[str]:
    """Files that are no code and no page, which a test may read by any path: goldens, presets."""
    folders = ("tests/", "configs/")
    return [p for p in repository.files if p.startswith(folders) and not p.endswith((".py", ".md", ".js"))]


def make_digest(target: Target, command: str, inputs: Iterable[str], repository: Repository, machine: str) -> str:
    """What a pass is kept under: what is run, on what, and the content of each input."""
    digest = hashlib.sha256(f"{target.name}\0{command}\0{machine}\0".encode())
    for path in sorted(inputs):
        digest.update(path.encode() + b"\0" + hashlib.sha256(repository.files[path]).digest())
    return digest.hexdigest()

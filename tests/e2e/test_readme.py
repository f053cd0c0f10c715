"""The examples of README and docs/start.md print what stands below them, and README's install lines install."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from tests.programs import PROGRAMS

pytestmark = pytest.mark.docs

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
FIRST_STEPS = README + (ROOT / "docs" / "start.md").read_text()
PAGES = ("README.md", *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md")))
EXAMPLES = re.findall(r"```python\n(.*?)```\n+```text\n(.*?)```", FIRST_STEPS, flags=re.S)
SESSIONS = [  # a command of a console block, and what stands below it
    session.split("\n", 1)
    for block in re.findall(r"```console\n(.*?)```", FIRST_STEPS, flags=re.S)
    for session in block.removeprefix("$ ").split("\n$ ")
    if session.strip() != "jaxserve serve"
]
INSTALL_LINES = re.findall(r"^pip install [^#\n]*", README, flags=re.M)


def run(command: list[str] | str, folder: Path, **options: object) -> str:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    cache = folder / "cache" / "jaxserve"
    cache.mkdir(parents=True)
    (cache / "xla").symlink_to(PROGRAMS, target_is_directory=True)  # an example has no option for it
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PATH": path, "XDG_CACHE_HOME": str(cache.parent)}
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=folder, env=environment, timeout=280, **options
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def check_printed(printed: str, shown: str) -> None:
    """Compares lines, without the blanks around them; `...` stands for anything but nothing."""
    pattern = r".+?".join(re.escape(part) for part in shown.strip().split("..."))
    text = "\n".join(line.strip() for line in printed.strip().splitlines())
    assert re.fullmatch(pattern, text, flags=re.S), f"{text}\n--- where the page shows\n{shown}"


def test_what_is_printed_is_compared() -> None:
    check_printed("a story\n168\n", "...\n168\n")
    with pytest.raises(AssertionError):
        check_printed("a story\n169\n", "...\n168\n")
    assert len(EXAMPLES) >= 3 and len(SESSIONS) >= 5 and len(INSTALL_LINES) >= 4
    assert len(EXAMPLES) == FIRST_STEPS.count("```python\n"), "every example shows what it prints"


@pytest.mark.parametrize(("block", "shown"), EXAMPLES, ids=range(len(EXAMPLES)))
def test_python_example_prints_what_is_shown(block: str, shown: str, tmp_path: Path) -> None:
    script = tmp_path / "example.py"
    script.write_text(block)
    check_printed(run([sys.executable, str(script)], tmp_path), shown)


@pytest.mark.parametrize(("command", "shown"), SESSIONS, ids=[command for command, _ in SESSIONS])
def test_command_prints_what_is_shown(command: str, shown: str, tmp_path: Path) -> None:
    shell = re.sub(r"\bjaxserve (?=[a-z])", lambda _: f'"{sys.executable}" -m jaxserve ', command)
    check_printed(run(shell, tmp_path, shell=True), shown)


def test_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in set(re.findall(r"make ([a-z-]+)", FIRST_STEPS)):
        assert re.search(rf"^{target}:", makefile, flags=re.M), target


def list_anchors(text: str) -> set[str]:
    """Returns the fragments that lead to a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)", re.sub(r"```.*?```", "", text, flags=re.S), flags=re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_to_files_and_headings(page: str) -> None:
    text = (ROOT / page).read_text()
    for link in re.findall(r"\]\(((?!https?:)[^)\s]+)\)", re.sub(r"```.*?```", "", text, flags=re.S)):
        name, _, anchor = link.partition("#")
        target = (ROOT / page).parent / name if name else ROOT / page
        assert target.exists(), link
        assert not anchor or anchor in list_anchors(target.read_text()), link


def test_the_size_that_it_names_is_the_size() -> None:
    files = list((ROOT / "jaxserve" / "core").rglob("*.py"))
    lines = sum(len(file.read_text().splitlines()) for file in files)
    named = re.search(r"is ([\d,]+) lines of Python, in files of (\d+) on average", " ".join(README.split()))
    assert named is not None
    assert 0.95 < lines / int(named[1].replace(",", "")) < 1.05
    assert 0.9 < lines / len(files) / int(named[2]) < 1.1


@pytest.mark.slow
@pytest.mark.thorough
def test_install_lines_install(tmp_path: Path) -> None:
    """In a fresh environment; those for accelerators are resolved only. The command then works in an empty folder."""
    venv.create(tmp_path / "venv", with_pip=True)
    programs = tmp_path / "venv" / "bin"
    quiet = "--quiet --disable-pip-version-check"
    for line in INSTALL_LINES:
        dry = "--dry-run" if "[" in line else ""
        command = line.strip().replace("pip install", f"{programs}/pip install {quiet} {dry}")
        done = subprocess.run(command, shell=True, cwd=ROOT, capture_output=True, text=True, check=False, timeout=280)
        assert done.returncode == 0, f"{line}: {done.stderr[-2000:]}"
    empty = tmp_path / "empty"
    empty.mkdir()
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [programs / "jaxserve", "generate", "--chat", "What is 123 + 45?", "--temperature", "0"]
    done = subprocess.run(command, cwd=empty, capture_output=True, text=True, check=False, timeout=280, env=environment)
    assert done.returncode == 0 and done.stdout.strip().endswith("so the sum = 168"), done.stderr[-2000:]

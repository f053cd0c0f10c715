"""The script for TPU VMs, as far as a machine without a TPU can follow it: what it would run, and what it refuses."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from jaxserve.tools import cli

pytestmark = pytest.mark.thorough


SCRIPT = Path(__file__).parents[2] / "scripts" / "tpu_vm.sh"
OWN = ("JAXSERVE_API_KEY", "JAXSERVE_CLUSTER_TOKEN", "PYTHON", "TPU_WORKER_ID")  # what the script reads


def run_script(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    base = {name: value for name, value in os.environ.items() if name not in OWN}
    base |= {"PYTHON": sys.executable, **environment}
    return subprocess.run(
        ["bash", str(SCRIPT), *arguments], capture_output=True, text=True, check=False, env=base, timeout=60
    )


def list_commands(*arguments: str, **environment: str) -> list[list[str]]:
    """Returns the commands of a dry run."""
    done = run_script("--dry-run", *arguments, **environment)
    assert done.returncode == 0, done.stderr
    return [shlex.split(line.removeprefix("+ ")) for line in done.stdout.splitlines()]


def test_commands_of_a_first_run(tmp_path: Path) -> None:
    venv = tmp_path / "venv"
    flags = ["--tensor-parallel-size", "8"]
    make, install, check, serve = list_commands("--venv", str(venv), "some/model", "--", *flags)
    assert make[1:] == ["-m", "venv", str(venv)]
    assert install[-1] == f"{SCRIPT.parents[1]}[tpu]"
    assert check[:2] == ["env", "JAX_PLATFORMS=tpu,cpu"]
    assert serve[:4] == ["exec", "env", "JAX_PLATFORMS=tpu,cpu", f"{venv}/bin/jaxserve"]
    assert serve[4:] == ["serve", "some/model", "--host", "127.0.0.1", *flags]
    assert cli._make_parser().parse_args(serve[4:]).tensor_parallel_size == 8
    assert not venv.exists()


def test_listens_to_others_only_with_a_key(tmp_path: Path) -> None:
    commands = list_commands("--venv", str(tmp_path), JAXSERVE_API_KEY="a-key-of-some-length")
    assert commands[-1][4:] == ["serve", "demo", "--host", "0.0.0.0"]
    assert "a-key-of-some-length" not in str(commands)


def test_trial_without_a_tpu_installs_no_extra(tmp_path: Path) -> None:
    commands = list_commands("--venv", str(tmp_path), "--extra", "none", "--install-only")
    assert commands[1][-1] == str(SCRIPT.parents[1])
    assert len(commands) == 3 and "serve" not in commands[-1]


@pytest.mark.parametrize(
    ("arguments", "named"), [(["--frob"], "--frob"), (["--venv"], "--venv"), (["--extra", "cuda"], "cuda")]
)
def test_refuses_what_it_does_not_know(arguments: list[str], named: str) -> None:
    done = run_script(*arguments)
    assert done.returncode == 2 and named in done.stderr


def test_says_which_python_is_missing(tmp_path: Path) -> None:
    for tool in ("bash", "dirname"):
        (tmp_path / tool).symlink_to(shutil.which(tool) or tool)
    done = run_script("--dry-run", "--venv", str(tmp_path / "venv"), PYTHON="", PATH=str(tmp_path))
    assert done.returncode == 2 and "Python 3.12" in done.stderr


def test_help_lists_every_option() -> None:
    done = run_script("--help")
    assert done.returncode == 0
    for option in ("--venv", "--extra", "--install-only", "--dry-run", "--workers", "--zone", "--chips"):
        assert option in done.stdout


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
def test_shellcheck_has_nothing_to_say() -> None:
    done = subprocess.run(["shellcheck", str(SCRIPT)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


TOKEN = "a-token-of-some-length"
CLUSTER = {"JAXSERVE_CLUSTER_TOKEN": TOKEN}
SLICE = ("--workers", "pod", "--zone", "us-west4-a", "--chips", "16")


def test_a_slice_gets_the_checkout_and_starts_every_worker() -> None:
    archive, copy, start = list_commands(*SLICE, "some/model", "--", "--max-model-len", "4096", **CLUSTER)
    everywhere = ["--zone", "us-west4-a", "--worker", "all"]
    assert archive[0] == "tar" and archive[-3:] == ["-C", str(SCRIPT.parents[1]), "."]
    assert copy[:5] == ["gcloud", "compute", "tpus", "tpu-vm", "scp"] and copy[-5:] == ["pod:", *everywhere]
    assert start[4:7] == ["ssh", "pod", "--command"] and start[8:] == everywhere
    words = shlex.split(shlex.split(start[7])[2])
    assert words[-6:] == ["--of-slice", "16", "some/model", "--", "--max-model-len", "4096"]
    assert TOKEN not in str([archive, copy, start])


@pytest.mark.parametrize(
    ("worker", "flags"), [("0", ["--host", "127.0.0.1", "--tensor-parallel-size", "16"]), ("3", [])]
)
def test_worker_0_of_a_slice_serves_and_others_follow(worker: str, flags: list[str], tmp_path: Path) -> None:
    options = ("--venv", str(tmp_path), "--of-slice", "16", "some/model", "--", "--max-model-len", "4096")
    *_, serve = list_commands(*options, TPU_WORKER_ID=worker)
    own = ["--max-model-len", "4096"] if worker == "0" else []
    assert serve[4:] == ["serve", "some/model", *flags, *own]
    cli._make_parser().parse_args(serve[4:])


@pytest.mark.parametrize(
    ("arguments", "environment", "named"),
    [
        (("--workers", "pod", "--chips", "16"), CLUSTER, "--zone"),
        (("--workers", "pod", "--zone", "z"), CLUSTER, "--chips"),
        (SLICE, {}, "openssl rand -hex 32"),
        (("--zone", "z"), {}, "--workers"),
    ],
)
def test_a_slice_says_what_is_missing(arguments: tuple[str, ...], environment: dict[str, str], named: str) -> None:
    done = run_script("--dry-run", *arguments, **environment)
    assert done.returncode == 2 and named in done.stderr

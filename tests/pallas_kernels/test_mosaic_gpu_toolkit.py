"""CUDA compilers that miscompile the kernels are refused: the one that XLA would use says its version."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest

from pallas_kernels import resolve_impl
from pallas_kernels.mosaic_gpu import toolkit
from pallas_kernels.mosaic_gpu.toolkit import Version, find_compiler_obstacle, find_compilers, read_wheels
from pallas_kernels.spec import AttnShape, KVSpec

SHAPE = AttnShape(8, KVSpec(2, 128, 64, "bfloat16"), "bfloat16")
RELEASES = [
    ((12, 6, 85), False),
    ((12, 8, 61), True),
    ((12, 8, 93), True),
    ((12, 9, 41), True),
    ((12, 9, 86), False),
    ((13, 0, 48), False),
]


@pytest.fixture(autouse=True)
def _fresh_machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """JAX has a GPU, and no compiler is known."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    install(monkeypatch)
    find_compilers.cache_clear()
    yield
    find_compilers.cache_clear()


def install(
    monkeypatch: pytest.MonkeyPatch,
    *,
    linker: Version | None = None,
    path: Version | None = None,
    wheel: Version | None = None,
    runtime: Version | None = None,
) -> None:
    found = {toolkit._LINKERS: linker, toolkit._ASSEMBLERS: wheel}
    monkeypatch.setattr(toolkit, "read_wheels", lambda names: ((names[1], found[names]),) if found[names] else ())
    monkeypatch.setattr(toolkit, "read_ptxas", lambda: path)
    monkeypatch.setattr(toolkit, "read_runtime", lambda: runtime)


@pytest.mark.parametrize(("release", "is_bad"), RELEASES)
@pytest.mark.parametrize(
    ("source", "name"),
    [("linker", "nvidia-nvjitlink-cu12"), ("path", "ptxas on the PATH"), ("wheel", "nvidia-cuda-nvcc-cu12")],
)
def test_the_releases_between_are_refused(
    monkeypatch: pytest.MonkeyPatch, source: str, name: str, release: Version, is_bad: bool
) -> None:
    install(monkeypatch, **{source: release})
    obstacle = find_compiler_obstacle()
    assert (obstacle is not None) == is_bad
    assert obstacle is None or f"here {name} is {'.'.join(map(str, release))}" in obstacle


def test_the_first_that_xla_takes_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    good, bad = (12, 9, 86), (12, 8, 93)
    install(monkeypatch, linker=good, path=bad, wheel=bad, runtime=bad)
    assert find_compiler_obstacle() is None
    find_compilers.cache_clear()
    install(monkeypatch, path=good, wheel=bad, runtime=bad)
    assert find_compiler_obstacle() is None
    find_compilers.cache_clear()
    install(monkeypatch, path=bad, wheel=good)
    assert "ptxas on the PATH is 12.8.93" in (find_compiler_obstacle() or "")


@pytest.mark.parametrize(
    ("runtime", "is_bad"),
    [(None, False), ((12, 6, 0), False), ((12, 8, 0), True), ((12, 9, 0), True), ((13, 0, 0), False)],
)
def test_without_any_the_systems_runtime_tells(
    monkeypatch: pytest.MonkeyPatch, runtime: Version | None, is_bad: bool
) -> None:
    install(monkeypatch, runtime=runtime)
    assert (find_compiler_obstacle() is not None) == is_bad


@pytest.mark.parametrize(("impl", "kind"), [("gpu", "NVIDIA H200"), ("ampere", "NVIDIA L4")])
def test_such_a_machine_gets_portable_attention_and_no_kernel_by_name(
    monkeypatch: pytest.MonkeyPatch, impl: str, kind: str
) -> None:
    install(monkeypatch, wheel=(12, 8, 93))
    name, reason = resolve_impl(None, SHAPE, platform="gpu", device_kind=kind)
    assert name == "xla" and "portable attention" in reason and "nvidia-cuda-nvcc-cu12 is 12.8.93" in reason
    with pytest.raises(ValueError, match=r"cannot run: the compilers of CUDA 12\.8\.0 to 12\.9\.0"):
        resolve_impl(impl, SHAPE, platform="gpu", device_kind=kind)
    assert resolve_impl(f"{impl}_interpret", SHAPE, platform="cpu", device_kind="cpu")[0] == f"{impl}_interpret"
    assert resolve_impl(None, SHAPE, platform="tpu", device_kind="TPU v6 lite")[0] == "tpu"


def test_a_machine_without_a_gpu_plans_for_another(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, path=(12, 8, 93))
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    assert resolve_impl(None, SHAPE, platform="gpu", device_kind="NVIDIA H200")[0] == "gpu"


def test_what_is_installed_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    parts = tuple(int(part) for part in version("numpy").split(".") if part.isdecimal())
    assert read_wheels(("numpy", "no-such-wheel")) == (("numpy", parts),)
    plugin = SimpleNamespace(cuda_runtime_get_version=lambda: 12081)
    monkeypatch.setitem(sys.modules, f"{toolkit._PLUGINS[1]}._versions", plugin)
    monkeypatch.setitem(sys.modules, f"{toolkit._PLUGINS[0]}._versions", None)
    assert toolkit.read_runtime() == (12, 8, 1)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert toolkit.read_ptxas() is None
    tool = tmp_path / "ptxas"
    for text, found in (("echo 'release 12.8, V12.8.93'", (12, 8, 93)), ("echo unknown", None), ("exit 1", None)):
        tool.write_text(f"#!/bin/sh\n{text}\n")
        tool.chmod(0o755)
        assert toolkit.read_ptxas() == found

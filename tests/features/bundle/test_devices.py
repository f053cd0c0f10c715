"""Kinds of devices that programs are built for without them."""

from __future__ import annotations

from pathlib import Path

import pytest

from jaxserve.config import read_gpu_share
from jaxserve.errors import ConfigError, DeviceError
from jaxserve.features.bundle import devices as room


@pytest.mark.parametrize(
    ("name", "count", "topology"),
    [
        ("h200", 1, "1x1x1"),
        ("h200", 8, "1x1x8"),
        ("h200", 16, "1x2x8"),
        ("v5e", 1, "v5e:1x1"),
        ("v5e", 2, "v5e:2x2"),
        ("v5e", 8, "v5e:2x4"),
        ("v5e-16", 16, "v5e:4x4"),
        ("v5p", 1, "v5p:1x1x1"),
        ("v5p", 5, "v5p:2x2x2"),
        ("v5p-16", 16, "v5p:2x2x4"),
        ("v6e-4", 2, "v6e:2x2"),
        ("tpu7x", 8, "tpu7x:2x2x1"),
    ],
)
def test_a_kind_has_the_topology_for_so_many_devices(name: str, count: int, topology: str) -> None:
    assert room.find_build_target(name, count).topology == topology


@pytest.mark.parametrize("name", ["v5e-3", "v5e-", "h300", "", "h200-8", "cpu-2"])
def test_an_unknown_kind_is_refused_with_those_that_are_known(name: str) -> None:
    with pytest.raises(ConfigError, match=r"known are cpu, h200, .*v5e-\{1,4,8,16"):
        room.find_build_target(name, 1)


def test_gpus_that_fill_no_nodes_are_refused() -> None:
    with pytest.raises(ConfigError, match="tensor_parallel_size: 9 GPUs are not nodes of 8; use a multiple"):
        room.find_build_target("h200", 9)


@pytest.mark.parametrize(("name", "extra"), [("h200", "cuda13"), ("v5e-16", "tpu")])
def test_without_its_compiler_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, name: str, extra: str
) -> None:
    monkeypatch.setattr(room, "find_version", lambda package: None)
    with pytest.raises(DeviceError, match=rf"pip install '\.\[{extra}\]' in a checkout; no [GT]PU is needed"):
        room.open_build_devices(name, 16)


def test_of_a_gpu_the_share_that_jax_hands_out_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"):
        monkeypatch.delenv(name, raising=False)
    assert read_gpu_share() == 0.75
    monkeypatch.setenv("XLA_CLIENT_MEM_FRACTION", "0.9")
    assert read_gpu_share() == 0.9
    for wrong in ("much", "0", "1.5", "nan"):
        monkeypatch.setenv("XLA_CLIENT_MEM_FRACTION", wrong)
        with pytest.raises(ConfigError, match="XLA_CLIENT_MEM_FRACTION: must be above 0 and at most 1"):
            read_gpu_share()


def test_a_gpu_on_which_nothing_was_measured_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(room, "find_results", lambda kind: None)
    with pytest.raises(ConfigError, match=r"device: XLA measures .* on NVIDIA L4; build on one .* --allow-untuned"):
        room.refuse_untuned("l4", 1)
    for name in (None, "cpu", "v5e-16"):
        room.refuse_untuned(name, 1)
    monkeypatch.setattr(room, "find_results", lambda kind: tmp_path / f"{kind}.txtpb")
    room.refuse_untuned("l4", 1)


def test_this_machine_needs_no_name() -> None:
    found = room.open_build_devices(None, 1)
    assert found.is_here and found.memory is None and found.first.platform == "cpu"
    with pytest.raises(ConfigError, match="tensor_parallel_size"):
        room.open_build_devices(None, 1000)

"""Which devices each replica sees."""

from __future__ import annotations

from pathlib import Path

import pytest

from jaxserve.errors import ConfigError
from jaxserve.tools.cluster.device_share import share_devices


def make_devices(root: Path, *names: str) -> Path:
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    return root


def test_gpus_are_split_in_order(tmp_path: Path) -> None:
    root = make_devices(tmp_path, *(f"nvidia{index}" for index in range(12)), "nvidiactl", "nvidia-uvm")
    shares = share_devices(3, 4, {}, root=root)
    assert [share["CUDA_VISIBLE_DEVICES"] for share in shares] == ["0,1,2,3", "4,5,6,7", "8,9,10,11"]


def test_what_is_hidden_from_this_process_stays_hidden(tmp_path: Path) -> None:
    root = make_devices(tmp_path, *(f"nvidia{index}" for index in range(4)))
    shares = share_devices(2, 1, {"CUDA_VISIBLE_DEVICES": "GPU-aa, 3"}, root=root)
    assert [share["CUDA_VISIBLE_DEVICES"] for share in shares] == ["GPU-aa", "3"]
    assert share_devices(2, 1, {"CUDA_VISIBLE_DEVICES": ""}, root=root) == [{}, {}]
    shares = share_devices(1, 1, {"TPU_VISIBLE_CHIPS": "2,3"}, root=tmp_path / "none")
    assert shares[0]["TPU_VISIBLE_CHIPS"] == "2"


@pytest.mark.parametrize("names", [("accel0", "accel1", "accel2", "accel3"), ("vfio/0", "vfio/1", "vfio/2", "vfio/3")])
def test_chips_come_with_their_bounds(tmp_path: Path, names: tuple[str, ...]) -> None:
    root = make_devices(tmp_path, *names, "vfio/vfio")
    one = share_devices(4, 1, {}, root=root)
    assert [share["TPU_VISIBLE_CHIPS"] for share in one] == ["0", "1", "2", "3"]
    assert {share["TPU_CHIPS_PER_PROCESS_BOUNDS"] for share in one} == {"1,1,1"}
    two = share_devices(2, 2, {}, root=root)
    assert [share["TPU_VISIBLE_CHIPS"] for share in two] == ["0,1", "2,3"]
    assert all(share["TPU_CHIPS_PER_PROCESS_BOUNDS"] == "1,2,1" for share in two)
    assert all(share["TPU_PROCESS_BOUNDS"] == "1,1,1" for share in two)


def test_a_cpu_is_shared_by_all(tmp_path: Path) -> None:
    root = make_devices(tmp_path, "nvidia0")
    assert share_devices(3, 2, {"JAX_PLATFORMS": "cpu"}, root=root) == [{}, {}, {}]
    assert share_devices(3, 2, {}, root=tmp_path / "none") == [{}, {}, {}]


def test_too_few_devices_are_refused_with_what_fits(tmp_path: Path) -> None:
    root = make_devices(tmp_path, *(f"nvidia{index}" for index in range(4)))
    with pytest.raises(ConfigError, match=r"3 replicas of 2 .*6 GPUs.* 4; .*at most 2"):
        share_devices(3, 2, {}, root=root)
    with pytest.raises(ConfigError, match="tensor_parallel_size to 2"):
        share_devices(2, 8, {}, root=root)


def test_three_chips_are_no_part_of_a_host(tmp_path: Path) -> None:
    root = make_devices(tmp_path, *(f"accel{index}" for index in range(4)))
    with pytest.raises(ConfigError, match="1, 2, 4, 8, got 3"):
        share_devices(1, 3, {}, root=root)

"""The order of a mesh's devices."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from jaxserve import sharding


@pytest.fixture
def devices() -> list[Any]:
    """Four TPUs of two hosts, which JAX lists in turns."""
    return [SimpleNamespace(platform="tpu", process_index=number % 2, id=number) for number in range(4)]


def test_the_interconnect_decides_and_hosts_stay_together(monkeypatch: pytest.MonkeyPatch, devices: list[Any]) -> None:
    monkeypatch.setattr(sharding.mesh_utils, "create_device_mesh", lambda shape, given: np.array(given[::-1]))
    assert [device.id for device in sharding._order_devices(devices)] == [3, 1, 2, 0]


def test_hosts_stay_together_in_a_slice_without_an_order(
    monkeypatch: pytest.MonkeyPatch, devices: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: Any) -> Any:
        raise NotImplementedError("a part of a slice")

    monkeypatch.setattr(sharding.mesh_utils, "create_device_mesh", refuse)
    assert [device.id for device in sharding._order_devices(devices)] == [0, 2, 1, 3]
    assert "far apart: a part of a slice" in caplog.text

"""An installation or a driver that is broken is explained, once, where devices are first asked for."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from jaxserve import devices
from jaxserve.devices import find_devices, load_jax
from jaxserve.errors import DeviceError


def break_jax(monkeypatch: pytest.MonkeyPatch, platforms: str | None, error: Exception) -> None:
    """Lets JAX be one that fails when it is asked for its devices."""

    def fail() -> list[Any]:
        raise error

    fake = SimpleNamespace(config=SimpleNamespace(jax_platforms=platforms), devices=fail)
    monkeypatch.setattr(devices, "load_jax", lambda: fake)


@pytest.mark.parametrize(
    ("platforms", "error", "installed", "words"),
    [
        ("cuda", AssertionError(), (), ("JAX_PLATFORMS: ", "'cuda'", "not installed", "unset", ".[cuda13]")),
        ("tpu", RuntimeError("no libtpu.so"), (), ("JAX_PLATFORMS: ", "'tpu'", ".[tpu]")),
        ("cuda", RuntimeError("No visible GPU"), ("jax-cuda12-plugin",), ("No visible GPU", "nvidia-smi", "unset")),
        ("rocm", AssertionError(), (), ("'rocm'", "not installed", "jax[rocm7-local]")),
        ("rocm", RuntimeError("no agent"), ("jax-rocm7-plugin",), ("no agent", "rocm-smi", "unset")),
        ("abacus", RuntimeError("unknown"), (), ("'abacus' is not known", "cpu, cuda, rocm or tpu")),
        (None, RuntimeError("The TPU is in use"), ("libtpu",), ("devices: ", "The TPU is in use", "JAX_PLATFORMS=cpu")),
        (None, RuntimeError("x" * 5000 + "\n" * 30), (), ("devices: ",)),
    ],
)
def test_what_jax_says_becomes_one_line_of_advice(
    platforms: str | None,
    error: Exception,
    installed: tuple[str, ...],
    words: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    break_jax(monkeypatch, platforms, error)
    monkeypatch.setattr(devices, "find_version", lambda name: "1" if name in (*installed, "jaxlib") else None)
    with pytest.raises(DeviceError) as caught:
        find_devices()
    message = str(caught.value)
    assert (
        "\n" not in message and len(message) < 500 and message.endswith(f"{caught.value.reason}; {caught.value.advice}")
    )
    for word in words:
        assert word in message


def test_a_jax_that_cannot_be_imported_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jax", None)
    with pytest.raises(DeviceError, match=r"jax: .*pip install"):
        load_jax()


def find_fake_devices(monkeypatch: pytest.MonkeyPatch, platform: str) -> list[Any]:
    """Returns what is found where JAX has one device of a platform."""
    device = SimpleNamespace(platform=platform, device_kind="some device")
    fake = SimpleNamespace(config=SimpleNamespace(jax_platforms=None), devices=lambda: [device])
    monkeypatch.setattr(devices, "load_jax", lambda: fake)
    return find_devices()


@pytest.mark.parametrize("platform", ["cpu", "gpu", "rocm", "tpu"])
def test_devices_of_a_known_platform_are_found(platform: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_fake_devices(monkeypatch, platform)[0].platform == platform


@pytest.mark.parametrize("platform", ["METAL", "metal", "abacus"])
def test_devices_of_another_platform_are_refused(platform: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DeviceError) as caught:
        find_fake_devices(monkeypatch, platform)
    assert str(caught.value) == f"devices: {platform.lower()} is not supported; set JAX_PLATFORMS=cpu"


def test_a_metal_that_fails_is_refused_as_one_that_works(monkeypatch: pytest.MonkeyPatch) -> None:
    break_jax(monkeypatch, "METAL", RuntimeError("mps_client failed"))
    with pytest.raises(DeviceError, match=r"^devices: metal .*JAX_PLATFORMS=cpu$"):
        find_devices()

"""The directory of compiled programs, which are code: nobody else may write there."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from jaxserve.config import EngineConfig
from jaxserve.core.runtime.sizes import make_sizes
from jaxserve.engine.cache_dir import make_cache_dir
from tests.golden_cases import load_case

pytestmark = pytest.mark.skipif(os.name == "nt", reason="permissions of POSIX")


def test_a_directory_into_which_others_write_is_left_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    with caplog.at_level(logging.WARNING):
        config = make_cache_dir(EngineConfig.from_options(compilation_cache_dir=str(shared)))
    own = config.compile.cache_dir
    assert own is not None and own != shared and own.is_dir() and own.stat().st_mode & 0o077 == 0
    assert f"{shared} can be written by others" in caplog.text and "compilation_cache_dir" in caplog.text


def test_a_new_directory_is_the_users_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    before = os.umask(0)
    try:
        config = make_cache_dir(EngineConfig.from_options(compilation_cache_dir=str(tmp_path / "new")))
    finally:
        os.umask(before)
    assert config.compile.cache_dir == tmp_path / "new" and caplog.records == []
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o755


def test_kernels_are_not_loaded_from_there_either(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`plan` and `doctor` choose kernels without an engine."""
    from jaxserve.families.registry import parse_config

    loaded: list[Path | None] = []
    monkeypatch.setattr("jaxserve.core.runtime.sizes.load_cpu_kernels", loaded.append)
    model = parse_config(load_case("llama_gqa").config).with_max_model_len(64)
    config = EngineConfig.from_options(compilation_cache_dir=str(tmp_path))
    for mode, expected in ((0o777, None), (0o755, tmp_path)):
        tmp_path.chmod(mode)
        make_sizes(config, model, "cpu", "cpu")
        assert loaded.pop() == expected

"""Compiling many programs at once, and one that a step needs."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.compilation_cache import compilation_cache

from jaxserve.core.runtime import compile as room
from jaxserve.core.runtime.buckets import make_buckets
from jaxserve.core.runtime.program_cache import enable_persistent_cache
from jaxserve.core.runtime.programs import Programs
from jaxserve.core.runtime.step_programs import list_programs, name_program
from jaxserve.errors import MissingProgramError


class FakeCompiler:
    """Makes texts of programs; `fails` names one that does not compile."""

    def __init__(self, fails: tuple[str, Any] | None = None, seconds: float = 0.0) -> None:
        self.begun: list[tuple[str, Any]] = []
        self._fails, self._seconds = fails, seconds

    def compile(self, kind: str, key: Any) -> str:
        self.begun.append((kind, key))
        if (kind, key) == self._fails:
            raise MemoryError("too large")
        time.sleep(self._seconds)
        return name_program(kind, key)


def test_every_program_of_the_table_is_compiled_once_and_told() -> None:
    compiler, told = FakeCompiler(), []
    table = make_buckets("cpu", 8, 128)
    wanted = list(list_programs(table))
    programs = room.compile_programs(compiler.compile, wanted, progress=lambda *event: told.append(event))  # type: ignore[arg-type]
    assert sorted(map(str, compiler.begun)) == sorted(map(str, wanted)) and len(programs) == len(wanted)
    assert [(done, total) for _, done, total, _ in told] == [(n, len(wanted)) for n in range(1, len(wanted) + 1)]
    names = {name for name, _, _, _ in told}
    assert {
        "decode 2",
        "decode 8",
        "prompt logprobs 128",
        "sample 8 greedy",
        "logprobs 2",
        "embed 8",
        "set row",
    } <= names
    assert len(names) == len(wanted)
    again = FakeCompiler()
    assert len(room.compile_programs(again.compile, wanted, known=programs)) == len(wanted) and again.begun == []  # type: ignore[arg-type]


def test_programs_of_the_persistent_cache_are_counted_as_loaded(tmp_path: Path) -> None:
    wanted = [("embed", rows) for rows in range(1, 4)]
    settings = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = {name: getattr(jax.config, name) for name in settings}
    told: list[int] = []

    def make(kind: str, rows: int) -> Any:
        return jax.jit(lambda x: x * 3.25 + rows).lower(jnp.zeros((rows, 7))).compile()

    try:
        enable_persistent_cache(tmp_path)
        for _ in range(2):
            room.compile_programs(make, wanted, progress=lambda *event: told.append(event[3]))
            jax.clear_caches()
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()
    assert told == [0, 0, 0, 1, 2, 3]


def test_a_program_that_does_not_compile_ends_the_others_that_have_not_begun() -> None:
    wanted = [("embed", rows) for rows in range(200)]
    compiler = FakeCompiler(fails=("embed", 0), seconds=0.1)
    with pytest.raises(MemoryError, match="too large"):
        room.compile_programs(compiler.compile, wanted, threads=1)  # type: ignore[arg-type]
    assert len(compiler.begun) < 200


def test_a_closed_set_has_no_more_programs_and_an_open_one_compiles_each_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(MissingProgramError, match="no embed program was compiled for 4"):
        Programs().get("embed", 4)
    compiler, told = FakeCompiler(), []
    monkeypatch.setattr(room, "_NOTICEABLE", 0.0)
    programs = Programs(compile_missing=room.compile_late(compiler, told.append))  # type: ignore[arg-type]
    assert [programs.get("embed", 4), programs.get("embed", 4), programs.get("logprobs", (4, 1))] == [
        "embed 4",
        "embed 4",
        "logprobs 4",
    ]
    assert compiler.begun == [("embed", 4), ("logprobs", (4, 1))] and len(programs) == 2
    assert [line.split(" in ")[0] for line in told] == ["compiled embed 4", "compiled logprobs 4"]
    assert len(programs.copy()) == 2 and programs.copy().get("set_row", None) == "set row" and len(programs) == 2


@pytest.mark.parametrize(
    ("platform", "quantization", "passes"),
    [
        ("tpu", "int8", None),
        ("gpu", None, "rematerialization"),
        ("cuda", "int8", "rematerialization,slice-sinker"),
    ],
)
def test_steps_on_gpus_leave_out_passes_of_xla(platform: str, quantization: str | None, passes: str | None) -> None:
    """Also for devices that are not here, which JAX calls cuda: the gate finds what these passes would do."""
    replicated: Any = SimpleNamespace(device_set=[SimpleNamespace(platform=platform)])
    given = {"xla_gpu_some": True}
    options = room.list_compiler_options(replicated, given, is_quantized=quantization is not None)
    assert options == (None if passes is None else {"xla_disable_hlo_passes": passes, **given})


@pytest.mark.parametrize("has_tiles", [False, True])
def test_only_a_cpu_with_tiles_has_options(monkeypatch: pytest.MonkeyPatch, has_tiles: bool) -> None:
    monkeypatch.setattr(room, "has_tiles", lambda: has_tiles)
    for platform in ("cpu", "tpu"):
        replicated: Any = SimpleNamespace(device_set=[SimpleNamespace(platform=platform)])
        options = room.list_compiler_options(replicated, {}, is_quantized=False)
        assert options == ({"xla_cpu_prefer_vector_width": 512} if has_tiles and platform == "cpu" else None)

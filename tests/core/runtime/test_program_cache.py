"""Programs kept between starts: entries that were cut are replaced, and a disk that takes none is said once."""

from __future__ import annotations

import logging
import os
import resource
import stat
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax._src import compilation_cache
from jax.experimental.compilation_cache import compilation_cache as jax_cache

from jaxserve.core.runtime import program_cache as room
from jaxserve.core.runtime.program_cache import enable_persistent_cache

NUM_PROGRAMS = 3
SETTINGS = (
    "jax_compilation_cache_dir",
    "jax_persistent_cache_min_compile_time_secs",
    "jax_persistent_cache_min_entry_size_bytes",
    "jax_persistent_cache_enable_xla_caches",
)
HITS: list[str] = []


@pytest.fixture(autouse=True)
def _hear(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Sends the room's log to `caplog`, also where a server has taken its library's log for itself."""
    monkeypatch.setattr(room._log, "propagate", False)
    caplog.set_level(logging.WARNING, logger=room._log.name)
    room._log.addHandler(caplog.handler)
    yield
    room._log.removeHandler(caplog.handler)


@pytest.fixture(autouse=True)
def _count_hits() -> Iterator[None]:
    def listen(event: str, **_: object) -> None:
        if event == "/jax/compilation_cache/cache_hits":
            HITS.append(event)

    jax.monitoring.register_event_listener(listen)
    yield
    jax.monitoring.unregister_event_listener(listen)


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[Path]:
    """An empty directory; JAX's settings are put back afterwards."""
    before = {name: getattr(jax.config, name) for name in SETTINGS}
    yield tmp_path / "programs"
    for name, value in before.items():
        jax.config.update(name, value)
    jax_cache.reset_cache()


def start(directory: Path, threads: int = 1) -> int:
    """Compiles the programs as a new process would, and returns how many came from the cache."""
    jax_cache.reset_cache()
    enable_persistent_cache(directory)

    def compile_all() -> None:
        for size in range(1, NUM_PROGRAMS + 1):
            lowered = jax.jit(lambda x: jnp.sin(x) * 2 + 1).lower(jax.ShapeDtypeStruct((size,), jnp.float32))
            assert lowered.compile()(jnp.zeros(size))[0] == 1.0

    HITS.clear()
    workers = [threading.Thread(target=compile_all) for _ in range(threads - 1)]
    for worker in workers:
        worker.start()
    compile_all()
    for worker in workers:
        worker.join()
    return len(HITS)


def entries(directory: Path) -> list[Path]:
    return sorted(file for file in directory.iterdir() if file.name.startswith("jit__lambda"))


def cut_half(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


DAMAGE: dict[str, Callable[[Path], None]] = {
    "half": cut_half,
    "empty": lambda file: os.truncate(file, 0),
    "garbage": lambda file: file.write_bytes(b"x" * 100),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_entries_are_replaced(cache: Path, caplog: pytest.LogCaptureFixture, damage: str) -> None:
    assert start(cache) == 0
    total = start(cache)
    whole = [file.stat().st_size for file in entries(cache)]
    assert total >= NUM_PROGRAMS == len(whole) and not caplog.records
    for file in cache.iterdir():
        DAMAGE[damage](file)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert start(cache) == 0
    assert [record.getMessage() for record in caplog.records] == [
        f"a compiled program in {cache} could not be read: it is written anew"
    ]
    assert start(cache) == total
    assert all(abs(file.stat().st_size - size) < 100 for file, size in zip(entries(cache), whole, strict=True))
    assert not [file for file in cache.iterdir() if file.name.startswith(".")]


def full_disk() -> Callable[[], None]:
    """Lets no process write a file beyond some bytes; returns what ends it."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64, before[1]))
    return lambda: resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_is_one_warning_and_leaves_nothing_cut(cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    cache.mkdir()
    release = full_disk()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert start(cache, threads=4) == 0
    finally:
        release()
    (record,) = caplog.records
    assert record.levelno == logging.WARNING and "compilation_cache_dir" in record.getMessage()
    assert "File too large" in record.getMessage() and str(cache) in record.getMessage()
    assert list(cache.iterdir()) == []
    assert start(cache) == 0
    assert start(cache) >= NUM_PROGRAMS, "the disk has room again"


@pytest.fixture
def read_only(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], None]]:
    """Makes the cache read-only; root may write everywhere, and is refused as a read-only disk refuses."""

    def close() -> None:
        cache.chmod(stat.S_IRUSR | stat.S_IXUSR)
        if os.geteuid() == 0:
            refuse = OSError(30, "Read-only file system", str(cache))
            for name in ("mkdtemp", "TemporaryFile"):
                monkeypatch.setattr(tempfile, name, lambda *args, **kwargs: (_ for _ in ()).throw(refuse))

    yield close
    if cache.exists():
        cache.chmod(stat.S_IRWXU)


def test_a_read_only_directory_is_read_and_said_once(
    cache: Path, read_only: Callable[[], None], caplog: pytest.LogCaptureFixture
) -> None:
    assert start(cache) == 0
    total = start(cache)
    read_only()
    assert start(cache) == total and not caplog.records, "nothing had to be written"
    assert jax.config.jax_persistent_cache_enable_xla_caches == "none"
    for file in entries(cache):
        cut_half(file)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert start(cache, threads=4) == total - NUM_PROGRAMS
    (record,) = caplog.records
    assert record.levelno == logging.WARNING and "cannot be written" in record.getMessage()


def test_several_processes_write_one_entry(cache: Path) -> None:
    """Each store stands for a process: none sees a part of what another writes."""
    enable_persistent_cache(cache)
    stores = [compilation_cache.get_file_cache(str(cache)) for _ in range(4)]
    values = [bytes([number]) * 100_000 for number in range(4)]
    wrong = []

    def work(number: int) -> None:
        store = stores[number][0]  # type: ignore[index]
        for _ in range(50):
            store.put("key", values[number])
            if store.get("key") not in values:
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == [] and len(list(cache.iterdir())) == 1


def test_what_a_killed_process_left_is_removed(cache: Path) -> None:
    for name, age in ((".writing-old", 7200), (".writing-new", 0)):
        (cache / name).mkdir(parents=True)
        (cache / name / "part").write_bytes(b"x")
        modified = (cache / name).stat().st_mtime - age
        os.utime(cache / name, (modified, modified))
    enable_persistent_cache(cache)
    assert [folder.name for folder in cache.iterdir()] == [".writing-new"]


def test_a_cache_that_evicts_stays_jaxs_own(cache: Path) -> None:
    opened = room._open_store(lambda path: ("store", path), str(cache))
    assert opened is not None and isinstance(opened[0], room.ProgramStore)
    before = jax.config.jax_compilation_cache_max_size
    jax.config.update("jax_compilation_cache_max_size", 10**6)
    try:
        assert room._open_store(lambda path: ("store", path), str(cache)) == ("store", str(cache))
    finally:
        jax.config.update("jax_compilation_cache_max_size", before)
    assert room._open_store(lambda path: ("store", path), "gs://bucket") == ("store", "gs://bucket")
    assert room._open_store(lambda path: None, str(cache)) is None


def test_a_jax_without_that_function_keeps_its_own_store(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("jax._src.compilation_cache.get_file_cache")
    assert room._replace_store() is False
    enable_persistent_cache(cache)
    assert jax.config.jax_compilation_cache_dir == str(cache)


def test_another_directory_takes_effect(cache: Path) -> None:
    assert start(cache / "first") == 0
    enable_persistent_cache(cache / "second")
    jax.jit(lambda x: x + 1).lower(jax.ShapeDtypeStruct((7,), jnp.float32)).compile()
    assert entries(cache / "second")

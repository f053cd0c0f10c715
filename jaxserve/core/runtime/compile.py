"""Compiles programs: a whole table before the engine is ready, or one when a step needs it."""

from __future__ import annotations

import functools
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.sharding import AbstractMesh, Sharding

from jaxserve.core.runtime.programs import ProgramKey, Programs
from jaxserve.core.runtime.step_programs import EnginePrograms, name_program
from pallas_kernels.cpu.library import has_tiles

Progress = Callable[[str, int, int, int], None]  # (what was done, how many, of how many, how many from the cache)

_log = logging.getLogger(__name__)
_NOTICEABLE = 0.5  # seconds; users are told of compilations that take as long, which cached programs do not
_COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"  # also sent when the persistent cache has the program
_CACHE_EVENT = "/jax/compilation_cache/cache_hits"


@functools.cache  # one listener per process
def watch_compiles() -> Callable[[], int]:
    """Returns a function that counts the process's XLA compilations since the first `watch_compiles`, cached or not."""
    count = 0

    def listen(event: str, seconds: float, **_: Any) -> None:
        nonlocal count
        del seconds
        if event == _COMPILE_EVENT:
            count += 1

    jax.monitoring.register_event_duration_secs_listener(listen)
    return lambda: count


class _Loads(threading.local):
    """How many programs a thread has got from the persistent cache. JAX tells the thread that asked."""

    count = 0


@functools.cache  # one listener per process
def _watch_loads() -> _Loads:
    loads = _Loads()

    def listen(event: str, **_: Any) -> None:
        if event == _CACHE_EVENT:
            loads.count += 1

    jax.monitoring.register_event_listener(listen)
    return loads


@dataclass(frozen=True)
class ProgramCompiler:
    """Compiles any program of one engine."""

    programs: EnginePrograms
    trace: Callable[[], AbstractContextManager[Any]] = nullcontext  # in which kernels see devices that are not here
    options: Mapping[str, Any] = field(default_factory=dict)  # of the compiler, for such devices

    def trace_program(self, kind: str, key: Any) -> Any:
        """Traces a program, for the caller to lower for any platform."""
        with self.trace():  # entered anew: a context is its thread's
            return self._trace(kind, key)

    def compile(self, kind: str, key: Any) -> Any:
        """Returns a compiled program."""
        with self.trace():
            return self._trace(kind, key).lower().compile()

    def _trace(self, kind: str, key: Any) -> Any:
        program, programs = self.programs.make(kind, key), self.programs
        if not program.has_products:
            return program.trace()
        is_quantized = programs.model.config.quantization is not None
        return program.trace(list_compiler_options(programs.inputs.replicated, self.options, is_quantized=is_quantized))


def list_compiler_options(
    replicated: Sharding, given: Mapping[str, Any], *, is_quantized: bool
) -> dict[str, Any] | None:
    """Returns the compiler's options for a program with products: vectors of a CPU, passes that a GPU's leaves out.

    A CPU with tiles (AMX) has vectors of 512 bits that do not slow its clock. XLA takes 256 unless it is told, with
    which SiLU needs 1.7 times as long (jax 0.12.0.1). Other CPUs keep XLA's choice.

    Rematerialization counts each update of the donated pool as a copy. So every step seems not to fit, and it runs 36
    kernels of an 8B decode step again, the first layer's qkv product among them, to save 7 MB (jax 0.11.2 and
    0.12.0.1). The slice-sinker would convert the quantized matrices of all layers to 16 bits in front of the first (jax
    0.12.0.1): 270 MB for eight layers of 17 MB each.

    Args:
        replicated: a sharding over the engine's devices.
        given: other options, for devices that are not here.
    """
    is_abstract = isinstance(getattr(replicated, "mesh", None), AbstractMesh)
    platform = None if is_abstract else next(iter(replicated.device_set)).platform
    if platform == "cpu" and has_tiles():
        return {"xla_cpu_prefer_vector_width": 512}
    if platform not in ("gpu", "cuda"):
        return None
    passes = ["rematerialization", *(["slice-sinker"] if is_quantized else [])]
    return {"xla_disable_hlo_passes": ",".join(passes), **given}


def compile_programs(
    make: Callable[[str, Any], Any],
    wanted: Iterable[ProgramKey],
    *,
    threads: int = 0,
    progress: Progress | None = None,
    known: Programs | None = None,
) -> Programs:
    """Returns the programs in `known` and in `wanted`. XLA releases the GIL, so missing ones compile in threads.

    Args:
        make: compiles, or loads, the program of a kind and key.
        threads: how many compile at once; 0: one per core, at most 8.
    """
    threads = threads or min(8, os.cpu_count() or 1)
    programs = Programs() if known is None else known.copy()
    loads, num_loaded = _watch_loads(), 0

    def make_one(kind: str, key: Any) -> tuple[Any, bool]:
        before = loads.count
        return make(kind, key), loads.count > before

    with ThreadPoolExecutor(threads, thread_name_prefix="compile") as pool:
        jobs = {pool.submit(make_one, *each): each for each in wanted if each not in programs}
        try:
            for done, job in enumerate(as_completed(jobs), 1):
                kind, key = jobs[job]
                program, was_loaded = job.result()
                programs.add(kind, key, program)
                num_loaded += was_loaded
                if progress is not None:
                    progress(name_program(kind, key), done, len(jobs), num_loaded)
        except BaseException:  # Ctrl-C, or a program that does not compile: drop those not begun
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return programs


def compile_late(compiler: ProgramCompiler, announce: Callable[[str], None]) -> Callable[[str, Any], Any]:
    """Returns a `Programs.compile_missing` that compiles a program, logs it, and announces it if it took long."""

    def compile_missing(kind: str, key: Any) -> Any:
        start = time.perf_counter()
        program = compiler.compile(kind, key)
        seconds = time.perf_counter() - start
        _log.info("compiled %s in %.1f s", name_program(kind, key), seconds)
        if seconds >= _NOTICEABLE:
            announce(f"compiled {name_program(kind, key)} in {seconds:.1f} s: a step needed it")
        return program

    return compile_missing

"""Programs of an engine: one before it is compiled, and the compiled ones by kind and key."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import jax

from jaxserve.core.runtime.memory import DeviceUse
from jaxserve.errors import MissingProgramError

type ProgramKey = tuple[str, Any]  # (kind, key), as `Programs.get` takes them


class StoredPrograms(Protocol):
    """Programs of an engine that were compiled before, and the KV pages and snapshots that they are for."""

    @property
    def num_pages(self) -> tuple[int, ...]:
        """The pages of each KV group."""
        ...

    @property
    def num_snapshots(self) -> int:
        """Those of recurrent states."""
        ...

    @property
    def use(self) -> DeviceUse | None:
        """Bytes of a device that the programs take; None on CPU."""
        ...

    def load(self, kind: str, key: Any) -> Any:
        """Returns a compiled program."""
        ...


@dataclass(frozen=True)
class Program:
    """A program to compile: a pure function, and the abstract values of its arguments.

    The function returns its donated arguments first, in their order and with their shardings, then its results.
    """

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    results: tuple[Any, ...] = ()  # the sharding of each result, or of each of its leaves
    donated: tuple[int, ...] = ()  # which of the arguments
    has_products: bool = False  # products with weights or states, for which compilers have options

    def trace(self, options: Mapping[str, Any] | None = None) -> Any:
        """Traces the program, for the caller to lower; `options` are those of the compiler."""
        kept = (jax.tree.map(lambda spec: spec.sharding, self.arguments[index]) for index in self.donated)
        outputs = (*kept, *self.results)
        jitted = jax.jit(
            self.function,
            donate_argnums=self.donated,
            out_shardings=outputs if len(outputs) > 1 else outputs[0],
            compiler_options=None if options is None else dict(options),
        )
        return jitted.trace(*self.arguments)


class Programs:
    """Compiled programs by kind and key. The set is closed unless there is a `compile_missing`.

    Args:
        compile_missing: (kind, key) -> the program.
    """

    def __init__(self, compile_missing: Callable[[str, Any], Any] | None = None) -> None:
        self.compile_missing = compile_missing
        self._by_kind: dict[str, dict[Any, Any]] = {}

    def get(self, kind: str, key: Hashable) -> Any:
        """Returns a program, compiled now if the set is open; MissingProgramError if a closed set lacks it."""
        try:
            return self._by_kind[kind][key]
        except KeyError:
            pass
        if self.compile_missing is None:
            known = list(self.of_kind(kind))
            raise MissingProgramError(f"no {kind} program was compiled for {key}; there are {known}")
        program = self.compile_missing(kind, key)
        self.add(kind, key, program)
        return program

    def add(self, kind: str, key: Hashable, program: Any) -> None:
        """Adds a compiled program."""
        self._by_kind.setdefault(kind, {})[key] = program

    def of_kind(self, kind: str) -> Mapping[Any, Any]:
        """Returns the programs of a kind by key, in the order in which they were added."""
        return self._by_kind.get(kind, {})

    def copy(self) -> Programs:
        """Returns a set of the same programs, to which others can be added."""
        copied = Programs(self.compile_missing)
        copied._by_kind = {kind: dict(programs) for kind, programs in self._by_kind.items()}
        return copied

    def __contains__(self, key: ProgramKey) -> bool:
        return key[1] in self.of_kind(key[0])

    def __len__(self) -> int:
        return sum(map(len, self._by_kind.values()))


def call_program(program: Any, *arguments: Any) -> Any:
    """Runs a program that has host arrays among its arguments: one costs the host a tenth of a `device_put`."""
    with jax.transfer_guard_host_to_device("allow"):
        return program(*arguments)

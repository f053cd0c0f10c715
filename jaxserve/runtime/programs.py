"""The compiled programs of an engine."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from jaxserve.errors import MissingProgramError
from jaxserve.runtime.buckets import Bucket
from jaxserve.runtime.rows import SampleVariant


@dataclasses.dataclass(frozen=True)
class Programs:
    """The compiled programs, by kind. The set is closed unless there is a `compile_missing`."""

    forward: dict[Bucket, Any] = dataclasses.field(default_factory=dict)
    sample: dict[tuple[int, int, SampleVariant], Any] = dataclasses.field(default_factory=dict)  # by rows and width
    loop: dict[tuple[int, SampleVariant], Any] = dataclasses.field(default_factory=dict)
    draft: dict[int, Any] = dataclasses.field(default_factory=dict)  # by rows
    logprobs: dict[tuple[int, int], Any] = dataclasses.field(default_factory=dict)  # by rows and width
    prompt_logprobs: dict[Bucket, Any] = dataclasses.field(default_factory=dict)
    pool: dict[int, Any] = dataclasses.field(default_factory=dict)  # by rows
    zeros: dict[None, Any] = dataclasses.field(default_factory=dict)
    set_row: dict[None, Any] = dataclasses.field(default_factory=dict)
    look_up: dict[int, Any] = dataclasses.field(default_factory=dict)  # by rows
    write_rows: dict[None, Any] = dataclasses.field(default_factory=dict)
    write_answers: dict[None, Any] = dataclasses.field(default_factory=dict)
    read_pages: dict[int, Any] = dataclasses.field(default_factory=dict)  # by KV group
    write_pages: dict[int, Any] = dataclasses.field(default_factory=dict)
    compile_missing: Callable[[str, Any], Any] | None = None  # (kind, key) -> the program

    def get(self, kind: str, key: Any) -> Any:
        """Returns a program, compiled now if the set is open; MissingProgramError if a closed set lacks it."""
        programs = getattr(self, kind)
        if key not in programs:
            if self.compile_missing is None:
                raise MissingProgramError(f"no {kind} program was compiled for {key}; there are {list(programs)}")
            programs[key] = self.compile_missing(kind, key)
        return programs[key]

    def copy(self) -> Programs:
        """Returns a shallow copy, to which programs can be added."""
        return dataclasses.replace(self, **{kind: dict(getattr(self, kind)) for kind in PROGRAM_KINDS})

    def __len__(self) -> int:
        return sum(len(getattr(self, kind)) for kind in PROGRAM_KINDS)


def call_program(program: Any, *arguments: Any) -> Any:
    """Runs a program that has host arrays among its arguments: one costs the host a tenth of a `device_put`."""
    with jax.transfer_guard_host_to_device("allow"):
        return program(*arguments)


PROGRAM_KINDS = tuple(each.name for each in dataclasses.fields(Programs) if each.name != "compile_missing")

"""Which programs an engine needs, and their names for users."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from jaxserve.runtime.buckets import BucketTable
from jaxserve.runtime.page_copies import HostMemory
from jaxserve.runtime.rows import SampleVariant
from jaxserve.runtime.step_model import Drafting

ProgramKey = tuple[str, Any]  # (kind, key), as `Programs.get` takes them


def name_program(kind: str, key: Any) -> str:
    """Returns a program's name for users."""
    name = kind.replace("_", " ")
    match kind, key:
        case "forward", bucket:
            name = str(bucket)
        case "sample", (rows, width, variant):
            name += f" {rows if width == 1 else f'{rows}x{width}'} {variant.name.lower()}"
        case "loop", (rows, variant):
            name += f" {rows} {variant.name.lower()}"
        case "logprobs", (rows, width):
            name += f" {rows * width}"
        case "prompt_logprobs", bucket:
            name += f" {bucket.tokens}"
        case _ if key is not None:
            name += f" {key}"
    return name


def list_programs(
    buckets: BucketTable, variants: Iterable[SampleVariant] = SampleVariant, *, drafts: bool = False
) -> Iterator[ProgramKey]:
    """Yields the (kind, key) of every program of a table, the slowest to compile first.

    Args:
        drafts: with those of a drafter with weights.
    """
    for bucket in sorted(buckets.buckets, reverse=True):
        yield "forward", bucket
        if bucket.is_mixed:
            yield "prompt_logprobs", bucket
    for rows, width in (*((rows, 1) for rows in buckets.row_counts), *buckets.verify_sizes):
        for variant in variants:
            yield "sample", (rows, width, variant)
        yield "logprobs", (rows, width)
    for rows in sorted({bucket.rows for bucket in buckets.buckets}) if drafts else ():
        yield "draft", rows
    for rows in buckets.row_counts:
        yield "pool", rows
    yield "set_row", None
    yield "zeros", None


def list_lookups(buckets: BucketTable, drafting: Drafting | None) -> Iterator[ProgramKey]:
    """Yields the programs that look drafts up, and those that write the tokens in which they are looked up."""
    if drafting is not None and drafting.lookup is not None:
        yield from (("look_up", rows) for rows in buckets.row_counts)
        yield "write_rows", None
        if drafting.lookup.remembers:
            yield "write_answers", None


def list_copies(memory: HostMemory) -> Iterator[ProgramKey]:
    """Yields the programs of the host tier, for each KV group."""
    for group in range(len(memory.pages)):
        yield "read_pages", group
        yield "write_pages", group


def list_loops(buckets: BucketTable) -> Iterator[ProgramKey]:
    """Yields the (kind, key) of the programs of several decode steps."""
    for rows in buckets.row_counts:
        if rows <= buckets.loop_rows:
            yield from (("loop", (rows, variant)) for variant in SampleVariant if variant is not SampleVariant.MASKED)

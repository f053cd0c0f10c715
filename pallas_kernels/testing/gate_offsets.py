"""Offsets of 32 bits into arrays of more elements: in a kernel's module, and in XLA's part of a program.

Such an offset reads another page, with no word of anybody, and only in pools as large as those of a server.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any

from jaxlib.mlir import ir

MOST_ENTRIES = 2**31 - 1  # that 32 bits reach
_ARGUMENT = "mosaic_gpu.original_kernel_arg"
_ANYWHERE = 2**62  # of 64 bits that nothing is known about
_SAME_PLACE = (
    *("builtin.unrealized_conversion_cast", "llvm.extractvalue", "llvm.ptrtoint", "llvm.inttoptr", "llvm.add"),
    *("llvm.addrspacecast", "memref.transpose", "memref.expand_shape", "memref.collapse_shape"),
    *("memref.reinterpret_cast", "memref.cast", "memref.extract_aligned_pointer_as_index", "arith.index_cast"),
)
_BOUNDED_BY = {"index_cast": 0, "index_castui": 0, "extsi": 0, "extui": 0, "sext": 0, "zext": 0, "divui": 0, "remui": 1}

_SHAPE = re.compile(r"^ *(?:ROOT )?%([\w.-]+) = ([a-z]\w*)\[([\d,]*)\]")
_INDEXED = re.compile(r" (scatter|gather|dynamic-slice|dynamic-update-slice)\(([^)]*)\)")
_AXES = re.compile(r"(?:scatter_dims_to_operand_dims|start_index_map)=\{([\d,]*)\}")
_COMPUTATION = re.compile(r"^(?:ENTRY )?%[\w.-]+ .*\{$")


def list_short_offsets(module: Any) -> list[str]:
    """Addresses in a kernel's arguments whose offset could not reach the argument's last element.

    Sums and products of 64 bits are followed to where they come from: a number of 32 bits counts as the largest there
    is, so a page of 32 bits, times the size of a page, reaches far enough, and an element's number does not.
    """
    functions = (operation for operation in module.body.operations if operation.name.endswith("func.func"))
    blocks = (block for function in functions for block in function.regions[0].blocks)
    arguments = (
        operation.results[0] for block in blocks for operation in block.operations if _ARGUMENT in operation.attributes
    )
    large = (argument for argument in arguments if math.prod(ir.MemRefType(argument.type).shape) > MOST_ENTRIES)
    return list(dict.fromkeys(fault for argument in large for fault in _follow(argument, argument, 0)))


def _follow(argument: Any, value: Any, offset: int) -> Iterator[str]:
    """The faults of all addresses made from an array or a pointer that begins `offset` elements behind an argument's
    first, at most."""
    size = math.prod(ir.MemRefType(argument.type).shape)
    for use in value.uses:
        operation, found = use.owner.operation, offset
        name, operands = _name(operation), list(operation.operands)
        if name == "llvm.getelementptr":
            step = _count_bits(ir.TypeAttr(operation.attributes["elem_type"]).value)
            element = _count_bits(ir.MemRefType(argument.type).element_type)
            found += sum(map(_bound, operands[1:])) * step // element
        elif name == "memref.subview":
            found += _find_start(operation)
        elif name in ("memref.load", "memref.store"):
            array, *indices = operands[name == "memref.store" :]
            strides, _ = ir.MemRefType(array.type).get_strides_and_offset()
            found += sum(_bound(index) * stride for index, stride in zip(indices, strides, strict=True))
        elif name not in _SAME_PLACE:
            continue
        if MOST_ENTRIES <= found < size - 1:
            yield f"an offset of 32 bits into {size:,} elements"
        for result in operation.results:
            yield from _follow(argument, result, found)


def _find_start(subview: Any) -> int:
    """The largest offset at which a part of an array may begin."""
    array, *dynamic = list(subview.operands)
    strides, _ = ir.MemRefType(array.type).get_strides_and_offset()
    starts = [start if start >= 0 else None for start in ir.DenseI64ArrayAttr(subview.attributes["static_offsets"])]
    unknown = iter(dynamic)
    bounds = [_bound(next(unknown)) if start is None else start for start in starts]
    return sum(bound * stride for bound, stride in zip(bounds, strides, strict=True))


def _name(operation: Any) -> str:
    return operation.name.rpartition("stable_mosaic_gpu.")[2]


def _count_bits(kind: Any) -> int:
    if isinstance(kind, ir.VectorType):
        return math.prod(kind.shape) * kind.element_type.width
    return kind.width


def _bound(value: Any) -> int:
    """The largest that a number can be, by what it is computed from."""
    operation = value.owner
    is_short = isinstance(value.type, ir.IntegerType) and ir.IntegerType(value.type).width <= 32
    most = MOST_ENTRIES if is_short else _ANYWHERE
    if not hasattr(operation, "operands"):  # an argument of a loop
        return most
    name, parts = _name(operation).partition(".")[2], list(operation.operands)
    if name == "constant":
        return min(most, abs(ir.IntegerAttr(operation.attributes["value"]).value))
    if is_short:
        return most
    if name in ("muli", "mul", "addi", "add"):
        first, second = map(_bound, parts)
        return min(most, first * second if name.startswith("mul") else first + second)
    if name in _BOUNDED_BY:
        return _bound(parts[_BOUNDED_BY[name]])
    return MOST_ENTRIES if name in ("thread_id", "block_id") else most


def list_short_indices(hlo: str) -> list[str]:
    """Indices of 32 bits into an axis of more entries, in a compiled program."""
    faults: list[str] = []
    shapes: dict[str, tuple[str, list[int]]] = {}
    for line in hlo.splitlines():
        if _COMPUTATION.match(line):
            shapes = {}
        if found := _SHAPE.match(line):
            shapes[found[1]] = found[2], [int(size) for size in found[3].split(",") if size]
        if (called := _INDEXED.search(line)) is None:
            continue
        names = re.findall(r"%([\w.-]+)", called[2])
        first = 1 if called[1] in ("scatter", "gather", "dynamic-slice") else 2
        array, index = shapes.get(names[0]), shapes.get(names[first])
        if array is None or index is None or not index[0].endswith("32"):
            continue
        axes = _AXES.search(line)
        indexed = range(len(array[1])) if axes is None else (int(axis) for axis in axes[1].split(",") if axis)
        faults += [
            f"{called[1]}: indices of 32 bits into an axis of {array[1][axis]:,}"
            for axis in indexed
            if array[1][axis] > MOST_ENTRIES
        ]
    return list(dict.fromkeys(faults))

"""The descriptors of a kernel's TMA copies, and what a driver would refuse of them.

The host makes them when the kernel is first launched, from constants in its module. No compiler looks at them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jaxlib.mlir import ir

# Limits of cuTensorMapEncodeTiled.
MOST_AXES = 5
MOST_BOX = 256  # entries of an axis that one copy moves
STRIDE_UNIT, STRIDE_LIMIT = 16, 2**40  # bytes
MOST_ENTRIES = 2**31 - 1  # of an axis: copies have signed coordinates of 32 bits

_MAKER = "mosaic_gpu_init_tma_desc"
_ELEMENT_BITS = {0: 4, 1: 8, 2: 16, 3: 32, 4: 64, 5: 16, 6: 32, 7: 16, 8: 2, 9: 32, 10: 64}  # by Mosaic's number
_NO_SWIZZLE = 16


@dataclass(frozen=True)
class Descriptor:
    """An array in device memory and the box of it that a copy moves; the last axis is contiguous."""

    bits: int  # of an element
    sizes: tuple[int, ...]
    strides: tuple[int, ...]  # elements
    box: tuple[int, ...]
    swizzle: int  # bytes

    def list_faults(self) -> list[str]:
        """Why a driver would refuse it, or why it could not reach all of the array."""
        if len(self.sizes) > MOST_AXES:
            return [f"{len(self.sizes)} axes, of at most {MOST_AXES}"]
        strides = [stride * self.bits // 8 for stride in self.strides[:-1]]
        inner = self.box[-1] * self.bits // 8
        faults = [f"an axis of {size:,} entries" for size in self.sizes if not 0 < size <= MOST_ENTRIES]
        faults += [f"a stride of {stride:,} bytes" for stride in strides if stride % STRIDE_UNIT]
        faults += [f"a stride of {stride:,} bytes" for stride in strides if stride >= STRIDE_LIMIT]
        faults += [f"a box of {size} entries" for size in self.box if not 0 < size <= MOST_BOX]
        if self.strides[-1] != 1:
            faults.append(f"elements that lie {self.strides[-1]} apart")
        if inner % STRIDE_UNIT:
            faults.append(f"a box whose rows have {inner} bytes")
        if self.swizzle > _NO_SWIZZLE and inner > self.swizzle:
            faults.append(f"a box whose rows have {inner} bytes, with a swizzle of {self.swizzle}")
        return faults


def list_descriptors(module: Any) -> list[Descriptor]:
    """The descriptors that the host code of a kernel's module makes."""
    found: list[Descriptor] = []

    def visit(operation: Any) -> Any:
        if operation.name.endswith("func.call") and _MAKER in str(operation.attributes["callee"]):
            element, rank, sizes, strides, swizzle, box = list(operation.operands)[2:8]
            bits = _ELEMENT_BITS[_read(element)]
            arrays = [_read_array(array, _read(rank)) for array in (sizes, strides, box)]
            found.append(Descriptor(bits, *arrays, swizzle=_read(swizzle)))
        return ir.WalkResult.ADVANCE

    module.operation.walk(visit)
    return found


def _read_array(pointer: Any, rank: int) -> tuple[int, ...]:
    """What is stored in an array of the host's stack: at pointers to its elements, or with jax 0.12 at indices."""
    operation = pointer.owner
    while not operation.name.endswith("alloca"):
        operation = operation.operands[0].owner
    values: dict[int, int] = {}
    for use in operation.results[0].uses:
        user = use.owner.operation
        if user.name.endswith("getelementptr"):
            (index,) = ir.DenseI32ArrayAttr(user.attributes["rawConstantIndices"])
            (store,) = (each.owner.operation for each in user.results[0].uses)
            values[index] = _read(store.operands[0])
        elif user.name.endswith("memref.store"):
            values[_read(user.operands[2])] = _read(user.operands[0])
    return tuple(values[index] for index in range(rank))


def _read(value: Any) -> int:
    """A constant of the host's code: an own operation, or a size or stride of an array whose type has it."""
    operation = value.owner
    if operation.name.endswith("constant"):
        return ir.IntegerAttr(operation.attributes["value"]).value
    if operation.name.endswith("extract_strided_metadata"):
        array = ir.MemRefType(operation.operands[0].type)
        numbers = [0, 0, *array.shape, *array.get_strides_and_offset()[0]]
        return numbers[ir.OpResult(value).result_number]
    return _read(operation.operands[0])  # a cast

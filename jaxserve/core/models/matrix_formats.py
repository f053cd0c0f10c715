"""Formats of quantized checkpoints, as data: how each keeps its matrices."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from pallas_kernels import XLA_PRODUCTS, QuantizedProducts

WIDER = {"float8_e4m3fn": "bfloat16", "float4_e2m1fn": "bfloat16", "int4": "int8"}
"""Types that a CPU multiplies slowly, and those that hold the same numbers there."""


@dataclass(frozen=True)
class MatrixFormat:
    """How files keep a matrix [rows, columns] = [out, in].

    `packing` is a key of PACKINGS (packings.py); `dtype` is that of the values on a device. `block`: the rows and the
    columns that share a scale, None for all of them. `scale` is the name of the scales' tensor, `other_scale` that in
    other files. `zeros`: values have zero points, and `zero_offset` is what files have subtracted from them. `ordered`:
    columns were quantized in an order that files have. `scale_dtype` is that of the scales on a device: bfloat16 for
    powers of two, of which files have the exponents. `factor` is the name of a tensor with one number that all scales
    are multiplied by or, with `divides`, divided by. `quantizes_rows`: the file is made for products with rows of the
    same type. Without a packing files have the matrix itself.
    """

    packing: str | None
    dtype: str
    block: tuple[int | None, int | None]
    scale: str = ""
    other_scale: str | None = None
    zeros: bool = False
    zero_offset: int = 0
    ordered: bool = False
    scale_dtype: str = "float32"
    factor: str = ""
    divides: bool = False
    quantizes_rows: bool = False

    @property
    def bits(self) -> int:
        """Bits of a value."""
        return 8 if self.dtype in ("int8", "float8_e4m3fn") else 4

    @property
    def parts(self) -> tuple[str, ...]:
        """The parameters that a matrix becomes."""
        return ("values", "scales") + ("zeros",) * self.zeros + ("order",) * self.ordered

    @property
    def other(self) -> MatrixFormat | None:
        """The format of other files, whose scales have the other name; None if there are no such files."""
        return None if self.other_scale is None else replace(self, scale=self.other_scale, other_scale=None)

    def count_groups(self, columns: int) -> int:
        """Returns the groups of a row, the last of which may be short."""
        return -(-columns // (self.block[1] or columns))


@dataclass(frozen=True)
class Targets:
    """Modules: those that a name is, or is above or below of, and those that a pattern matches from the start."""

    names: frozenset[str] = frozenset()
    patterns: tuple[str, ...] = ()

    def match(self, module: str) -> bool:
        """Whether a module is meant."""
        if self.names:
            parts = module.split(".")
            runs = (
                ".".join(parts[first:last]) for first in range(len(parts)) for last in range(first + 1, len(parts) + 1)
            )
            if not self.names.isdisjoint(runs):
                return True
        return any(re.match(pattern, module) for pattern in self.patterns)


EVERY_MODULE = Targets(patterns=("",))


@dataclass(frozen=True)
class Quantization:
    """Which matrices of a model are quantized, and how, by `rules` of which the first match counts.

    `while_loading`: files have them in 16 or 32 bits. `num_devices` share the model. `widened`: values are held in the
    types of `WIDER`. `products` says how projections are multiplied.
    """

    method: str
    rules: tuple[tuple[Targets, MatrixFormat | None], ...]
    while_loading: bool = False
    num_devices: int = 1
    widened: bool = False
    products: QuantizedProducts = XLA_PRODUCTS

    @property
    def has_matrices(self) -> bool:
        """Whether any matrix may be quantized; if not, files have scales of keys and values only."""
        return any(form is not None for _, form in self.rules)

    @property
    def wanted_row_dtypes(self) -> frozenset[str]:
        """The types of matrices that are all made for rows of the same type."""
        found = [form for _, form in self.rules if form is not None]
        return frozenset(form.dtype for form in found) - {form.dtype for form in found if not form.quantizes_rows}

    @property
    def has_empty_biases(self) -> bool:
        """Whether files may have biases of zeros beside matrices that have none: GPTQ's tools wrote them."""
        return any(form is not None and form.packing == "gptq" for _, form in self.rules)

    def find_format(self, module: str) -> MatrixFormat | None:
        """Returns how files keep a module's weight; None if it is not quantized."""
        return next((form for targets, form in self.rules if targets.match(module)), None)

    def expands(self, form: MatrixFormat) -> bool:
        """Whether a matrix is expanded while it is read: its numbers fit the type in which values would be held."""
        return self.widened and form.scale_dtype == "bfloat16" and not self.while_loading

    def hold(self, dtype: str) -> str:
        """Returns the dtype in which devices hold values."""
        return WIDER.get(dtype, dtype) if self.widened else dtype

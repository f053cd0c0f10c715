"""The kernel: a block attends one unit with one KV head, by online softmax over tiles of keys, in base 2.

(Milakov and Gimelshein, 2018; FlashAttention's recurrence.) Four warps have 16 query rows each and read all keys. They
meet once per tile, when it has arrived and the slot of the previous tile is free.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.ampere import compat
from pallas_kernels.ampere.ring import Scratch, TileRing, Unit
from pallas_kernels.mosaic_gpu.compat import full, spread
from pallas_kernels.mosaic_gpu.key_tiles import MASKED, Ids
from pallas_kernels.mosaic_gpu.units import BEGIN, FIRST_TILE, LENGTH, NUM_TILES, QUERIES, ROW

Carry = tuple[list[jax.Array], jax.Array, jax.Array, Ids]


@dataclass(frozen=True)
class AttentionKernel(TileRing):
    """The kernel's body."""

    @property
    def __name__(self) -> str:
        return "ampere_attention"

    def __call__(self, *refs: jax.Ref, **scratch: jax.Ref) -> None:
        q_ref, pages, table, units, offset, *k_scale, outputs, logs = refs
        scratch["q"], scratch["outputs"] = scratch.pop("q_then_outputs")
        first = self.read_unit(units, lax.axis_index("unit"))

        def run(unit: Unit) -> None:
            factor = self.params.scale * k_scale[0][unit.head] if self.has_k_scale else self.params.scale
            find_pages = partial(self.find_pages, span=unit, table=table, offset=offset[0], num_pages=pages.shape[0])
            ids = self.start(unit, q_ref, pages, find_pages, scratch)
            self.wait_queries(scratch)
            step = partial(
                self.attend_tile, unit=unit, pages=pages, find_pages=find_pages, factor=factor, scratch=scratch
            )
            parts = [full((compat.TILE_ROWS, compat.PART_COLUMNS), 0.0)] * (self.width // compat.PART_COLUMNS)
            carry = (parts, full((compat.TILE_ROWS,), MASKED), full((compat.TILE_ROWS,), 0.0), ids)
            self.finish(lax.fori_loop(0, unit.num_tiles, step, carry), unit, outputs, logs, scratch)

        @pl.when(first.num_tiles > 0)
        def _() -> None:
            if self.num_blocks is None:
                run(first)
                return

            @pl.loop(0, self.count_rounds(units, first.slot))
            def _(index: jax.Array) -> None:
                run(self.read_unit(units, first.slot + index * self.num_blocks))
                self.settle()

    def read_unit(self, units: jax.Ref, slot: jax.Array) -> Unit:
        """The unit in a slot of the list."""
        return Unit(
            slot=slot,
            head=lax.axis_index("head"),
            queries=units[slot, QUERIES],
            row=units[slot, ROW],
            first_tile=units[slot, FIRST_TILE],
            num_tiles=units[slot, NUM_TILES],
            length=units[slot, LENGTH],
            begin=units[slot, BEGIN],
        )

    def finish(self, carry: Carry, unit: Unit, outputs: jax.Ref, logs: jax.Ref, scratch: Scratch) -> None:
        """Writes the unit's outputs, through the queries' tile: registers hold them in pieces of four bytes."""
        parts, largest, total, _ = carry
        logs[unit.slot, unit.head] = largest + jnp.log2(total)
        rows = pl.ds(pl.multiple_of(unit.head * self.num_rows, 8), self.num_rows)
        part, size = compat.PART_COLUMNS, self.fit_partials(self.width)
        step = math.gcd(part, size)
        for start in range(0, self.width, size):
            for column in range(start, start + size, step):
                acc = parts[column // part][:, column % part : column % part + step]
                columns = pl.ds(column - start, acc.shape[1])
                scratch["outputs"][:, columns] = (acc / spread(total, acc.shape)).astype(self.partial_dtype)
            staged = scratch["outputs"].at[pl.ds(0, self.num_rows)]
            compat.store_rows(staged, outputs.at[unit.slot, rows, pl.ds(start, size)])

    def attend_tile(
        self,
        index: jax.Array,
        carry: Carry,
        *,
        unit: Unit,
        pages: jax.Ref,
        find_pages: partial[Ids],
        factor: float | jax.Array,
        scratch: Scratch,
    ) -> Carry:
        """One step of the online softmax; the largest scores are in base 2."""
        parts, largest, total, ids = carry
        start = (unit.first_tile + index) * self.tile_tokens
        ahead = index + self.stages - 1
        # The next tile's ids are read a tile ahead: they arrive while this one is attended.
        next_ids = find_pages(ahead + 1)
        self.wait_tile(ahead, scratch)
        self.fill(ahead, ids, unit, pages, scratch)
        keys, values = self.open_tile(lax.rem(index, self.stages), scratch)

        @pl.when(self.holds_strangers(start, unit))
        def _() -> None:
            self.clean(values, start, unit)

        scores = compat.multiply_qk(scratch["q"], keys, interpret=self.interpret)
        scores = self.scale_scores(scores, factor)
        mask = partial(self.mask, start, unit)
        scores = lax.cond(self.is_edge(start, unit), mask, lambda scores: scores, scores)

        new_largest = jnp.maximum(largest, jnp.max(scores, axis=1))
        shrink = jnp.exp2(largest - new_largest)
        weights = jnp.exp2(scores - spread(new_largest, scores.shape))
        total = total * shrink + jnp.sum(weights, axis=1)
        parts = [acc * spread(shrink, acc.shape) for acc in parts]
        parts = compat.multiply_pv(parts, weights, values, interpret=self.interpret)
        return parts, new_largest, total, next_ids

    def open_tile(self, slot: jax.Array, scratch: Scratch) -> tuple[jax.Ref, jax.Ref]:
        """Keys and values of a tile, in the compute dtype."""
        keys, values = scratch["keys"].at[slot], scratch["values"].at[slot]
        if not self.is_narrow:
            return keys, values
        compat.widen(keys, scratch["wide_keys"], self.choose_swizzle("wide_keys"))
        compat.widen(values, scratch["wide_values"], self.choose_swizzle("wide_values"))
        return scratch["wide_keys"], scratch["wide_values"]

    def clean(self, values: jax.Ref, start: jax.Array, unit: Unit) -> None:
        """Zeroes the values of slots that no query of the unit sees."""
        swizzle = self.choose_swizzle("wide_values" if self.is_narrow else "values")
        compat.zero_rows(values, swizzle, partial(self.is_held, start=start, span=unit))

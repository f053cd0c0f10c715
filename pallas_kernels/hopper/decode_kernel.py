"""The compute side of the decode kernel: a block attends one unit with one KV head.

A memory warpgroup (`decode_memory.py`) fills rings of tiles, and a compute warpgroup runs the online softmax over them
(Milakov and Gimelshein, 2018; FlashAttention's recurrence), in base 2.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.hopper import wgmma
from pallas_kernels.hopper.decode_memory import DecodeRing, Scratch, Unit
from pallas_kernels.hopper.online_softmax import Carry, weigh
from pallas_kernels.hopper.overlap import await_earlier_kernel, launch_next_kernel
from pallas_kernels.mosaic_gpu import compat, splits
from pallas_kernels.mosaic_gpu.key_tiles import MASKED
from pallas_kernels.mosaic_gpu.splits import QUERY_ROWS

# Registers per thread of the compute warpgroup, by blocks per SM. Every thread is launched with the largest number that
# the kernel asks for, so two blocks of 256 threads have 65536 / 512 = 128.
_COMPUTE_REGISTERS = {1: 232, 2: 128}
_MEMORY_REGISTERS = 40


@dataclass(frozen=True)
class DecodeKernel(DecodeRing):
    """The kernel's body."""

    @property
    def __name__(self) -> str:
        return "paged_decode"

    def __call__(self, *refs: jax.Ref, **scratch: jax.Ref) -> None:
        await_earlier_kernel(interpret=self.interpret)
        launch_next_kernel(interpret=self.interpret)
        q_ref, pages, table, units, offset, *k_scale, outputs, logs = refs
        q_scale = k_scale.pop(0) if self.fp8_scores else None
        scratch["keys"], scratch["logs"] = scratch.pop("keys_then_logs")
        scratch["q"], scratch["answers"] = scratch.pop("q_then_answers")
        unit = self.read_unit(units, lax.axis_index("unit"))
        warpgroup = lax.axis_index("warpgroup")

        @pl.when((warpgroup == 1) & (unit.num_tiles > 0))
        def _() -> None:
            if not self.is_narrow:
                compat.set_max_registers(_MEMORY_REGISTERS, action="decrease")
            fetch = self.fetch_narrow if self.is_narrow else self.fetch
            run = partial(fetch, pages=pages, table=table, offset=offset[0], scratch=scratch)
            self.for_units(unit, units, self.read_unit, run, scratch, reads=False)

        @pl.when((warpgroup == 0) & (unit.num_tiles > 0))
        def _() -> None:
            compat.set_max_registers(_COMPUTE_REGISTERS[self.ctas_per_sm], action="increase")

            def run(unit: Unit) -> None:
                self.compute(self.read_begin(unit, units), (q_ref, q_scale), k_scale, outputs, logs, scratch)

            self.for_units(unit, units, self.read_unit, run, scratch, reads=True)

    def make_scratch(self) -> dict[str, object]:
        """Shared memory and barriers of a block."""
        scratch = super().make_scratch()
        answers = compat.tile_smem((QUERY_ROWS, self.fit_partials(self.width)), self.partial_dtype)
        return scratch | {"q_then_answers": compat.SmemUnion(scratch.pop("q"), answers)}

    def read_unit(self, units: jax.Ref, slot: jax.Array) -> Unit:
        length = units[slot, splits.LENGTH]
        return Unit(
            slot=slot,
            head=lax.axis_index("head"),
            row=units[slot, splits.ROW],
            first_tile=units[slot, splits.FIRST_TILE],
            num_tiles=units[slot, splits.NUM_TILES],
            length=length,
            begin=length - 1,
        )

    def read_begin(self, unit: Unit, units: jax.Ref) -> Unit:
        """The unit with the position of its first query. Read only where it is used: kept from the start of the
        kernel, it would take one register too many."""
        if self.max_queries == 1:
            return unit
        return replace(unit, begin=unit.length - units[unit.slot, splits.NUM_QUERIES])

    def compute(
        self,
        unit: Unit,
        queries: tuple[jax.Ref, jax.Ref | None],  # and their scales
        k_scale: list[jax.Ref],
        outputs: jax.Ref,
        logs: jax.Ref,
        scratch: Scratch,
    ) -> None:
        """The unit's attention, from query rows to its two outputs."""
        # Rows of the tile beyond R stay undefined. Rows do not affect each other, and these are not copied out.
        rows = pl.ds(0, self.num_rows)
        q_ref, q_scale = queries
        if q_scale is None:
            compat.copy_gmem_to_smem(q_ref.at[unit.row, unit.head], scratch["q"].at[rows], scratch["q_loaded"])
        else:
            for part in range(2):
                source, target = q_ref.at[unit.row, unit.head, part], scratch["q"].at[part, rows]
                compat.copy_gmem_to_smem(source, target, scratch["q_loaded"])
        compat.barrier_wait(scratch["q_loaded"])
        factor = self.params.scale * k_scale[0][unit.head] if self.has_k_scale else self.params.scale
        if q_scale is not None:
            factor = factor * q_scale[unit.row, unit.head]
        carry = (
            compat.full((QUERY_ROWS, self.width), 0.0),
            compat.full((QUERY_ROWS,), MASKED),
            compat.full((QUERY_ROWS,), 0.0),
        )
        step = partial(self.attend_tile, unit=unit, factor=factor, scratch=scratch)
        acc, largest, total = lax.fori_loop(0, unit.num_tiles, step, carry)
        places = pl.ds(pl.multiple_of(unit.head * self.num_rows, 8), self.num_rows)

        def target(start: int, size: int) -> jax.Ref:
            return outputs.at[unit.slot, places, pl.ds(start, size)]

        scratch["logs"][...] = largest + jnp.log2(total)
        self.store_answers(acc / compat.spread(total, acc.shape), scratch["answers"], rows, target)
        compat.copy_smem_to_gmem(scratch["logs"].at[rows], logs.at[unit.slot, places])
        compat.wait_smem_to_gmem(0)

    def attend_tile(
        self, index: jax.Array, carry: Carry, *, unit: Unit, factor: float | jax.Array, scratch: Scratch
    ) -> Carry:
        """One step of the online softmax; the largest scores are in base 2."""
        num_slots = self.count_slots("values")
        slot = lax.rem(index, num_slots)
        key_slot = lax.rem(index, self.stages) if self.fp8_scores else slot
        start = (unit.first_tile + index) * self.tile_tokens
        keys, values = scratch["keys"].at[key_slot], scratch["values"].at[slot]
        is_awaited = index + num_slots < unit.num_tiles  # a later tile needs the slot
        is_strange = self.holds_strangers(start, unit)

        # Clean before scores take registers: two blocks per SM leave 128 per thread.
        @pl.when(is_strange)
        def _() -> None:
            compat.barrier_wait(scratch["values_loaded"].at[slot])
            self.clean(values, start, unit)
            compat.commit_smem()

        compat.barrier_wait(scratch["keys_loaded"].at[key_slot])
        if self.fp8_scores:
            scores = wgmma.multiply_parts(scratch["q"], keys)
            are_keys_awaited = index + self.stages < unit.num_tiles
        else:
            scores = wgmma.multiply_qk(self.read_queries(index, scratch), keys)
            are_keys_awaited = is_awaited
        pl.when(are_keys_awaited)(partial(compat.barrier_arrive, scratch["keys_freed"].at[key_slot]))
        weights, (acc, largest, total) = weigh(self.finish_scores(scores, factor, start, unit), carry)
        weights = weights.astype(self.dtype)

        @pl.when(~is_strange)
        def _() -> None:
            compat.barrier_wait(scratch["values_loaded"].at[slot])

        acc = wgmma.multiply_pv(acc, weights, values, interpret=self.interpret)
        pl.when(is_awaited)(partial(compat.barrier_arrive, scratch["values_freed"].at[slot]))
        return acc, largest, total

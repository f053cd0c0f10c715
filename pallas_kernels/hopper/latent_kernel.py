"""The latent kernel: a block attends one unit with up to 64 query rows, over rows of pages that are key and value.

A tile of keys is in shared memory once. Two compute warpgroups make its scores, each for itself, and each weighs half
of the values' columns: the answers of 64 rows of 512 columns do not fit the registers of one. A memory warpgroup fills
the ring (`decode_memory.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.hopper import wgmma
from pallas_kernels.hopper.decode_memory import DecodeRing, Scratch, Unit
from pallas_kernels.hopper.online_softmax import Carry, weigh
from pallas_kernels.hopper.overlap import await_earlier_kernel, launch_next_kernel
from pallas_kernels.mosaic_gpu import compat, units
from pallas_kernels.mosaic_gpu.key_tiles import MASKED
from pallas_kernels.mosaic_gpu.splits import QUERY_ROWS

NUM_COMPUTE = 2  # warpgroups
# Registers per thread of a compute warpgroup and of the memory warpgroup, by whether that one widens tiles.
_REGISTERS = {False: (232, 40), True: (224, 56)}


@dataclass(frozen=True)
class LatentKernel(DecodeRing):
    """The kernel's body."""

    value_width: int  # the first columns of a key that are its value

    @property
    def __name__(self) -> str:
        return "paged_latents"

    @property
    def rings(self) -> tuple[str, ...]:
        return ("keys",)

    @property
    def num_readers(self) -> int:
        return NUM_COMPUTE

    def find_page_row(self, head: jax.Array, part: int) -> int:
        """All blocks of heads read the one row of a page."""
        return 0

    def make_scratch(self) -> dict[str, object]:
        """Shared memory and barriers of a block; at `met` the compute warpgroups wait for each other."""
        scratch = super().make_scratch()
        # Each warpgroup's answers lie in one piece, as copies want them, where the queries were.
        width = self.fit_partials(self.value_width // NUM_COMPUTE)
        answers = compat.tile_smem((NUM_COMPUTE, QUERY_ROWS, width), self.partial_dtype)
        scratch["q_then_answers"] = compat.SmemUnion(scratch.pop("q"), answers)
        return scratch | {"met": compat.Barrier(num_arrivals=NUM_COMPUTE)}

    def __call__(self, *refs: jax.Ref, **scratch: jax.Ref) -> None:
        await_earlier_kernel(interpret=self.interpret)
        launch_next_kernel(interpret=self.interpret)
        q_ref, pages, table, unit_columns, offset, *k_scale, outputs, logs = refs
        scratch["keys"], scratch["logs"] = scratch.pop("keys_then_logs")
        scratch["q"], scratch["answers"] = scratch.pop("q_then_answers")
        unit = self.read_unit(unit_columns, lax.axis_index("unit"))
        warpgroup = lax.axis_index("warpgroup")

        @pl.when((warpgroup == NUM_COMPUTE) & (unit.num_tiles > 0))
        def _() -> None:
            compat.set_max_registers(_REGISTERS[self.is_narrow][1], action="decrease")
            fetch = self.fetch_narrow if self.is_narrow else self.fetch

            def run(unit: Unit) -> None:
                queries = q_ref.at[unit_columns[unit.slot, units.QUERIES], unit.head]
                # Rows of the tile beyond R stay undefined. Rows do not affect each other, and these are not copied out.
                compat.copy_gmem_to_smem(queries, scratch["q"].at[pl.ds(0, self.num_rows)], scratch["q_loaded"])
                fetch(unit, pages, table, offset[0], scratch)

            self.for_units(unit, unit_columns, self.read_unit, run, scratch, reads=False)

        @pl.when((warpgroup < NUM_COMPUTE) & (unit.num_tiles > 0))
        def _() -> None:
            compat.set_max_registers(_REGISTERS[self.is_narrow][0], action="increase")
            run = partial(
                self.compute, warpgroup=warpgroup, k_scale=k_scale, outputs=outputs, logs=logs, scratch=scratch
            )
            self.for_units(unit, unit_columns, self.read_unit, run, scratch, reads=True)

    def read_unit(self, unit_columns: jax.Ref, slot: jax.Array) -> Unit:
        return Unit(
            slot=slot,
            head=lax.axis_index("head"),
            row=unit_columns[slot, units.ROW],
            first_tile=unit_columns[slot, units.FIRST_TILE],
            num_tiles=unit_columns[slot, units.NUM_TILES],
            length=unit_columns[slot, units.LENGTH],
            begin=unit_columns[slot, units.BEGIN],
        )

    def compute(
        self,
        unit: Unit,
        warpgroup: jax.Array,
        k_scale: list[jax.Ref],
        outputs: jax.Ref,
        logs: jax.Ref,
        scratch: Scratch,
    ) -> None:
        """Half of the columns of the unit's attention."""
        compat.barrier_wait(scratch["q_loaded"])
        factor = self.params.scale * k_scale[0][0] if self.has_k_scale else self.params.scale
        half = self.value_width // NUM_COMPUTE
        columns = pl.ds(pl.multiple_of(warpgroup * half, half), half)
        carry = (
            compat.full((QUERY_ROWS, half), 0.0),
            compat.full((QUERY_ROWS,), MASKED),
            compat.full((QUERY_ROWS,), 0.0),
        )
        step = partial(self.attend_tile, unit=unit, columns=columns, factor=factor, scratch=scratch)
        acc, largest, total = lax.fori_loop(0, unit.num_tiles, step, carry)
        self.meet(scratch)  # the answers take the queries' memory, the logarithms the keys'

        @pl.when(warpgroup == 0)
        def _() -> None:
            scratch["logs"][...] = largest + jnp.log2(total)

        rows = pl.ds(0, self.num_rows)
        places = pl.ds(pl.multiple_of(unit.head * self.num_rows, 8), self.num_rows)

        def target(start: int, size: int) -> jax.Ref:
            return outputs.at[unit.slot, places, pl.ds(pl.multiple_of(warpgroup * half + start, size), size)]

        self.store_answers(acc / compat.spread(total, acc.shape), scratch["answers"].at[warpgroup], rows, target)

        @pl.when(warpgroup == 0)
        def _() -> None:
            compat.copy_smem_to_gmem(scratch["logs"].at[rows], logs.at[unit.slot, places])

        compat.wait_smem_to_gmem(0)

    def find_slot(self, index: jax.Array) -> jax.Array:
        """The slot of a tile."""
        num_slots = self.count_slots("keys")
        return lax.rem(index, num_slots) if num_slots > 1 else wgmma.hide_zero(index)

    def meet(self, scratch: Scratch) -> None:
        """Waits until the other compute warpgroup is here, too."""
        compat.barrier_arrive(scratch["met"])
        compat.barrier_wait(scratch["met"])

    def attend_tile(
        self,
        index: jax.Array,
        carry: Carry,
        *,
        unit: Unit,
        columns: pl.Slice,
        factor: float | jax.Array,
        scratch: Scratch,
    ) -> Carry:
        """One step of the online softmax, with half of the values' columns."""
        slot = self.find_slot(index)
        start = (unit.first_tile + index) * self.tile_tokens
        keys = scratch["keys"].at[slot]
        values = keys.at[:, columns]
        compat.barrier_wait(scratch["keys_loaded"].at[slot])

        @pl.when(self.holds_strangers(start, unit))
        def _() -> None:  # each cleans its half, before either reads the whole
            self.clean(values, start, unit)
            compat.commit_smem()
            self.meet(scratch)

        scores = wgmma.multiply_qk(self.read_queries(index, scratch), keys)
        weights, (acc, largest, total) = weigh(self.finish_scores(scores, factor, start, unit), carry)
        acc = wgmma.multiply_pv(acc, weights.astype(self.dtype), values, interpret=self.interpret)
        is_awaited = index + self.count_slots("keys") < unit.num_tiles  # a later tile needs the slot
        pl.when(is_awaited)(partial(compat.barrier_arrive, scratch["keys_freed"].at[slot]))
        return acc, largest, total

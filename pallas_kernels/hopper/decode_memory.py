"""The memory side of the decode kernel: a block's shared memory, and the warpgroup that fills it.

Tiles of keys and of values go through rings, which TMA fills. Pages of 8 bits go through rings of their own first, and
the memory warpgroup widens them into the rings that the compute warpgroup reads: wgmma takes 8-bit operands only with
the summed axis contiguous, and the summed axis of values is not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.hopper import wgmma
from pallas_kernels.mosaic_gpu import compat
from pallas_kernels.mosaic_gpu.key_tiles import KeyTiles
from pallas_kernels.mosaic_gpu.splits import QUERY_ROWS

PART_COLUMNS = 64  # columns of a tile that pass through registers at once

Scratch = dict[str, jax.Ref]


@dataclass(frozen=True)
class Unit:
    """A block's unit; scalars."""

    slot: jax.Array
    head: jax.Array
    row: jax.Array
    first_tile: jax.Array
    num_tiles: jax.Array
    length: jax.Array  # tokens of the row
    begin: jax.Array  # position of its first query


@dataclass(frozen=True)
class DecodeRing(KeyTiles):
    """A block's shared memory, and the warpgroup that fills it."""

    ctas_per_sm: int
    fp8_scores: bool  # keys of 8 bits are not widened: their products are those of two 8-bit parts of queries

    @property
    def rings(self) -> tuple[str, ...]:
        """What has a ring: the parts of a page."""
        return ("keys", "values")

    @property
    def num_readers(self) -> int:
        """Warpgroups that read a slot before it is free."""
        return 1

    def find_page_row(self, head: jax.Array, part: int) -> jax.Array | int:
        """The row of a page that holds a part of a KV head."""
        return 2 * head + part

    @property
    def widened(self) -> tuple[str, ...]:
        """The rings that are filled from narrow ones."""
        return self.rings[self.fp8_scores :] if self.is_narrow else ()

    def count_slots(self, name: str) -> int:
        """Slots of a ring that the compute warpgroup reads; one is enough where tiles are widened into it."""
        return 1 if name in self.widened else self.stages

    def list_tiles(self) -> dict[str, tuple[tuple[int, ...], jnp.dtype]]:
        """Shapes and dtypes of the tiles in shared memory, by name."""
        tile = (self.tile_tokens, self.width)
        queries = (
            ((2, QUERY_ROWS, self.width), self.page_dtype)
            if self.fp8_scores
            else ((QUERY_ROWS, self.width), self.dtype)
        )
        tiles = {"q": queries}  # holds the output at the end
        for name in self.rings:
            is_widened = name in self.widened
            tiles[name] = ((self.count_slots(name), *tile), self.dtype if is_widened else self.page_dtype)
            if is_widened:
                tiles[f"narrow_{name}"] = ((self.stages, *tile), self.page_dtype)
        return tiles

    def make_scratch(self) -> dict[str, object]:
        """Shared memory and barriers of a block."""
        # Half a swizzle of 8-bit elements passes through registers at once.
        swizzles = dict.fromkeys((f"narrow_{name}" for name in self.rings), PART_COLUMNS)
        scratch = {
            name: compat.tile_smem(shape, dtype, swizzles.get(name))
            for name, (shape, dtype) in self.list_tiles().items()
        }
        # The logarithms share the keys' memory: two blocks per SM do not have 1 KiB more for them.
        logs = compat.SMEM((QUERY_ROWS,), jnp.float32)
        scratch["keys_then_logs"] = compat.SmemUnion(scratch.pop("keys"), logs)
        copied = compat.Barrier(num_arrivals=self.tile_tokens // self.box, num_barriers=self.stages)
        for name in self.rings:
            num_slots, is_widened = self.count_slots(name), name in self.widened
            if is_widened:
                scratch[f"narrow_{name}_loaded"] = copied
            scratch[f"{name}_loaded"] = compat.Barrier(num_barriers=1) if is_widened else copied
            scratch[f"{name}_freed"] = compat.Barrier(num_arrivals=self.num_readers, num_barriers=num_slots)
        if self.num_blocks is not None:
            scratch["unit_done"] = compat.Barrier(num_arrivals=self.num_readers)
        return scratch | {"q_loaded": compat.Barrier(num_arrivals=2 if self.fp8_scores else 1)}

    def for_units(
        self,
        unit: Unit,
        units: jax.Ref,
        read: Callable[[jax.Ref, jax.Array], Unit],  # the unit in a slot of the list
        run: Callable[[Unit], None],
        scratch: Scratch,
        *,
        reads: bool,
    ) -> None:
        """Calls `run` with the block's first unit, and with its others where blocks share the list.

        `reads` says which warpgroup calls: memory is filled anew when all readers are done with a unit.
        """
        if self.num_blocks is None:
            run(unit)
            return
        rounds, step = self.count_rounds(units, unit.slot), self.num_blocks

        @pl.loop(0, rounds)
        def _(index: jax.Array) -> None:
            if not reads:
                pl.when(index > 0)(partial(compat.barrier_wait, scratch["unit_done"]))
            run(read(units, unit.slot + index * step))
            if reads:
                pl.when(index + 1 < rounds)(partial(compat.barrier_arrive, scratch["unit_done"]))

    def read_queries(self, index: jax.Array, scratch: Scratch) -> jax.Ref:
        """The block's query rows, for the product with a tile."""
        # Multiplied: compilers know that it is below 4, and would see that an eighth of it is 0.
        start = pl.multiple_of(wgmma.hide_zero(index) * QUERY_ROWS, QUERY_ROWS)
        return scratch["q"].at[pl.ds(start, QUERY_ROWS)]

    def store_answers(
        self, answers: jax.Array, staging: jax.Ref, rows: pl.Slice, target: Callable[[int, int], jax.Ref]
    ) -> None:
        """Starts the copies of `rows` of answers [QUERY_ROWS, columns] to `target(start, size)`, some columns of the
        outputs: as many at a time as `staging` holds."""
        size = staging.shape[-1]
        for start in range(0, answers.shape[1], size):
            if start > 0:
                compat.wait_smem_to_gmem(0)
            staging[...] = answers[:, start : start + size].astype(self.partial_dtype)
            compat.commit_smem()
            compat.copy_smem_to_gmem(staging.at[rows], target(start, size))

    def copy_tile(
        self,
        index: jax.Array,
        ids: tuple[jax.Array, ...],
        unit: Unit,
        sources: tuple[jax.Ref, jax.Array | int],  # the pool, and a row of its pages
        ring: jax.Ref,
        loaded: jax.Ref,
    ) -> None:
        """Starts the copies that fill a slot of the ring."""
        slot = lax.rem(index, self.stages)
        pages, page_row = sources
        # A tile begins in the middle of a page only if pages are larger than tiles.
        is_part = self.page_size > self.tile_tokens
        start = lax.rem((unit.first_tile + index) * self.tile_tokens, self.page_size) if is_part else 0
        for box, page in enumerate(ids):
            compat.copy_gmem_to_smem(
                pages.at[page, page_row, pl.ds(start, self.box)],
                ring.at[slot, pl.ds(box * self.box, self.box)],
                loaded.at[slot],
            )

    def refill(
        self,
        index: jax.Array,
        ids: tuple[jax.Array, ...],
        unit: Unit,
        pages: jax.Ref,
        part: int,
        name: str,
        scratch: Scratch,
    ) -> None:
        """Starts the copies of a tile's part into a slot that the compute warpgroup reads, as soon as it is free."""

        @pl.when(index >= self.stages)
        def _() -> None:
            compat.barrier_wait(scratch[f"{name}_freed"].at[lax.rem(index, self.stages)])

        source = (pages, self.find_page_row(unit.head, part))
        self.copy_tile(index, ids, unit, source, scratch[name], scratch[f"{name}_loaded"])

    def fetch(self, unit: Unit, pages: jax.Ref, table: jax.Ref, offset: jax.Array, scratch: Scratch) -> None:
        """Fills the rings, slot after slot as the compute warpgroup frees them."""
        find_pages = partial(self.find_pages, span=unit, table=table, offset=offset, num_pages=pages.shape[0])

        def step(index: jax.Array, ids: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            # The next tile's ids are read a tile ahead: they arrive while this one waits for its slot.
            next_ids = find_pages(index + 1)
            for part, name in enumerate(self.rings):
                self.refill(index, ids, unit, pages, part, name, scratch)
            return next_ids

        lax.fori_loop(0, unit.num_tiles, step, find_pages(jnp.int32(0)))

    def fetch_narrow(self, unit: Unit, pages: jax.Ref, table: jax.Ref, offset: jax.Array, scratch: Scratch) -> None:
        """Keeps the narrow rings `stages - 1` tiles ahead, and widens tile after tile.

        Only this warpgroup reads and refills a narrow slot, so no barrier says that it is free.
        """
        find_pages = partial(self.find_pages, span=unit, table=table, offset=offset, num_pages=pages.shape[0])

        def start(index: jax.Array, ids: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            next_ids = find_pages(index + 1)
            for part, name in enumerate(self.rings):
                if name in self.widened:
                    source = (pages, self.find_page_row(unit.head, part))
                    ring, loaded = scratch[f"narrow_{name}"], scratch[f"narrow_{name}_loaded"]
                    self.copy_tile(index, ids, unit, source, ring, loaded)
                else:
                    self.refill(index, ids, unit, pages, part, name, scratch)
            return next_ids

        def step(index: jax.Array, ids: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            ahead = index + self.stages - 1
            ids = lax.cond(ahead < unit.num_tiles, start, lambda _, ids: ids, ahead, ids)
            slot = lax.rem(index, self.stages)
            for name in self.widened:
                compat.barrier_wait(scratch[f"narrow_{name}_loaded"].at[slot])

                @pl.when(index > 0)
                def _(name: str = name) -> None:
                    compat.barrier_wait(scratch[f"{name}_freed"].at[0])

                self.widen(scratch[f"narrow_{name}"].at[slot], scratch[name].at[0])
                compat.commit_smem()
                compat.barrier_arrive(scratch[f"{name}_loaded"].at[0])
            return ids

        num_first = jnp.minimum(unit.num_tiles, self.stages - 1)
        ids = lax.fori_loop(0, num_first, start, find_pages(jnp.int32(0)))
        lax.fori_loop(0, unit.num_tiles, step, ids)

    def widen(self, tile: jax.Ref, wide: jax.Ref) -> None:
        """Copies an 8-bit tile to one of the compute dtype. Unrolled: a loop would need more registers."""
        for start in range(0, self.width, PART_COLUMNS):
            columns = pl.ds(start, PART_COLUMNS)
            wide[:, columns] = wgmma.load_narrow(tile.at[:, columns]).astype(self.dtype)

    def clean(self, values: jax.Ref, start: jax.Array, unit: Unit) -> None:
        """Zeroes the values [keys, columns] of slots that no query of the row sees."""
        keys = compat.iota((self.tile_tokens, PART_COLUMNS), 0)
        held = self.is_held(keys, start, unit)

        @pl.loop(0, values.shape[1] // PART_COLUMNS)
        def _(index: jax.Array) -> None:
            part = values.at[:, pl.ds(pl.multiple_of(index * PART_COLUMNS, PART_COLUMNS), PART_COLUMNS)]
            part[...] = jnp.where(held, part[...], jnp.zeros((), self.dtype))

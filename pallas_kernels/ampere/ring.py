"""A block's shared memory: tiles of keys and values, copied a few ahead of the one in use."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.ampere import compat
from pallas_kernels.mosaic_gpu.compat import SmemUnion, commit_smem, tile_smem
from pallas_kernels.mosaic_gpu.key_tiles import Ids, KeyTiles

Scratch = dict[str, jax.Ref]


@dataclass(frozen=True)
class Unit:
    """A block's unit; scalars."""

    slot: jax.Array
    head: jax.Array
    queries: jax.Array  # index of its packed queries
    row: jax.Array  # line of the page table
    first_tile: jax.Array
    num_tiles: jax.Array
    length: jax.Array  # tokens of the row up to the unit's last query, or of the whole row
    begin: jax.Array  # position of its first query


@dataclass(frozen=True)
class TileRing(KeyTiles):
    """A block's shared memory, and the copies that fill it: by cp.async, or by TMA, whose copies arrive at barriers."""

    by_tma: bool

    @property
    def tile_copies(self) -> int:
        """Copies that bring a tile of keys and one of values."""
        return 2 * (self.tile_tokens // self.box)

    def list_tiles(self) -> dict[str, tuple[tuple[int, ...], jnp.dtype]]:
        """Shapes and dtypes of the tiles in shared memory, by name."""
        tile = (self.tile_tokens, self.width)
        tiles = {"q": ((compat.TILE_ROWS, self.width), self.dtype)}  # its memory holds the outputs at the end
        for name in ("keys", "values"):
            tiles[name] = ((self.stages, *tile), self.page_dtype)
            if self.is_narrow:
                tiles[f"wide_{name}"] = (tile, self.dtype)
        return tiles

    def choose_swizzle(self, name: str) -> int:
        """The swizzle of a tile, in bytes."""
        copied = {"q": self.num_rows, "keys": self.box, "values": self.box}
        return compat.choose_swizzle(copied.get(name, self.tile_tokens), self.width, self.list_tiles()[name][1])

    def make_scratch(self) -> dict[str, object]:
        """Shared memory of a block, and the barriers of TMA."""
        tiles = self.list_tiles().items()
        scratch = {name: tile_smem(shape, dtype, self.choose_swizzle(name)) for name, (shape, dtype) in tiles}
        columns = self.fit_partials(self.width)
        swizzle = compat.choose_swizzle(self.num_rows, columns, self.partial_dtype)
        outputs = tile_smem((compat.TILE_ROWS, columns), self.partial_dtype, swizzle)
        scratch["q_then_outputs"] = SmemUnion(scratch.pop("q"), outputs)
        if self.by_tma:
            scratch["q_loaded"] = compat.Barrier()
            scratch["loaded"] = compat.Barrier(num_arrivals=self.tile_copies, num_barriers=self.stages)
        return scratch

    def fill(self, index: jax.Array, ids: Ids, unit: Unit, pages: jax.Ref, scratch: Scratch) -> None:
        """Starts the copies of a tile into its slot; past the unit's last tile they are empty."""
        slot = lax.rem(index, self.stages)

        @pl.when(index < unit.num_tiles)
        def _() -> None:
            # A tile begins in the middle of a page only if pages are larger than tiles.
            is_part = self.page_size > self.tile_tokens
            start = lax.rem((unit.first_tile + index) * self.tile_tokens, self.page_size) if is_part else 0
            loaded = scratch["loaded"].at[slot] if self.by_tma else None
            for part, name in enumerate(("keys", "values")):
                for box, page in enumerate(ids):
                    source = pages.at[page, 2 * unit.head + part, pl.ds(start, self.box)]
                    compat.start_copy(source, scratch[name].at[slot, pl.ds(box * self.box, self.box)], loaded)

        @pl.when(index >= unit.num_tiles)
        def _() -> None:
            compat.skip_copies(self.tile_copies, by_tma=self.by_tma)

    def start(self, unit: Unit, q_ref: jax.Ref, pages: jax.Ref, find_pages: partial[Ids], scratch: Scratch) -> Ids:
        """Starts the copies of the queries and of the first `stages - 1` tiles. Returns the next tile's page ids."""
        # Rows of the tile beyond R stay undefined. Rows do not affect each other, and these are not copied out.
        q_loaded = scratch["q_loaded"] if self.by_tma else None
        compat.start_copy(q_ref.at[unit.queries, unit.head], scratch["q"].at[pl.ds(0, self.num_rows)], q_loaded)
        for index in range(self.stages - 1):
            self.fill(jnp.int32(index), find_pages(jnp.int32(index)), unit, pages, scratch)
        return find_pages(jnp.int32(self.stages - 1))

    def settle(self) -> None:
        """Waits for all threads of the block, and for all copies: memory may then be filled for another unit."""
        if self.by_tma:
            commit_smem()
        else:
            compat.wait_copies(0, None)

    def wait_queries(self, scratch: Scratch) -> None:
        """Waits for the copy of the queries."""
        newer = (self.stages - 1) * self.tile_copies
        compat.wait_copies(newer, scratch["q_loaded"] if self.by_tma else None)

    def wait_tile(self, started: jax.Array, scratch: Scratch) -> None:
        """Waits for the oldest tile, with `started` tiles started so far and all slots but one taken."""
        newer = self.stages - 2
        slot = lax.rem(started - newer - 1, self.stages)
        compat.wait_copies(newer * self.tile_copies, scratch["loaded"].at[slot] if self.by_tma else None)

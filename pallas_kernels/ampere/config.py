"""Tuning of the kernel for Ampere and Ada."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TileConfig:
    """Tuning of every launch."""

    tile_tokens: int = 32  # keys per step of the softmax
    stages: int = 2  # tiles of keys and values in the ring: one is read while the others arrive

    def __post_init__(self) -> None:
        if self.tile_tokens not in (32, 64):
            raise ValueError(f"{type(self).__name__}.tile_tokens must be 32 or 64, got {self.tile_tokens}")
        for name, least in self._least().items():
            if getattr(self, name) < least:
                raise ValueError(f"{type(self).__name__}.{name} must be at least {least}, got {getattr(self, name)}")

    def _least(self) -> dict[str, int]:
        return {"stages": 2}


@dataclass(frozen=True)
class UnitConfig(TileConfig):
    """Tuning of a launch for rows with few queries, and of the units that they are cut into."""

    ctas_per_sm: int = 2  # blocks per SM that the tiles leave room for
    num_sms: int = 108
    min_split_tokens: int = 128  # the shortest unit, unless its row is shorter
    unit_cost: int = 3  # estimated cost of a unit in tiles, beyond its own

    def _least(self) -> dict[str, int]:
        return {**super()._least(), "ctas_per_sm": 1, "num_sms": 1, "min_split_tokens": 1, "unit_cost": 0}


@dataclass(frozen=True)
class AmpereConfig:
    """Tuning for rows with few queries (decode), and for tiles of the others (prefill)."""

    decode: UnitConfig
    prefill: TileConfig

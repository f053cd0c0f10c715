"""What can be tuned of the kernel for Ampere and Ada."""

from __future__ import annotations

from dataclasses import dataclass

VERSIONS = {"ampere_decode": 1, "ampere_prefill": 1}  # of the kernel, by what tables are for


@dataclass(frozen=True)
class UnitConfig:
    """The tuning of the kernel for units of one kind."""

    tile_tokens: int = 32  # keys per step of the softmax
    stages: int = 2  # tiles of keys and values in the ring: all but one are on their way while that is in use
    ctas_per_sm: int = 2
    num_sms: int = 108
    min_split_tokens: int = 256  # no unit is shorter, unless its row is
    unit_cost: int = 3  # in tiles, beyond those of a unit: splits are chosen by it

    def __post_init__(self) -> None:
        if self.tile_tokens not in (32, 64):
            raise ValueError(f"UnitConfig.tile_tokens must be 32 or 64, got {self.tile_tokens}")
        least = {"stages": 2, "ctas_per_sm": 1, "num_sms": 1, "min_split_tokens": 1, "unit_cost": 0}
        for name, value in least.items():
            if getattr(self, name) < value:
                raise ValueError(f"UnitConfig.{name} must be at least {value}, got {getattr(self, name)}")


@dataclass(frozen=True)
class AmpereConfig:
    """For rows of few queries, which are cut into units, and for tiles of the others, which take the tiling only."""

    decode: UnitConfig
    prefill: UnitConfig

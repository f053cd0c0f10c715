"""Block sizes for a device, and the step cut into units by them."""

from __future__ import annotations

from pallas_kernels.ampere.config import AmpereConfig, TileConfig, UnitConfig
from pallas_kernels.ampere.device import find_sm_bytes
from pallas_kernels.ampere.launch import count_smem_bytes
from pallas_kernels.mosaic_gpu.shapes import stored_width
from pallas_kernels.mosaic_gpu.units import UnitPlan, plan_units
from pallas_kernels.platform import traced_core_count
from pallas_kernels.spec import AttnShape
from pallas_kernels.tune import tune
from pallas_kernels.worklist import StepRows

_BLOCK_RESERVE = 1024  # the SM's own, per block
_MAX_STAGES = 4
_WIDE = 192  # stored heads whose accumulators leave too few registers for the scores of 64 keys


def default_config(shape: AttnShape) -> AmpereConfig:
    """Two blocks per SM if their rings fit, so that one computes while the other waits; tiles of 64 keys if they fit;
    and the longest such ring.

    Raises:
        ValueError: not even the smallest ring fits.
    """
    sm_bytes = find_sm_bytes()
    for ctas_per_sm in (2, 1):
        room = sm_bytes // ctas_per_sm - _BLOCK_RESERVE
        for tile_tokens in (64, 32) if stored_width(shape) < _WIDE else (32,):
            fitting = [s for s in range(2, _MAX_STAGES + 1) if count_smem_bytes(shape, tile_tokens, s) <= room]
            if fitting:
                units = UnitConfig(tile_tokens, fitting[-1], ctas_per_sm, traced_core_count())
                return AmpereConfig(units, TileConfig(tile_tokens, fitting[-1]))
    raise ValueError(f"no ring of two tiles of {shape.spec} fits the shared memory of a block")


def find_config(shape: AttnShape, rows: StepRows) -> AmpereConfig:
    """The configuration of the device's table, else by formula."""
    formula = default_config(shape)
    return AmpereConfig(
        tune("ampere_decode", formula.decode, shape, rows),
        tune("ampere_prefill", formula.prefill, shape, rows),
    )


def plan_work(rows: StepRows, shape: AttnShape, config: AmpereConfig) -> UnitPlan:
    """Splits of the rows with few queries, tiles of the others."""
    return plan_units(rows, shape, config, tuning=config.decode, chunk_tile_tokens=config.prefill.tile_tokens)

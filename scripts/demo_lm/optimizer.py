"""The optimizer: Muon for the matrices, AdamW for the rest, with a warm-up, a plateau and a linear decay."""

from __future__ import annotations

from typing import Any

import jax
import optax
import optax.contrib


def make_schedule(peak: float, num_steps: int, *, warmup: int = 60, decay_share: float = 0.75) -> optax.Schedule:
    """Linear warm-up to `peak`, constant, then linear to zero over the last `decay_share` of `num_steps`."""
    decay = max(1, int(num_steps * decay_share))
    return optax.join_schedules(
        [
            optax.linear_schedule(0.0, peak, warmup),
            optax.constant_schedule(peak),
            optax.linear_schedule(peak, 0.0, decay),
        ],
        [warmup, max(warmup, num_steps - decay)],
    )


def make_optimizer(num_steps: int, *, matrix_lr: float = 0.01, other_lr: float = 0.003) -> optax.GradientTransformation:
    """Muon (orthogonalized momentum; Jordan et al. 2024) for the matrices: it asks for fewer tokens, which a CPU is
    short of. Embeddings and norm scales, which are no linear maps, stay with AdamW.
    """
    return optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.contrib.muon(
            make_schedule(matrix_lr, num_steps),
            weight_decay=0.01,
            adam_b2=0.98,
            adam_learning_rate=make_schedule(other_lr, num_steps),
            muon_weight_dimension_numbers=_mark_matrices,
        ),
    )


def _mark_matrices(params: Any) -> Any:
    """Muon's default axes for each kernel; None, which means AdamW, for everything else."""
    return jax.tree_util.tree_map_with_path(
        lambda path, _: optax.contrib.MuonDimensionNumbers() if path[-1].key == "kernel" else None, params
    )

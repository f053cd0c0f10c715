"""Predictions from before the first device ran anything: from compiled programs and the parts' rates."""

from __future__ import annotations

PREDICTIONS = {
    ("probe", "rates"): "H200: copy 4.3 TB/s, matmul 790 TFLOP/s; H100: 3.0 TB/s, 800 TFLOP/s",
    ("engine", "1 x 512"): "5.2 to 5.6 ms on an H200 (limit 3.5), 7.0 on an H100",
    ("engine", "32 x 4096"): "11 to 12 ms on an H200 (limit 7.5), 15 to 16 on an H100",
    ("engine", "256 x 512"): "14 to 15 ms on an H200 (limit 9 to 10)",
    ("engine", "128 x 4096"): "does not fit an H100",
    ("engine", "prompts of 2048"): "60 ms a step",
    ("engine", "trace"): "about 430 kernels a step",
}


def predict(stage: str, item: str) -> str:
    """Returns the prediction of an item; empty if there is none."""
    return PREDICTIONS.get((stage, item), "")

"""Choosing the next token on the device: pure functions of arrays, one program for every mix of parameters."""

from __future__ import annotations

from jaxserve.sampling.randomness import Purpose, row_keys
from jaxserve.sampling.sampler import SamplingInputs, finite_rows, sample, sample_greedy

__all__ = ["Purpose", "SamplingInputs", "finite_rows", "row_keys", "sample", "sample_greedy"]

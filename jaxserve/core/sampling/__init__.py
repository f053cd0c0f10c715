"""Chooses the next tokens on the device: pure functions of arrays that serve any mix of parameters."""

from __future__ import annotations

from jaxserve.core.sampling.by_row import map_rows
from jaxserve.core.sampling.logprobs import LogprobArrays, compute_logprobs, gather_logprobs, gather_prompt_logprobs
from jaxserve.core.sampling.randomness import row_keys
from jaxserve.core.sampling.sampler import SamplingInputs, draw_uniforms, is_finite, sample, sample_greedy
from jaxserve.core.sampling.sampler_state import (
    MAX_BAD_WORD_TOKENS,
    MAX_BAD_WORDS,
    MAX_EDITS,
    RowSetting,
    SamplerState,
    make_row_setting,
    pack_bits,
    record,
    sampler_state_specs,
    set_row,
)
from jaxserve.core.sampling.shaping import mask_logits, shape_logits

__all__ = [
    "MAX_BAD_WORDS",
    "MAX_BAD_WORD_TOKENS",
    "MAX_EDITS",
    "LogprobArrays",
    "RowSetting",
    "SamplerState",
    "SamplingInputs",
    "compute_logprobs",
    "draw_uniforms",
    "gather_logprobs",
    "gather_prompt_logprobs",
    "is_finite",
    "make_row_setting",
    "map_rows",
    "mask_logits",
    "pack_bits",
    "record",
    "row_keys",
    "sample",
    "sample_greedy",
    "sampler_state_specs",
    "set_row",
    "shape_logits",
]

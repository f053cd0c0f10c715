"""Choosing the next token on the device: pure functions of arrays, one program for every mix of parameters."""

from __future__ import annotations

from jaxserve.sampling.randomness import Purpose, row_keys
from jaxserve.sampling.sampler import SamplingInputs, finite_rows, sample, sample_greedy
from jaxserve.sampling.scores import TokenScores, score_all, score_prompt, score_tokens
from jaxserve.sampling.shaping import mask_logits, shape_logits
from jaxserve.sampling.state import (
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

__all__ = [
    "MAX_BAD_WORDS",
    "MAX_BAD_WORD_TOKENS",
    "MAX_EDITS",
    "Purpose",
    "RowSetting",
    "SamplerState",
    "SamplingInputs",
    "TokenScores",
    "finite_rows",
    "make_row_setting",
    "mask_logits",
    "pack_bits",
    "record",
    "row_keys",
    "sample",
    "sample_greedy",
    "sampler_state_specs",
    "score_all",
    "score_prompt",
    "score_tokens",
    "set_row",
    "shape_logits",
]

"""Guesses the next tokens on the device: pure functions of arrays, without knowledge of plans."""

from __future__ import annotations

from jaxserve.speculation.answers import AnswerQueue
from jaxserve.speculation.blocks import measure_block, pack_block, unpack_block
from jaxserve.speculation.corpus import Corpus, CorpusShape, answer_block_specs
from jaxserve.speculation.drafts import NO_DRAFT
from jaxserve.speculation.history import Span, make_row_blocks, row_block_specs
from jaxserve.speculation.lookup import LOOKUP_METHODS, LookupDrafter, LookupState, make_lookup_drafter

__all__ = [
    "LOOKUP_METHODS",
    "NO_DRAFT",
    "AnswerQueue",
    "Corpus",
    "CorpusShape",
    "LookupDrafter",
    "LookupState",
    "Span",
    "answer_block_specs",
    "make_lookup_drafter",
    "make_row_blocks",
    "measure_block",
    "pack_block",
    "row_block_specs",
    "unpack_block",
]

"""Drafts of the next tokens: the step features `Lookups` and `Drafter`, and the pure functions under them."""

from __future__ import annotations

from jaxserve.core.sampling.drafts import NO_DRAFT
from jaxserve.features.speculation.answers import AnswerQueue
from jaxserve.features.speculation.blocks import measure_block, unpack_block
from jaxserve.features.speculation.corpus import Corpus, CorpusShape, answer_block_specs
from jaxserve.features.speculation.history import Span, pack_rows, row_block_specs
from jaxserve.features.speculation.lookup import LOOKUP_METHODS, LookupDrafter, LookupState, make_lookup_drafter

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
    "measure_block",
    "pack_rows",
    "row_block_specs",
    "unpack_block",
]

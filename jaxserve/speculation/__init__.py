"""Guesses the next tokens on the device: pure functions of arrays, without knowledge of plans."""

from __future__ import annotations

from jaxserve.speculation.answers import AnswerQueue
from jaxserve.speculation.corpus import Corpus, CorpusShape, measure_block
from jaxserve.speculation.drafts import NO_DRAFT
from jaxserve.speculation.lookup import LOOKUP_METHODS, LookupDrafter, LookupState, make_lookup_drafter

__all__ = [
    "LOOKUP_METHODS",
    "NO_DRAFT",
    "AnswerQueue",
    "Corpus",
    "CorpusShape",
    "LookupDrafter",
    "LookupState",
    "make_lookup_drafter",
    "measure_block",
]

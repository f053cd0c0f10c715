"""Guesses the next tokens on the device: pure functions of arrays, without knowledge of plans."""

from __future__ import annotations

from jaxserve.speculation.corpus import Corpus
from jaxserve.speculation.drafts import NO_DRAFT
from jaxserve.speculation.lookup import LOOKUP_METHODS, LookupDrafter, LookupState, make_lookup_drafter

__all__ = ["LOOKUP_METHODS", "NO_DRAFT", "Corpus", "LookupDrafter", "LookupState", "make_lookup_drafter"]

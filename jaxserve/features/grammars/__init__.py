"""Structured output: grammars over token ids, and the masks of the tokens that may come next.

Host-only: nothing here imports jax. numpy and llguidance are imported when the first grammar is compiled or the first
mask is computed. A request's constraint becomes a `Grammar`, compiled first in a process that can be killed and then
here. Each of its sequences has a `Matcher`, and a `MaskPool` fills the masks of a step in threads.
"""

from __future__ import annotations

from jaxserve.features.grammars.compiler import Grammar, GrammarCompiler
from jaxserve.features.grammars.errors import CheckerError, MatcherError
from jaxserve.features.grammars.matcher import Matcher
from jaxserve.features.grammars.pool import MaskBatch, MaskPool

__all__ = [
    "CheckerError",
    "Grammar",
    "GrammarCompiler",
    "MaskBatch",
    "MaskPool",
    "Matcher",
    "MatcherError",
]

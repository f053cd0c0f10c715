"""How tokens are drafted, in vLLM's keys."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SpeculativeConfig:
    """Who drafts, and how many tokens. The keys of other methods are refused, so each is None or a default there."""

    method: str  # "ngram", "suffix", "eagle3", "mtp" or "draft_model"
    num_speculative_tokens: int  # the most drafts of a row in a step
    model: str | None = None  # the checkpoint of the head or the draft model
    prompt_lookup_min: int = 1  # ngram: the fewest tokens that must match
    prompt_lookup_max: int = 1  # and the most that are compared
    suffix_decoding_max_tree_depth: int = 24  # suffix: the most tokens that are compared
    suffix_decoding_max_spec_factor: float = 1.0  # drafts per matched token
    suffix_decoding_min_token_prob: float = 0.1  # share of a draft among the continuations seen
    suffix_decoding_max_cached_requests: int = 10_000  # finished answers to search; 0: only the row's own tokens
    suffix_decoding_corpus_tokens: int = 65_536  # tokens of finished answers that are kept
    draft_sample_method: str = "greedy"  # or "probabilistic": drafts are drawn with the row's own uniforms
    rejection_sample_method: str = "standard"
    num_speculative_tokens_per_batch_size: tuple[tuple[int, int, int], ...] | None = None  # (from, to, drafts)

"""Recognises unsupported models by their config.json, so that the error can say what would work."""

from __future__ import annotations

from collections.abc import Mapping

_MULTIMODAL = "it reads images or sound; give a text-only checkpoint"
_NO_GENERATOR = "it does not generate text, and is no embedding model that is served"
_CLASSIFIER = "a classifier or reranker of an architecture that is not served as one"
# Config keys that are set in one kind of model only, and what the error says; the first match counts.
_KINDS: tuple[tuple[tuple[str, ...], str], ...] = (
    (("vision_config", "audio_config", "vision_tower", "mm_vision_tower", "visual", "embd_layer"), _MULTIMODAL),
    (("is_encoder_decoder",), "an encoder-decoder; only decoders that generate text are served"),
    (("index_topk", "index_n_heads"), "it attends sparsely, by an indexer, which is not served yet"),
    (
        ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "num_experts_per_tok"),
        "a mixture of experts that is not served yet",
    ),
)


def describe_kind(hf_config: Mapping[str, object]) -> str | None:
    """Returns which unsupported kind of model a config.json describes, and what to give instead; None if none."""
    for keys, kind in _KINDS:
        if any(hf_config.get(key) for key in keys):
            return kind
    text = hf_config.get("text_config")
    if isinstance(text, Mapping):
        return describe_kind(text) or _MULTIMODAL
    architectures = hf_config.get("architectures")
    names = [name for name in architectures if isinstance(name, str)] if isinstance(architectures, list) else []
    if any(name.endswith("ForSequenceClassification") for name in names):
        return _CLASSIFIER
    if names and not any(name.endswith(("ForCausalLM", "LMHeadModel")) for name in names):
        return _NO_GENERATOR
    return None

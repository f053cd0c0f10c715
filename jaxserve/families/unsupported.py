"""Recognises unsupported models by their config.json, so that the error can say what would work."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

_MULTIMODAL = "it reads images or sound; give a text-only checkpoint"
_NO_GENERATOR = "it does not generate text, and is no embedding model that is served"
_CLASSIFIER = "a classifier or reranker of an architecture that is not served as one"
_RELATIVE = "its attention adds relative positions, which are not served"
_T5 = "an encoder-decoder, whose attention adds relative positions, which are not served"
_ALIBI = "its attention has ALiBi in place of positions, which is not served"
_LATE = "it gives a vector for each token, for late interaction, which is not served"
# Encoders by what they lack here: the `model_type`, then `position_embedding_type`, then a part of the architecture.
_ENCODERS = {
    "mpnet": _RELATIVE,
    "t5": _T5,
    "mt5": _T5,
    "umt5": _T5,
    "deberta": "its attention is disentangled from positions (DeBERTa), which is not served",
    "deberta-v2": "its attention is disentangled from positions (DeBERTa), which is not served",
    "colmodernvbert": _LATE,
}
_POSITIONS = {"alibi": _ALIBI, "relative_key": _RELATIVE, "relative_key_query": _RELATIVE}
_PARTS = {"jinabert": _ALIBI, "colbert": _LATE, "splade": "its vectors are sparse (SPLADE), which are not served"}
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

_RECURRENT = "whose recurrent state is not served yet"
# Beginnings of model types whose layers no family has, and what the error says.
_RECURRENT_TYPES: dict[str, str] = {
    **dict.fromkeys(("mamba", "falcon_mamba"), f"it has Mamba layers, {_RECURRENT}"),
    **dict.fromkeys(("zamba", "jamba", "bamba", "falcon_h1"), f"it has Mamba layers, {_RECURRENT}"),
    "rwkv": f"it has RWKV layers, {_RECURRENT}",
    **dict.fromkeys(("kimi_linear", "bailing_moe_v3"), f"it has Kimi Delta Attention, {_RECURRENT}"),
    "qwen4_exp": "it has an indexer and hyper connections, which are not served yet",
    "glm5_next": "it has an indexer, which is not served yet",
}
_NO_TOWER = {"gemma4_unified": "its images have no tower; gemma4 is served"}  # by model type


def describe_kind(hf_config: Mapping[str, object]) -> str | None:
    """Returns which unsupported kind of model a config.json describes, and what to give instead; None if none."""
    architectures = hf_config.get("architectures")
    names = [name for name in architectures if isinstance(name, str)] if isinstance(architectures, list) else []
    model_type = str(hf_config.get("model_type"))
    found = _describe_encoder(hf_config, names) or _NO_TOWER.get(model_type) or _describe_recurrence(model_type)
    found = found or next((kind for keys, kind in _KINDS if any(hf_config.get(key) for key in keys)), None)
    if found is not None:
        return found
    text = hf_config.get("text_config")
    if isinstance(text, Mapping):
        return describe_kind(text) or _MULTIMODAL
    if any(name.endswith("ForSequenceClassification") for name in names):
        return _CLASSIFIER
    if names and not any(name.endswith(("ForCausalLM", "LMHeadModel")) for name in names):
        return _NO_GENERATOR
    return None


def _describe_encoder(hf_config: Mapping[str, object], names: Iterable[str]) -> str | None:
    """Returns what an encoder has that is not served; `names` are its architectures."""
    for key, known in (("model_type", _ENCODERS), ("position_embedding_type", _POSITIONS)):
        if str(hf_config.get(key)) in known:
            return known[str(hf_config[key])]
    return next((kind for part, kind in _PARTS.items() if any(part in name.lower() for name in names)), None)


def _describe_recurrence(model_type: str) -> str | None:
    """Returns which layers with a state a type of model has that are not served."""
    return next((kind for name, kind in _RECURRENT_TYPES.items() if model_type.startswith(name)), None)

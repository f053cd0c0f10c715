"""The golden cases of embedding models: tiny random checkpoints in the form that sentence-transformers saves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

SMALL = {
    "vocab_size": 90,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
TEXT_LENGTHS = (1, 5, 16, 17, 40, 60)
DECODER = {"num_key_value_heads": 1, "bos_token_id": 1, "eos_token_id": 2}


@dataclass(frozen=True)
class EncoderCase:
    """One checkpoint: the keys of its config on top of `SMALL` (None: without it), how it pools, and what follows.

    `modules` are "LayerNorm", or the arguments of Dense behind its first. With `bare` names of tensors lack the module
    around all; else they have it. `written`: keys of config.json to change before our files have them.
    """

    name: str
    model_type: str
    pooling: str | tuple[str, ...]
    normalize: bool = True
    modules: tuple[str | dict[str, Any], ...] = ()
    bare: bool = True
    old_files: bool = False  # the spelling before version 6
    config: dict[str, Any] | None = None
    written: dict[str, Any] | None = None


def dense(width: int, activation: str = "Identity", **more: bool) -> dict[str, Any]:
    """The arguments of a projection; `activation` is a class of torch.nn."""
    return {"out_features": width, "activation_function": activation, **more}


SHORT = {"intermediate_size": None, "hidden_dim": 40}  # DistilBERT's name
MODERNBERT = {"num_hidden_layers": 4, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2}
ENCODER_CASES = (
    EncoderCase("bert_mean", "bert", "mean"),
    EncoderCase("bert_cls", "bert", "cls", old_files=True, config={"hidden_act": "gelu_new", "type_vocab_size": 1}),
    EncoderCase("bert_dense", "bert", "mean", normalize=False, modules=(dense(24, "Tanh"),), bare=False),
    EncoderCase("roberta_mean", "roberta", "mean", bare=False, config={"pad_token_id": 1, "type_vocab_size": 1}),
    EncoderCase(
        "xlm_roberta_cls", "xlm-roberta", "cls", old_files=True, config={"pad_token_id": 1, "type_vocab_size": 1}
    ),
    EncoderCase("qwen3_last", "qwen3", "lasttoken", config={**DECODER, "head_dim": 16}),
    EncoderCase("qwen2_mean", "qwen2", "mean", modules=(dense(20),), config=DECODER),
    EncoderCase("mistral_last", "mistral", "lasttoken", bare=False, old_files=True, config=DECODER),
    EncoderCase("llama_cls", "llama", "cls", normalize=False, config=DECODER),
    EncoderCase("distilbert_mean", "distilbert", "mean", config=SHORT),
    EncoderCase("modernbert_cls", "modernbert", "cls", config={**MODERNBERT, "local_attention": 16}),
    EncoderCase(
        "modernbert_biases",
        "modernbert",
        "mean",
        bare=False,
        config={**MODERNBERT, "local_attention": 11, "norm_bias": True, "attention_bias": True, "mlp_bias": True},
    ),
    EncoderCase("nomic_bert_mean", "nomic_bert", "mean"),
    EncoderCase("gte_cls", "gte", "cls", bare=False, config={"type_vocab_size": 0}),
    # The authors' code cannot be had, so this is transformers' model with what their NTK does written out: the base is
    # multiplied by the factor, and each frequency divided by factor ** (2 / head width).
    EncoderCase(
        "gte_new_cls",
        "gte",
        "cls",
        bare=False,
        config={
            "type_vocab_size": 1,
            "rope_parameters": {"rope_type": "linear", "rope_theta": 3.0 * 1000.0, "factor": 3.0 ** (2 / 16)},
        },
        written={
            "model_type": "new",
            "architectures": ["NewModel"],
            "rope_parameters": None,
            "rope_theta": 1000.0,
            "rope_scaling": {"type": "ntk", "factor": 3.0},
            "layer_norm_type": "layer_norm",
            "position_embedding_type": "rope",
            "pack_qkv": True,
            "logn_attention_scale": False,
            "unpad_inputs": False,
        },
    ),
    EncoderCase("eurobert_mean", "eurobert", "mean", config={**DECODER, "mask_token_id": 3}),
    EncoderCase(
        "llama_bidirec_mean",
        "llama",
        "mean",
        config={**DECODER, "is_causal": False},
        written={
            "model_type": "llama_bidirec",
            "architectures": ["LlamaBidirectionalModel"],
            "pooling": "avg",
            "is_causal": None,
        },
    ),
    EncoderCase(
        "embedding_gemma",
        "gemma3_text",
        "mean",
        modules=(dense(48, bias=False), dense(24, bias=False)),
        config={
            **DECODER,
            "num_hidden_layers": 3,
            "head_dim": 16,
            "query_pre_attn_scalar": 24,
            "sliding_window": 14,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
            "use_bidirectional_attention": True,
        },
    ),
    EncoderCase("distiluse", "distilbert", "mean", normalize=False, modules=(dense(24, "Tanh"),), config=SHORT),
    EncoderCase("bert_max", "bert", "max", normalize=False, old_files=True),
    EncoderCase("bert_sqrt", "bert", "mean_sqrt_len_tokens", normalize=False),
    EncoderCase("qwen3_weighted", "qwen3", "weightedmean", config={**DECODER, "head_dim": 16}),
    EncoderCase(
        "bert_joined",
        "bert",
        ("cls", "mean", "max"),
        modules=("LayerNorm", dense(24, "GELU", use_residual=True), "LayerNorm", dense(24, "Tanh", use_residual=True)),
    ),
)

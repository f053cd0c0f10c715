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
    """One checkpoint: the keys of its config on top of `SMALL`, how it pools, and the modules behind.

    `dense` is the width and the activation, a class of torch.nn, of a projection. With `bare` names of tensors lack the
    module around all; else they have it.
    """

    name: str
    model_type: str
    pooling: str
    normalize: bool = True
    dense: tuple[int, str] | None = None
    bare: bool = True
    old_files: bool = False  # the spelling before version 6
    config: dict[str, Any] | None = None


ENCODER_CASES = (
    EncoderCase("bert_mean", "bert", "mean"),
    EncoderCase("bert_cls", "bert", "cls", old_files=True, config={"hidden_act": "gelu_new", "type_vocab_size": 1}),
    EncoderCase("bert_dense", "bert", "mean", normalize=False, dense=(24, "Tanh"), bare=False),
    EncoderCase("roberta_mean", "roberta", "mean", bare=False, config={"pad_token_id": 1, "type_vocab_size": 1}),
    EncoderCase(
        "xlm_roberta_cls", "xlm-roberta", "cls", old_files=True, config={"pad_token_id": 1, "type_vocab_size": 1}
    ),
    EncoderCase("qwen3_last", "qwen3", "lasttoken", config={**DECODER, "head_dim": 16}),
    EncoderCase("qwen2_mean", "qwen2", "mean", dense=(20, "Identity"), config=DECODER),
    EncoderCase("mistral_last", "mistral", "lasttoken", bare=False, old_files=True, config=DECODER),
    EncoderCase("llama_cls", "llama", "cls", normalize=False, config=DECODER),
)

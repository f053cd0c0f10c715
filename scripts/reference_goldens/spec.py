"""The description of a golden case: sizes, lengths and how its weights are drawn.

Sizes are as small as the option allows (hidden 16-36, two layers unless a layer pattern needs more), because
the checkpoints live in the repository. Every case is meant to be served with `max_model_len` 160.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

MAX_MODEL_LEN = 160
NEW_TOKENS = 64
PROMPT_LENGTHS = (1, 5, 17, 40, 70)
WINDOW = 16  # shorter than three of the prompts, so the window cuts in prefill as well as in decode

THETA = 10000.0
TIED: dict[str, Any] = {"embed_std": 0.15, "final_norm": 4.0}  # see checkpoint.choose_norm_centre
DEFAULT_ROPE = {"rope_type": "default", "rope_theta": THETA}
SMALL = {
    "vocab_size": 83,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


@dataclass(frozen=True)
class Case:
    """One checkpoint to build and record.

    `config` holds keyword arguments of the transformers config class on top of `SMALL`. `ablations` are config
    overrides that must each move the logits, or the case would not show that its option is implemented.
    `shard_size` splits the safetensors file; `experts` says how it stores them: a tensor each, all of a layer in one,
    or packed in MXFP4. `rope_seq_len` pins the length used by dynamic NTK scaling.
    """

    name: str
    family: str
    covers: str
    config: dict[str, Any] = field(default_factory=dict)
    ablations: tuple[dict[str, Any], ...] = ()
    prompt_lengths: tuple[int, ...] = PROMPT_LENGTHS
    dtype: str = "float32"
    shard_size: str | None = None
    legacy_config: bool = False
    rope_seq_len: int | None = None
    linear_std: float = 0.35
    embed_std: float = 0.5
    head_std: float = 1.0
    final_norm: float = 1.0
    experts: Literal["single", "joined", "mxfp4"] = "single"


def scale_rope(**parameters: Any) -> dict[str, Any]:
    """Rope parameters in the transformers 5 spelling, with the base filled in."""
    return {"rope_theta": THETA, **parameters}

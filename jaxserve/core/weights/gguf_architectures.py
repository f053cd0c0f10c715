"""The architectures of GGUF files that are read: what their keys and modules are called in Hugging Face's files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

_KEYS = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
}
_EXPERT_KEYS = {"expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok"}
_ATTENTION = {f"attn_{part}": f"self_attn.{part}_proj" for part in "qkv"} | {"attn_output": "self_attn.o_proj"}
_QK_NORMS = {f"attn_{part}_norm": f"self_attn.{part}_norm" for part in "qk"}
_MLP = {f"ffn_{part}": f"mlp.{part}_proj" for part in ("gate", "up", "down")}
_PRE_NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
_POST_NORMS = {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"}
_GEMMA_NORMS = _POST_NORMS | {"attn_norm": "input_layernorm", "ffn_norm": "pre_feedforward_layernorm"}
_EXPERTS = {f"ffn_{part}_exps": f"mlp.experts.{{}}.{part}_proj" for part in ("gate", "up", "down")}
_MIXTRAL_EXPERTS = {
    f"ffn_{part}_exps": f"block_sparse_moe.experts.{{}}.{name}"
    for part, name in (("gate", "w1"), ("up", "w3"), ("down", "w2"))
}


@dataclass(frozen=True)
class Architecture:
    """One architecture.

    `keys` are the names in config.json of keys below the architecture's own, `fixed` what no key says. `modules` are
    the names of a layer's modules below `model.layers.{index}.`, where {} stands for an expert's number. `permutes`:
    rows of q and k are in the order that rotates interleaved pairs. `adds_one`: norms hold 1 more than their weight.
    `latent`: attention keeps a latent, and its heads have sizes of their own. `joined` are modules that the family
    reads as parts of one.
    """

    model_type: str
    class_name: str
    modules: Mapping[str, str]
    keys: Mapping[str, str] = field(default_factory=dict)
    fixed: dict[str, Any] = field(default_factory=dict)
    permutes: bool = False
    adds_one: bool = False
    latent: bool = False
    joined: tuple[str, ...] = ()

    def find_key(self, name: str) -> str | None:
        """Returns the name in config.json of a key."""
        return (_KEYS | self.keys).get(name)


_LLAMA = _ATTENTION | _PRE_NORMS | _MLP
_GEMMA_KEYS = {"attention.sliding_window": "sliding_window", "final_logit_softcapping": "final_logit_softcapping"}
_MIXTRAL = Architecture(
    "mixtral",
    "MixtralForCausalLM",
    _ATTENTION | _PRE_NORMS | {"ffn_gate_inp": "block_sparse_moe.gate"} | _MIXTRAL_EXPERTS,
    _EXPERT_KEYS,
    permutes=True,
)
_LATENT = {"attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa", "attn_output": "self_attn.o_proj"}
_LATENT |= {f"attn_{part}": f"self_attn.{part}_proj" for part in ("q", "q_a", "q_b")}
_LATENT |= {f"attn_{part}_norm": f"self_attn.{part}_layernorm" for part in ("q_a", "kv_a")}
_DEEPSEEK_V2 = Architecture(
    "deepseek_v2",
    "DeepseekV2ForCausalLM",
    _LATENT
    | _PRE_NORMS
    | _MLP
    | {"ffn_gate_inp": "mlp.gate", "exp_probs_b": "mlp.gate.e_score_correction_bias"}
    | {f"ffn_{part}_shexp": f"mlp.shared_experts.{part}_proj" for part in ("gate", "up", "down")}
    | _EXPERTS,
    {
        "attention.q_lora_rank": "q_lora_rank",
        "attention.kv_lora_rank": "kv_lora_rank",
        "leading_dense_block_count": "first_k_dense_replace",
        "expert_count": "n_routed_experts",
        "expert_shared_count": "n_shared_experts",
        "expert_used_count": "num_experts_per_tok",
        "expert_feed_forward_length": "moe_intermediate_size",
        "expert_weights_scale": "routed_scaling_factor",
        "expert_weights_norm": "norm_topk_prob",
        "expert_group_count": "n_group",
        "expert_group_used_count": "topk_group",
    },
    # Files without groups are run without groups by llama.cpp, too.
    {"q_lora_rank": None, "n_group": 1, "topk_group": 1, "topk_method": "group_limited_greedy"},
    latent=True,
    joined=("attn_k_b", "attn_v_b", "attn_kv_b"),
)
_DEEPSEEK_V3 = replace(
    _DEEPSEEK_V2,
    model_type="deepseek_v3",
    class_name="DeepseekV3ForCausalLM",
    fixed=_DEEPSEEK_V2.fixed | {"topk_method": "noaux_tc"},
)
_SIGMOID = 2  # `expert_gating_func` of DeepSeek-V3
ARCHITECTURES = {
    "llama": Architecture("llama", "LlamaForCausalLM", _LLAMA, permutes=True),
    "qwen2": Architecture("qwen2", "Qwen2ForCausalLM", _LLAMA),
    "qwen3": Architecture("qwen3", "Qwen3ForCausalLM", _LLAMA | _QK_NORMS),
    "qwen3moe": Architecture(
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        _ATTENTION | _PRE_NORMS | _QK_NORMS | {"ffn_gate_inp": "mlp.gate"} | _EXPERTS,
        _EXPERT_KEYS | {"expert_feed_forward_length": "moe_intermediate_size"},
        {"norm_topk_prob": True},
    ),
    "gemma2": Architecture(
        "gemma2",
        "Gemma2ForCausalLM",
        _ATTENTION | _MLP | _GEMMA_NORMS,
        _GEMMA_KEYS | {"attn_logit_softcapping": "attn_logit_softcapping"},
        adds_one=True,
    ),
    "gemma3": Architecture(
        "gemma3_text",
        "Gemma3ForCausalLM",
        _ATTENTION | _QK_NORMS | _MLP | _GEMMA_NORMS,
        _GEMMA_KEYS
        | {"rope.freq_base_swa": "rope_local_base_freq", "attention.sliding_window_pattern": "sliding_window_pattern"},
        {"rope_theta": 1000000.0},
        adds_one=True,
    ),
    "phi3": Architecture(
        "phi3",
        "Phi3ForCausalLM",
        _PRE_NORMS
        | {"attn_qkv": "self_attn.qkv_proj", "attn_output": "self_attn.o_proj"}
        | {"ffn_up": "mlp.gate_up_proj", "ffn_down": "mlp.down_proj"},
        {"attention.sliding_window": "sliding_window"},
    ),
    "olmo2": Architecture("olmo2", "Olmo2ForCausalLM", _ATTENTION | _QK_NORMS | _MLP | _POST_NORMS),
    "granite": Architecture(
        "granite",
        "GraniteForCausalLM",
        _LLAMA,
        {
            "embedding_scale": "embedding_multiplier",
            "residual_scale": "residual_multiplier",
            "attention.scale": "attention_multiplier",
            "logit_scale": "logits_scaling",
        },
        permutes=True,
    ),
    "glm4": Architecture(
        "glm4",
        "Glm4ForCausalLM",
        _ATTENTION
        | _PRE_NORMS
        | {"ffn_up": "mlp.gate_up_proj", "ffn_down": "mlp.down_proj"}
        | {"post_attention_norm": "post_self_attn_layernorm", "post_ffw_norm": "post_mlp_layernorm"},
    ),
    "gpt-oss": Architecture(
        "gpt_oss",
        "GptOssForCausalLM",
        _ATTENTION
        | {"attn_sinks": "self_attn.sinks", "ffn_gate_inp": "mlp.router"}
        | {"attn_norm": "input_layernorm", "post_attention_norm": "post_attention_layernorm"},
        _EXPERT_KEYS
        | {"expert_feed_forward_length": "intermediate_size", "attention.sliding_window": "sliding_window"},
        joined=("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"),
    ),
    "deepseek2": _DEEPSEEK_V2,
}


def choose_architecture(metadata: Mapping[str, Any]) -> Architecture | None:
    """Returns the architecture of a file's metadata; None for one that is not read."""
    name = metadata.get("general.architecture")
    if name == "llama" and metadata.get("llama.expert_count"):
        return _MIXTRAL
    if name == "deepseek2" and metadata.get("deepseek2.expert_gating_func") == _SIGMOID:
        return _DEEPSEEK_V3
    return ARCHITECTURES.get(name) if isinstance(name, str) else None

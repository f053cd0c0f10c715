"""The golden cases of families with experts."""

from __future__ import annotations

from .spec import WINDOW, Case, scale_rope

SMALL_HEADS = {"hidden_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}


def list_moe_cases() -> list[Case]:
    """Mixtral, Qwen, OLMoE, GLM-4.5, gpt-oss, MiniMax-M2: a tensor per expert, one for all, and packed."""
    qwen = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    return [
        Case(
            "mixtral",
            "mixtral",
            "4 experts of which a token has 2, window 16, files with one tensor per expert (w1, w2, w3)",
            {**SMALL_HEADS, "intermediate_size": 24, "num_local_experts": 4, "sliding_window": WINDOW},
            ablations=({"num_experts_per_tok": 1}, {"sliding_window": None}),
            shard_size="40KB",
        ),
        Case(
            "mixtral_packed",
            "mixtral",
            "3 experts in one tensor each for gate and up, and for down",
            {**SMALL_HEADS, "intermediate_size": 16, "num_local_experts": 3, "sliding_window": None},
            experts="joined",
        ),
        Case(
            "qwen2_moe",
            "qwen2_moe",
            "a shared block with a gate, weights that are not normalised, a dense layer among three",
            {
                **{key: value for key, value in SMALL_HEADS.items() if key != "head_dim"},
                **qwen,
                "num_hidden_layers": 3,
                "shared_expert_intermediate_size": 20,
                "mlp_only_layers": [1],
            },
            ablations=({"norm_topk_prob": True}, {"num_experts_per_tok": 3}),
        ),
        Case(
            "qwen3_moe",
            "qwen3_moe",
            "8 experts of which a token has 2, normalised weights, experts in every second layer, norms on heads",
            {**SMALL_HEADS, **qwen, "num_hidden_layers": 2, "decoder_sparse_step": 2, "norm_topk_prob": True},
            ablations=({"norm_topk_prob": False}, {"num_experts_per_tok": 1}),
        ),
        Case(
            "qwen3_moe_bf16",
            "qwen3_moe",
            "experts in every layer and in one tensor, checkpoint in bfloat16",
            {**SMALL_HEADS, **qwen, "num_experts": 4, "norm_topk_prob": True},
            experts="joined",
            dtype="bfloat16",
        ),
        Case(
            "olmoe",
            "olmoe",
            "7 experts of which a token has 3, norms over the whole projections of q and k",
            {
                "hidden_size": 24,
                "num_attention_heads": 3,
                "num_key_value_heads": 3,
                "intermediate_size": 12,
                "num_experts": 7,
                "num_experts_per_tok": 3,
            },
            ablations=({"norm_topk_prob": True}, {"num_experts_per_tok": 2}),
        ),
        *_list_newer_cases(),
    ]


def _list_newer_cases() -> list[Case]:
    """GLM-4.5, gpt-oss, MiniMax-M2."""
    glm = {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8}
    rope = {"rope_type": "yarn", "factor": 8.0, "truncate": False, "original_max_position_embeddings": 32}
    gpt_oss = {"num_experts_per_tok": 2, "sliding_window": WINDOW, "rope_parameters": scale_rope(**rope)}
    return [
        Case(
            "glm4_moe",
            "glm4_moe",
            "8 experts in 4 groups, chosen by sigmoids and a correction; a shared block, a dense layer, half rotation",
            {
                **SMALL_HEADS,
                **glm,
                "attention_bias": True,
                "n_group": 4,
                "topk_group": 2,
                "routed_scaling_factor": 1.5,
            },
            ablations=({"topk_group": 4}, {"norm_topk_prob": False}, {"routed_scaling_factor": 1.0}),
        ),
        Case(
            "glm4_moe_qk_norm",
            "glm4_moe",
            "norms on heads, two shared experts, one group, experts in one tensor",
            {**SMALL_HEADS, **glm, "use_qk_norm": True, "n_shared_experts": 2, "norm_topk_prob": False},
            ablations=({"num_experts_per_tok": 1},),
            experts="joined",
        ),
        Case(
            "gpt_oss",
            "gpt_oss",
            "sinks, window 16 on every other layer, 4 experts with biases and a clamped gate, yarn without truncation",
            {**SMALL_HEADS, **gpt_oss, "intermediate_size": 20, "num_local_experts": 4, "swiglu_limit": 1.5},
            ablations=(
                {"num_experts_per_tok": 1},
                {"sliding_window": 64},
                {"swiglu_limit": 7.0},
                {"swiglu_alpha": 1.0},
            ),
        ),
        Case(
            "gpt_oss_mxfp4",
            "gpt_oss",
            "3 experts packed in MXFP4, the rest of the checkpoint in bfloat16",
            {**SMALL_HEADS, **gpt_oss, "hidden_size": 32, "intermediate_size": 64, "num_local_experts": 3},
            experts="mxfp4",
            dtype="bfloat16",
        ),
        Case(
            "minimax_m2",
            "minimax_m2",
            "8 experts by sigmoids and a correction, norms over the whole projections of q and k, rotation of 4 of 8",
            {
                **SMALL_HEADS,
                "intermediate_size": 16,
                "num_local_experts": 8,
                "num_experts_per_tok": 2,
                "rope_parameters": scale_rope(rope_type="default", partial_rotary_factor=0.5),
            },
            ablations=(
                {"num_experts_per_tok": 1},
                {"rope_parameters": scale_rope(rope_type="default", partial_rotary_factor=1.0)},
            ),
        ),
    ]

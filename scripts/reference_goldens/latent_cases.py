"""The golden cases of families with latent attention."""

from __future__ import annotations

from typing import Any

from .spec import Case, scale_rope

SMALL_LATENTS: dict[str, Any] = {
    "hidden_size": 24,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 10,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 12,
    "first_k_dense_replace": 1,
}


YARN: dict[str, Any] = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32}
GROUPS: dict[str, Any] = {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.5}


def list_latent_cases() -> list[Case]:
    """DeepSeek-V2 and V3, GLM-4.7-Flash, Mistral Small 4."""
    return [*_list_deepseek_cases(), *_list_other_cases()]


def _list_deepseek_cases() -> list[Case]:
    return [
        Case(
            "deepseek_v2",
            "deepseek_v2",
            "queries without a latent, the best 2 of 4 groups by one score, two shared experts, yarn in the scale",
            {
                **SMALL_LATENTS,
                **GROUPS,
                "q_lora_rank": None,
                "num_experts_per_tok": 3,
                "topk_method": "group_limited_greedy",
                "rope_parameters": scale_rope(**YARN, mscale=0.7, mscale_all_dim=0.7),
            },
            ablations=(
                {"topk_group": 4},
                {"routed_scaling_factor": 1.0},
                {"rope_parameters": scale_rope(**YARN, mscale=0.7, mscale_all_dim=1.4)},
            ),
            legacy_config=True,
        ),
        Case(
            "deepseek_v2_greedy",
            "deepseek_v2",
            "a latent of queries, biases, experts without groups in every layer and in one tensor",
            {**SMALL_LATENTS, "attention_bias": True, "first_k_dense_replace": 0},
            ablations=({"num_experts_per_tok": 3},),
            experts="joined",
        ),
        Case(
            "deepseek_v3",
            "deepseek_v3",
            "8 experts in 4 groups, chosen by sigmoids and a correction, a dense layer, biases, yarn in the scale",
            {
                **SMALL_LATENTS,
                **GROUPS,
                "attention_bias": True,
                "rope_parameters": scale_rope(**YARN, mscale=1.0, mscale_all_dim=1.0),
            },
            ablations=(
                {"topk_group": 4},
                {"norm_topk_prob": False},
                {"rope_interleave": False},
                {"rope_parameters": scale_rope(**YARN)},
            ),
            legacy_config=True,
        ),
        Case(
            "deepseek_v3_bf16",
            "deepseek_v3",
            "rotation of halves, one group, checkpoint in bfloat16",
            {**SMALL_LATENTS, "rope_interleave": False, "n_group": 1, "topk_group": 1},
            ablations=({"rope_interleave": True},),
            dtype="bfloat16",
        ),
    ]


def _list_other_cases() -> list[Case]:
    return [
        Case(
            "glm4_moe_lite",
            "glm4_moe_lite",
            "values wider than keys, experts in the first of two layers by mlp_layer_types",
            {
                **{key: value for key, value in SMALL_LATENTS.items() if key != "first_k_dense_replace"},
                "v_head_dim": 16,
                "mlp_layer_types": ["sparse", "dense"],
                "rms_norm_eps": 0.05,
            },
            ablations=({"rms_norm_eps": 1e-6}, {"num_experts_per_tok": 1}),
        ),
        Case(
            "mistral4",
            "mistral4",
            "queries that grow every 32 tokens, experts chosen by a softmax, the best 2 of 4 groups",
            {
                **SMALL_LATENTS,
                **GROUPS,
                "rope_parameters": scale_rope(**YARN, mscale=1.0, mscale_all_dim=1.0, llama_4_scaling_beta=0.4),
            },
            ablations=(
                {"topk_group": 4},
                {"rope_parameters": scale_rope(**YARN, mscale=1.0, mscale_all_dim=1.0, llama_4_scaling_beta=0.0)},
            ),
        ),
    ]

"""The golden cases of families with experts."""

from __future__ import annotations

from .spec import WINDOW, Case


def list_moe_cases() -> list[Case]:
    """Mixtral, Qwen 2 and 3 with experts, OLMoE: files with an expert per tensor and with all of them in one."""
    small = {"hidden_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    qwen = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    return [
        Case(
            "mixtral",
            "mixtral",
            "4 experts of which a token has 2, window 16, files with one tensor per expert (w1, w2, w3)",
            {**small, "intermediate_size": 24, "num_local_experts": 4, "sliding_window": WINDOW},
            ablations=({"num_experts_per_tok": 1}, {"sliding_window": None}),
            shard_size="40KB",
        ),
        Case(
            "mixtral_packed",
            "mixtral",
            "3 experts in one tensor each for gate and up, and for down",
            {**small, "intermediate_size": 16, "num_local_experts": 3, "sliding_window": None},
            packed=True,
        ),
        Case(
            "qwen2_moe",
            "qwen2_moe",
            "a shared block with a gate, weights that are not normalised, a dense layer among three",
            {
                **{key: value for key, value in small.items() if key != "head_dim"},
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
            {**small, **qwen, "num_hidden_layers": 2, "decoder_sparse_step": 2, "norm_topk_prob": True},
            ablations=({"norm_topk_prob": False}, {"num_experts_per_tok": 1}),
        ),
        Case(
            "qwen3_moe_bf16",
            "qwen3_moe",
            "experts in every layer and in one tensor, checkpoint in bfloat16",
            {**small, **qwen, "num_experts": 4, "norm_topk_prob": True},
            packed=True,
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
    ]

"""The golden cases of families with recurrent states beside attention."""

from __future__ import annotations

from .spec import TIED, Case, scale_rope

_SMALL = {
    "hidden_size": 24,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 6,
}
_EXPERTS = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 12,
    "shared_expert_intermediate_size": 16,
}
_GRANITE = {
    "hidden_size": 24,
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "shared_intermediate_size": 16,
    "mamba_n_heads": 6,
    "mamba_d_head": 8,
    "mamba_d_state": 12,
}
_WHOLE = {"rope_parameters": scale_rope(rope_type="default", partial_rotary_factor=1.0)}


def list_hybrid_cases() -> list[Case]:
    """Families whose layers keep a recurrent state, beside attention."""
    return [*_list_delta_cases(), *_list_convolution_cases(), *_list_mamba_cases()]


def _list_delta_cases() -> list[Case]:
    """Gated DeltaNet: Qwen3-Next, Qwen 3.5 dense and with experts, OLMo Hybrid."""
    return [
        Case(
            "qwen3_next",
            "qwen3_next",
            "gated attention among layers with a state, projections by key head, a quarter rotated, a dense layer",
            {**_SMALL, **_EXPERTS, "mlp_only_layers": [0]},
            ablations=({"norm_topk_prob": False}, _WHOLE),
        ),
        Case(
            "qwen3_5",
            "qwen3_5_text",
            "the family's pattern of four layers, one value head for each key head, convolution of 3, biases",
            {
                **{key: value for key, value in _SMALL.items() if key != "layer_types"},
                "num_hidden_layers": 4,
                "linear_num_value_heads": 2,
                "linear_conv_kernel_dim": 3,
                "attention_bias": True,
                "rope_parameters": scale_rope(rope_type="default", partial_rotary_factor=0.5),
            },
            ablations=(_WHOLE,),
        ),
        Case(
            "qwen3_5_moe",
            "qwen3_5_moe_text",
            "experts in one tensor each for gate and up, and for down; two value heads for each key head",
            {**_SMALL, **_EXPERTS},
            ablations=({"num_experts_per_tok": 1},),
            experts="joined",
        ),
        Case(
            "olmo_hybrid",
            "olmo_hybrid",
            "Gated DeltaNet with separate projections and betas up to 2, attention without rotation behind other norms",
            {
                "hidden_size": 24,
                "intermediate_size": 24,
                "num_hidden_layers": 3,
                "layer_types": ["linear_attention", "full_attention", "linear_attention"],
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "linear_num_key_heads": 3,
                "linear_num_value_heads": 3,
                # As many values as keys: transformers cuts the convolution into three equal parts when it saves it.
                "linear_key_head_dim": 8,
                "linear_value_head_dim": 8,
                "rope_parameters": scale_rope(rope_theta=None, rope_type="default"),
            },
            ablations=({"linear_allow_neg_eigval": False}, {"rope_parameters": scale_rope(rope_type="default")}),
        ),
    ]


def _list_convolution_cases() -> list[Case]:
    """Short convolutions: LFM2, dense and with experts."""
    return [
        Case(
            "lfm2",
            "lfm2",
            "short convolutions of 4 with biases, norms of q and k, feed-forward columns that are rounded up",
            {
                "hidden_size": 24,
                "intermediate_size": 60,
                "block_multiple_of": 16,
                "num_hidden_layers": 3,
                "layer_types": ["conv", "full_attention", "conv"],
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "conv_L_cache": 4,
                "conv_bias": True,
                "tie_word_embeddings": False,
            },
            ablations=({"block_auto_adjust_ff_dim": False, "intermediate_size": 48, "norm_eps": 0.1},),
        ),
        Case(
            "lfm2_moe",
            "lfm2_moe",
            "convolutions of 3, a dense layer before experts that are chosen by sigmoids and a correction, tied head",
            {
                "hidden_size": 24,
                "intermediate_size": 40,
                "num_hidden_layers": 3,
                "layer_types": ["conv", "full_attention", "conv"],
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "num_dense_layers": 1,
                "num_experts": 6,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 12,
                "routed_scaling_factor": 1.5,
            },
            ablations=({"norm_topk_prob": False}, {"routed_scaling_factor": 1.0}),
            **TIED,
        ),
    ]


def _list_mamba_cases() -> list[Case]:
    """Mamba-2: Granite 4 and Nemotron-H."""
    return [
        Case(
            "granite_hybrid",
            "granitemoehybrid",
            "Mamba-2 with one group, attention without rotation, experts beside a shared block, all multipliers",
            {
                **_GRANITE,
                "num_local_experts": 6,
                "num_experts_per_tok": 2,
                "intermediate_size": 12,
                "embedding_multiplier": 1.5,
                "attention_multiplier": 0.3,
                "residual_multiplier": 0.7,
                "logits_scaling": 0.5,
                "tie_word_embeddings": True,
            },
            ablations=(
                {"embedding_multiplier": 1.0},
                {"attention_multiplier": 1.0},
                {"residual_multiplier": 1.0},
                {"logits_scaling": 1.0},
                {"position_embedding_type": "rope"},
            ),
            **TIED,
        ),
        Case(
            "granite_hybrid_dense",
            "granitemoehybrid",
            "no experts, two groups, biases in Mamba-2's projections and none in its convolution, rotation",
            {
                **_GRANITE,
                "num_local_experts": 0,
                "mamba_n_groups": 2,
                "mamba_proj_bias": True,
                "mamba_conv_bias": False,
                "mamba_d_conv": 3,
                "position_embedding_type": "rope",
            },
            ablations=({"position_embedding_type": None},),
        ),
        Case(
            "nemotron_h",
            "nemotron_h",
            "layers of one block each: Mamba-2 with two groups, squared ReLUs, attention, experts without gates",
            {
                "hidden_size": 24,
                "intermediate_size": 20,
                "layers_block_type": ["linear_attention", "mlp", "full_attention", "moe", "linear_attention"],
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "head_dim": 8,
                "mamba_num_heads": 4,
                "mamba_head_dim": 6,
                "n_groups": 2,
                "ssm_state_size": 12,
                "n_routed_experts": 6,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 12,
                "moe_shared_expert_intermediate_size": 16,
                "routed_scaling_factor": 2.5,
            },
            ablations=({"norm_topk_prob": False}, {"routed_scaling_factor": 1.0}, {"mlp_hidden_act": "relu"}),
        ),
    ]

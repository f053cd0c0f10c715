"""The golden cases of Gemma 4."""

from __future__ import annotations

from .spec import WINDOW, Case, scale_rope

_SLIDING, _FULL = "sliding_attention", "full_attention"


def list_gemma4_cases() -> list[Case]:
    """Gemma 4: heads of two sizes, without values of their own, with shared pages, inputs of each layer, experts."""
    rope = {
        _SLIDING: scale_rope(rope_type="default"),
        _FULL: scale_rope(rope_type="proportional", partial_rotary_factor=0.5) | {"rope_theta": 30000.0},
    }
    other = {**rope, _FULL: {**rope[_FULL], "partial_rotary_factor": 1.0}}
    sizes = {
        "hidden_size": 24,
        "intermediate_size": 32,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "global_head_dim": 16,
        "sliding_window": WINDOW,
        "rope_parameters": rope,
        "final_logit_softcapping": 30.0,
    }
    tied = {"embed_std": 0.15, "final_norm": 4.0}
    return [
        Case(
            "gemma4_text",
            "gemma4_text",
            "full layers with one KV head of 16, whose keys are their values, beside windowed ones with two of 8",
            {
                **sizes,
                "num_hidden_layers": 3,
                "layer_types": [_SLIDING, _SLIDING, _FULL],
                "num_global_key_value_heads": 1,
                "attention_k_eq_v": True,
                "hidden_size_per_layer_input": 0,
            },
            ablations=({"sliding_window": 1024}, {"rope_parameters": other}, {"final_logit_softcapping": None}),
            **tied,
        ),
        Case(
            "gemma4_text_shared",
            "gemma4_text",
            "the last two of five layers read earlier pages and have wide blocks; inputs of each layer",
            {
                **sizes,
                "num_hidden_layers": 5,
                "layer_types": [_SLIDING, _SLIDING, _FULL, _SLIDING, _FULL],
                "num_kv_shared_layers": 2,
                "hidden_size_per_layer_input": 6,
                "vocab_size_per_layer_input": 83,
                "use_double_wide_mlp": True,
            },
            ablations=({"sliding_window": 1024}, {"rope_parameters": other}),
            **tied,
        ),
        Case(
            "gemma4_text_moe",
            "gemma4_text",
            "six experts beside the dense block, two to a token, each with a scale; no inputs of layers",
            {
                **sizes,
                "num_hidden_layers": 3,
                "layer_types": [_SLIDING, _SLIDING, _FULL],
                "num_global_key_value_heads": 1,
                "attention_k_eq_v": True,
                "hidden_size_per_layer_input": 0,
                "enable_moe_block": True,
                "num_experts": 6,
                "top_k_experts": 2,
                "moe_intermediate_size": 16,
            },
            ablations=({"top_k_experts": 1},),
            **tied,
        ),
    ]

"""The golden cases of families that write their own layer or share another's: OLMo to GPT-NeoX."""

from __future__ import annotations

from .spec import DEFAULT_ROPE, THETA, TIED, WINDOW, Case, scale_rope


def list_olmo_cases() -> list[Case]:
    """OLMo: 1's norms without weights, norms behind the blocks, q/k norms over all heads, 3's windows and ropes."""
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    plain = {"rope_type": "default", "rope_theta": 500000.0}
    yarn = {
        **plain,
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "attention_factor": 1.2,
        "beta_fast": 8.0,
        "beta_slow": 0.5,
    }
    ropes = {
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": THETA},
    }
    return [
        Case(
            "olmo",
            "olmo",
            "layer norms without weights, attention_bias, 4 heads on 2 kv heads",
            {**heads, "attention_bias": True},
        ),
        Case(
            "olmo2",
            "olmo2",
            "norms behind the blocks only, q/k norms over the whole projection, 4 heads on 2 kv heads",
            {**heads, "rms_norm_eps": 0.05},
            ablations=({"rms_norm_eps": 1e-5},),
        ),
        Case(
            "olmo3",
            "olmo3",
            "window 16 on all layers but the fourth (the family's pattern), which alone has YaRN",
            {
                **heads,
                "num_hidden_layers": 4,
                "hidden_size": 24,
                "intermediate_size": 32,
                "head_dim": 8,
                "sliding_window": WINDOW,
                "rope_parameters": {"sliding_attention": plain, "full_attention": yarn},
            },
            ablations=(
                {"sliding_window": 1024},
                {"rope_parameters": {"sliding_attention": plain, "full_attention": plain}},
                {"rope_parameters": {"sliding_attention": yarn, "full_attention": yarn}},
            ),
            legacy_config=True,
        ),
        Case(
            "olmo3_bias_ropes",
            "olmo3",
            "attention_bias (q, k, v, o), layer_types full, sliding, each with its own rope",
            {
                "attention_bias": True,
                "layer_types": ["full_attention", "sliding_attention"],
                "sliding_window": WINDOW,
                "rope_parameters": ropes,
            },
            ablations=(
                {"layer_types": ["sliding_attention", "full_attention"]},
                {"rope_parameters": {**ropes, "sliding_attention": DEFAULT_ROPE}},
                {"rope_parameters": {**ropes, "full_attention": DEFAULT_ROPE}},
            ),
        ),
    ]


def list_smollm_cases() -> list[Case]:
    """SmolLM3: layers without rotation."""
    return [
        Case(
            "smollm3",
            "smollm3",
            "the fourth layer of 4 is not rotated (the family's interval), tied head",
            {
                "num_hidden_layers": 4,
                "hidden_size": 24,
                "intermediate_size": 32,
                "rope_parameters": DEFAULT_ROPE,
            },
            ablations=({"no_rope_layers": [1] * 4}, {"no_rope_layers": [0, 1, 1, 0]}),
            legacy_config=True,
            **TIED,
        ),
        Case(
            "smollm3_window",
            "smollm3",
            "no_rope_layers 0, 1, 1 and so window 16 on the first layer, attention_bias and mlp_bias, untied",
            {
                "num_hidden_layers": 3,
                "hidden_size": 24,
                "intermediate_size": 32,
                "no_rope_layers": [0, 1, 1],
                "use_sliding_window": True,
                "sliding_window": WINDOW,
                "attention_bias": True,
                "mlp_bias": True,
                "tie_word_embeddings": False,
                "rope_parameters": DEFAULT_ROPE,
            },
            ablations=(
                {"no_rope_layers": [1, 1, 1], "layer_types": ["sliding_attention"] + ["full_attention"] * 2},
                {"layer_types": ["full_attention"] * 3},
                {"layer_types": ["full_attention"] * 2 + ["sliding_attention"]},
            ),
            legacy_config=True,
        ),
    ]


def list_glm_cases() -> list[Case]:
    """GLM-4-0414: four norms, interleaved rotation of a part of the head, gate and up in one tensor."""
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    whole = ({"rope_parameters": {**DEFAULT_ROPE, "partial_rotary_factor": 1.0}},)
    return [
        Case(
            "glm4",
            "glm4",
            "q/k/v biases, half of the head rotated (the family's default), head_dim 12 where hidden/heads is 6",
            {**heads, "hidden_size": 24, "head_dim": 12, "rms_norm_eps": 0.05},
            ablations=(*whole, {"rms_norm_eps": 1e-5}),
            shard_size="35KB",
            legacy_config=True,
        ),
        Case(
            "glm4_no_bias",
            "glm4",
            "no biases, partial_rotary_factor 0.75 of head_dim 24 with linear scaling, tied head",
            {
                "hidden_size": 24,
                "head_dim": 24,
                "attention_bias": False,
                "tie_word_embeddings": True,
                "rope_parameters": scale_rope(rope_type="linear", factor=4.0, partial_rotary_factor=0.75),
            },
            ablations=(*whole, {"rope_parameters": {**DEFAULT_ROPE, "partial_rotary_factor": 0.75}}),
            **TIED,
        ),
    ]


def list_granite_cases() -> list[Case]:
    """Granite 3: multipliers of the embedding, scores, residuals and logits."""
    multipliers = {
        "embedding_multiplier": 3.5,
        "attention_multiplier": 0.4,
        "residual_multiplier": 0.6,
        "logits_scaling": 1.7,
    }
    each = tuple({key: 1.0} for key in multipliers)
    return [
        Case(
            "granite",
            "granite",
            "four multipliers, tied head, 4 heads on 2 kv heads",
            {**multipliers, "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True},
            ablations=(*each, {"attention_multiplier": 8**-0.5}),
            legacy_config=True,
            **TIED,
        ),
        Case(
            "granite_bias",
            "granite",
            "attention_bias (q, k, v, o) and mlp_bias (gate, up, down), scores not scaled (the default), untied",
            {"attention_bias": True, "mlp_bias": True, "residual_multiplier": 0.5},
            ablations=({"attention_multiplier": 0.25}, {"residual_multiplier": 1.0}),
            linear_std=0.25,
        ),
    ]


def list_cohere_cases() -> list[Case]:
    """Command-R and Command-R7B: parallel blocks, one LayerNorm without bias, interleaved rotation, scaled logits."""
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return [
        Case(
            "cohere",
            "cohere",
            "parallel block, one kv head per q head, logit_scale, tied head",
            {
                "num_attention_heads": 4,
                "num_key_value_heads": 4,
                "logit_scale": 0.4,
                "layer_norm_eps": 0.05,
                "rope_parameters": DEFAULT_ROPE,
            },
            ablations=({"logit_scale": 1.0}, {"layer_norm_eps": 1e-5}),
            legacy_config=True,
            **TIED,
        ),
        Case(
            "cohere_qk_norm",
            "cohere",
            "use_qk_norm: a LayerNorm of each head with its own weights; attention_bias (q, k, v, o), untied",
            {
                **heads,
                "use_qk_norm": True,
                "attention_bias": True,
                "tie_word_embeddings": False,
                "logit_scale": 0.8,
                "rope_parameters": DEFAULT_ROPE,
            },
            ablations=({"rope_parameters": {**DEFAULT_ROPE, "rope_theta": 500000.0}},),
        ),
        Case(
            "cohere2",
            "cohere2",
            "window 16 and rotation on all layers but the fourth (the family's pattern), tied head",
            {
                "num_hidden_layers": 4,
                "hidden_size": 24,
                "num_attention_heads": 3,
                "intermediate_size": 32,
                "logit_scale": 0.5,
                "sliding_window": WINDOW,
            },
            ablations=(
                {"sliding_window": 1024},
                {"sliding_window": WINDOW + 1},
                {"layer_types": ["sliding_attention"] * 4},
                {"logit_scale": 1.0},
            ),
            legacy_config=True,
            **TIED,
        ),
        Case(
            "cohere2_bias",
            "cohere2",
            "layer_types full, sliding, full; attention_bias (q, k, v, o), head_dim 8 where hidden/heads is 6, untied",
            {
                **heads,
                "num_hidden_layers": 3,
                "hidden_size": 24,
                "intermediate_size": 32,
                "head_dim": 8,
                "attention_bias": True,
                "tie_word_embeddings": False,
                "logit_scale": 1.0,
                "sliding_window": WINDOW,
                "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            },
            ablations=(
                {"layer_types": ["sliding_attention", "sliding_attention", "full_attention"]},
                {"sliding_window": 1024},
            ),
        ),
    ]


def list_layer_norm_cases() -> list[Case]:
    """Starcoder2 and GPT-NeoX: LayerNorm with bias, an MLP without a gate."""
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return [
        Case(
            "starcoder2",
            "starcoder2",
            "biases everywhere, tanh GELU, no window, tied head, 4 heads on 2 kv heads",
            {**heads, "norm_epsilon": 0.05},
            ablations=({"norm_epsilon": 1e-5}, {"hidden_act": "relu"}),
            legacy_config=True,
            linear_std=0.5,
            **TIED,
        ),
        Case(
            "starcoder2_window",
            "starcoder2",
            "use_bias false (norms keep theirs), window 16 on all layers, untied",
            {**heads, "use_bias": False, "sliding_window": WINDOW, "tie_word_embeddings": False},
            ablations=({"sliding_window": None}, {"sliding_window": WINDOW + 1}),
        ),
        Case(
            "gpt_neox",
            "gpt_neox",
            "parallel residual, a quarter of the head rotated (the family's default), fused q/k/v of 2 heads",
            {"layer_norm_eps": 0.05},
            ablations=(
                {"use_parallel_residual": False},
                {"layer_norm_eps": 1e-5},
                {"rope_parameters": {**DEFAULT_ROPE, "partial_rotary_factor": 0.5}},
            ),
            legacy_config=True,
        ),
        Case(
            "gpt_neox_sequential",
            "gpt_neox",
            "sequential residual, no attention biases, the whole head rotated, gelu_fast, several shards",
            {
                "use_parallel_residual": False,
                "attention_bias": False,
                "hidden_act": "gelu_fast",
                "rope_parameters": {**DEFAULT_ROPE, "partial_rotary_factor": 1.0},
            },
            ablations=({"use_parallel_residual": True}, {"rope_parameters": DEFAULT_ROPE}),
            shard_size="40KB",
            legacy_config=True,
        ),
    ]

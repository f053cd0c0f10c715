"""The golden cases: one tiny random checkpoint for every model family and option that changes the maths."""

from __future__ import annotations

from typing import Any

from .gemma4_cases import list_gemma4_cases
from .hybrid_cases import list_hybrid_cases
from .latent_cases import list_latent_cases
from .moe_cases import list_moe_cases
from .newer_cases import (
    list_cohere_cases,
    list_glm_cases,
    list_granite_cases,
    list_layer_norm_cases,
    list_olmo_cases,
    list_smollm_cases,
)
from .spec import DEFAULT_ROPE, MAX_MODEL_LEN, THETA, TIED, WINDOW, Case, scale_rope


def list_llama_cases() -> list[Case]:
    """Plain Llama: head layouts, biases, tied head, odd shapes, 16-bit checkpoints."""
    mha = {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 16, "vocab_size": 128}
    narrow = {"hidden_size": 16, "intermediate_size": 32}
    gqa = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 331}
    return [
        Case("llama_mha", "llama", "Llama 2: one kv head per q head, vocabulary 128, untied", mha),
        Case(
            "llama_gqa",
            "llama",
            "grouped kv heads, rope_parameters of type default, vocabulary 331, several shards",
            {**gqa, "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
            ablations=({"rope_parameters": DEFAULT_ROPE},),
            shard_size="70KB",
            legacy_config=True,
        ),
        Case(
            "llama_tied",
            "llama",
            "tied head, vocabulary 331",
            {"tie_word_embeddings": True, "vocab_size": 331},
            **TIED,
        ),
        Case(
            "llama_bias",
            "llama",
            "attention_bias (q, k, v, o) and mlp_bias (gate, up, down)",
            {"attention_bias": True, "mlp_bias": True},
        ),
        Case(
            "llama_head16_kv1",
            "llama",
            "3 q heads on 1 kv head, head_dim 16 where hidden/heads is 12, vocabulary 331",
            {"hidden_size": 36, "num_attention_heads": 3, "head_dim": 16, "vocab_size": 331},
        ),
        Case(
            "llama_head24",
            "llama",
            "head_dim 24 where hidden/heads is 12, 3 q heads on 3 kv heads",
            {"hidden_size": 36, "num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 24},
            linear_std=0.3,
        ),
        Case("llama_head80", "llama", "head_dim 80 where hidden/heads is 8", {**narrow, "head_dim": 80}),
        Case("llama_head96", "llama", "head_dim 96 where hidden/heads is 8", {**narrow, "head_dim": 96}),
        Case("llama_bf16", "llama", "checkpoint in bfloat16", mha, dtype="bfloat16", shard_size="30KB"),
        Case("llama_f16", "llama", "checkpoint in float16", {"head_dim": 16}, dtype="float16"),
    ]


def list_rope_cases() -> list[Case]:
    """Llama under each rope scaling."""
    plain = ({"rope_parameters": DEFAULT_ROPE},)
    long_factors = {
        "short_factor": [1.0, 1.02, 1.1, 1.15, 1.2, 1.3, 1.4, 1.5],
        "long_factor": [1.0, 1.3, 1.9, 2.7, 4.0, 5.5, 7.0, 9.0],
    }
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    yarn_mscale = {"mscale": 1.4, "mscale_all_dim": 0.6, "beta_fast": 8.0, "beta_slow": 0.5, "truncate": False}
    llama3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}

    def rope_case(name: str, covers: str, parameters: dict[str, Any], **options: Any) -> Case:
        config = {"rope_parameters": scale_rope(**parameters), **options.pop("config", {})}
        return Case(name, "llama", covers, config, **{"ablations": plain, **options})

    return [
        rope_case(
            "llama_rope_linear",
            "linear rope scaling",
            {"rope_type": "linear", "factor": 4.0},
            legacy_config=True,
        ),
        rope_case(
            "llama_rope_dynamic",
            "dynamic NTK scaling with its length fixed at 160 = max_model_len = factor x max_position_embeddings",
            {"rope_type": "dynamic", "factor": 2.5},
            config={"max_position_embeddings": 64},
            rope_seq_len=MAX_MODEL_LEN,
        ),
        rope_case("llama_rope_yarn", "YaRN with its default attention factor", yarn, legacy_config=True),
        rope_case(
            "llama_rope_yarn_mscale",
            "YaRN with mscale, mscale_all_dim, beta_fast, beta_slow, truncate=false",
            {**yarn, **yarn_mscale},
            ablations=(*plain, {"rope_parameters": scale_rope(**yarn)}),
        ),
        rope_case(
            "llama_rope_yarn_factor",
            "YaRN with an explicit attention_factor",
            {**yarn, "attention_factor": 0.8},
            ablations=(*plain, {"rope_parameters": scale_rope(**yarn)}),
        ),
        rope_case(
            "llama_rope_llama3",
            "Llama 3.1 rope scaling, tied head (Llama 3.2)",
            {"rope_type": "llama3", "original_max_position_embeddings": 64, **llama3},
            config={"tie_word_embeddings": True},
            legacy_config=True,
            **TIED,
        ),
        rope_case(
            "llama_rope_longrope",
            "longrope on Llama, long factors, explicit factor",
            {"rope_type": "longrope", "factor": 16.0, "original_max_position_embeddings": 16, **long_factors},
            prompt_lengths=(17, 18, 40, 70),
        ),
    ]


def list_qwen_and_mistral_cases() -> list[Case]:
    """Mistral, Qwen2 and Qwen3: windows, biases, q/k norms."""
    wide = ({"sliding_window": 1024},)
    layers = {"num_hidden_layers": 3, "sliding_window": WINDOW, "use_sliding_window": True}
    return [
        Case("mistral", "mistral", "no window (sliding_window null)", {"sliding_window": None, "head_dim": 16}),
        Case(
            "mistral_window",
            "mistral",
            "sliding window 16 on all layers, several shards",
            {"sliding_window": WINDOW, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16},
            ablations=({"sliding_window": None}, {"sliding_window": WINDOW + 1}),
            shard_size="50KB",
        ),
        Case(
            "qwen2",
            "qwen2",
            "q/k/v biases, tied head, use_sliding_window false (so sliding_window 16 is off)",
            {"sliding_window": WINDOW, "use_sliding_window": False, "tie_word_embeddings": True},
            ablations=({"use_sliding_window": True, "max_window_layers": 0},),
            legacy_config=True,
            **TIED,
        ),
        Case(
            "qwen2_window",
            "qwen2",
            "sliding window 16 from layer max_window_layers=1 on, of 3 layers, untied",
            {**layers, "max_window_layers": 1},
            ablations=({"max_window_layers": 0}, {"max_window_layers": 2}, *wide),
            legacy_config=True,
        ),
        Case(
            "qwen3",
            "qwen3",
            "q/k norms, head_dim 24 where hidden/heads is 16, tied head, two kv heads",
            {"head_dim": 24, "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True},
            **TIED,
        ),
        Case(
            "qwen3_bias_window",
            "qwen3",
            "attention_bias (q, k, v, o) with q/k norms; layer_types sliding, full, sliding, window 16; untied",
            {
                **layers,
                "head_dim": 16,
                "attention_bias": True,
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            },
            ablations=(*wide, {"layer_types": ["full_attention", "sliding_attention", "sliding_attention"]}),
        ),
    ]


def list_gemma_cases() -> list[Case]:
    """Gemma 2 and Gemma 3 text: soft caps, post norms, layer patterns, two rope bases."""
    gemma2 = {
        "head_dim": 24,
        "query_pre_attn_scalar": 20,
        "sliding_window": WINDOW,
        "attn_logit_softcapping": 4.0,
        "final_logit_softcapping": 10.0,
    }
    caps = (
        {"attn_logit_softcapping": None},
        {"final_logit_softcapping": None},
        {"sliding_window": 1024},
        {"query_pre_attn_scalar": 24},
        {"layer_types": ["full_attention", "sliding_attention"]},
    )
    rope = {
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": THETA},
    }
    options: dict[str, Any] = {"ablations": caps, **TIED}
    return [
        Case(
            "gemma2",
            "gemma2",
            "attention and final soft caps, alternating window 16, post norms, query_pre_attn_scalar",
            gemma2,
            shard_size="50KB",
            legacy_config=True,
            **options,
        ),
        Case("gemma2_bf16", "gemma2", "checkpoint in bfloat16", gemma2, dtype="bfloat16", **options),
        Case("gemma2_f16", "gemma2", "checkpoint in float16", gemma2, dtype="float16", **options),
        Case(
            "gemma3_text",
            "gemma3_text",
            "q/k norms, five windowed layers to one global of 8, two rope bases, linear scaling on global layers",
            {
                "num_hidden_layers": 8,
                "hidden_size": 24,
                "intermediate_size": 32,
                "head_dim": 16,
                "query_pre_attn_scalar": 20,
                "sliding_window": WINDOW,
                "rope_parameters": rope,
            },
            ablations=(
                {"sliding_window": 1024},
                {"rope_parameters": {**rope, "full_attention": DEFAULT_ROPE}},
                {"rope_parameters": {**rope, "sliding_attention": DEFAULT_ROPE}},
                {"layer_types": ["sliding_attention"] * 4 + ["full_attention"] + ["sliding_attention"] * 3},
            ),
            shard_size="65KB",
            legacy_config=True,
            **TIED,
        ),
    ]


def list_phi_cases() -> list[Case]:
    """Phi-3: fused projections, partial rotary, both branches of longrope."""

    def make_longrope(original: int, factors: int) -> dict[str, Any]:
        parameters = {
            "rope_type": "longrope",
            "rope_theta": THETA,
            "short_factor": [1.0 + 0.1 * j for j in range(factors)],
            "long_factor": [1.0 + 0.2 * j * (j + 1) for j in range(factors)],
            "original_max_position_embeddings": original,
        }
        return {"rope_parameters": parameters, "original_max_position_embeddings": original}

    plain = {"rope_parameters": DEFAULT_ROPE}
    return [
        Case(
            "phi3",
            "phi3",
            "fused qkv_proj and gate_up_proj, default rope, window 16 on all layers",
            {"num_attention_heads": 4, "num_key_value_heads": 2, "sliding_window": WINDOW},
            ablations=({"sliding_window": None},),
        ),
        Case(
            "phi3_longrope_short",
            "phi3",
            "longrope, short factors (every length <= 160), partial_rotary_factor 0.75, tied head",
            {**make_longrope(MAX_MODEL_LEN, 6), "partial_rotary_factor": 0.75, "tie_word_embeddings": True},
            ablations=({**plain, "partial_rotary_factor": 0.75},),
            **TIED,
        ),
        Case(
            "phi3_longrope_long",
            "phi3",
            "longrope, long factors (every prompt > original_max_position_embeddings = 16)",
            make_longrope(16, 8),
            ablations=(plain, make_longrope(MAX_MODEL_LEN, 8)),
            prompt_lengths=(17, 18, 40, 70),
            legacy_config=True,
        ),
    ]


ALL_CASES: tuple[Case, ...] = (
    *list_llama_cases(),
    *list_rope_cases(),
    *list_qwen_and_mistral_cases(),
    *list_gemma_cases(),
    *list_gemma4_cases(),
    *list_phi_cases(),
    *list_olmo_cases(),
    *list_smollm_cases(),
    *list_glm_cases(),
    *list_granite_cases(),
    *list_cohere_cases(),
    *list_layer_norm_cases(),
    *list_moe_cases(),
    *list_latent_cases(),
    *list_hybrid_cases(),
)

"""Drafters with weights against plain mathematics: a catch-up pass over 21 tokens, then three chained passes."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.core.models.decoder import CacheLayout, forward
from jaxserve.families.registry import ignored_weights, parse_config, weight_sources
from jaxserve.features.speculation.drafters.passes import expand_logits, map_drafts
from pallas_kernels import AttnShape, KVSpec, pool_shape, prepare_batch
from tests.families.naive import NaiveRunner, build_params, make_tensors
from tests.features.speculation.drafters import (
    DRAFT_V,
    HEAD,
    MIMO,
    TARGET,
    D,
    DrafterRunner,
    ReferenceLayer,
    Tensors,
    V,
    make_head,
    make_layer,
    make_mtp,
    make_target_params,
    read_target,
    rms_norm,
    write_files,
)
from tests.golden_cases import load_case

TOKENS, PASSES, TOLERANCE = 21, 3, 1e-4  # three chunks of one size, which the first and the last share a program of
STORED = slice(7, 14)  # tokens whose states nobody asks for
Step = Callable[[np.ndarray, int], tuple[np.ndarray, np.ndarray]]  # (state, token id) -> (next state, logits)


def check_parity(runner: DrafterRunner, combine: Callable[[np.ndarray], np.ndarray], step: Step, num_aux: int) -> None:
    """Compares logits at every token but those of the second of three chunks, which are stored only."""
    rng = np.random.default_rng(7)
    hidden = rng.standard_normal((TOKENS, num_aux * D)).astype(np.float32)
    ids = rng.integers(0, V, TOKENS + PASSES)
    states = [runner.follow(hidden[:7], ids[:7])]
    runner.follow(hidden[STORED], ids[STORED], only_stores=True)
    states.append(runner.follow(hidden[14:], ids[14:TOKENS]))
    computed = [runner.logits(jnp.concatenate(states))]
    state = states[1][-1:]
    for token in ids[TOKENS:]:
        state = runner.run_pass(state, token)
        computed.append(runner.logits(state))
    expected, last = [], None
    for index, token in enumerate(ids):
        last, logits = step(combine(hidden[index].astype(np.float64)) if index < TOKENS else last, token)
        expected.append(logits)
    expected = np.delete(np.stack(expected), STORED, axis=0)
    np.testing.assert_allclose(np.concatenate(computed), expected, rtol=0, atol=TOLERANCE)


def make_eagle3_step(
    tensors: Tensors,
    embed: np.ndarray,
    *,
    prefix: str = "midlayer",
    norm_before_residual: bool = False,
    norm_output: bool = False,
) -> Step:
    layer = ReferenceLayer(tensors, prefix)
    norm, head = (tensors[f"{name}.weight"].astype(np.float64) for name in ("norm", "lm_head"))

    def step(state: np.ndarray, token: int) -> tuple[np.ndarray, np.ndarray]:
        normed = layer.norm("hidden_norm", state)
        beside = np.concatenate([layer.norm("input_layernorm", embed[token].astype(np.float64)), normed])
        x = (normed if norm_before_residual else state) + layer.attend(beside)
        x = x + layer.feed_forward(layer.norm("post_attention_layernorm", x))
        final = rms_norm(norm, x)
        return (final if norm_output else x), head @ final

    return step


@pytest.mark.parametrize(
    ("own_embed", "draft_vocab_size"), [(False, DRAFT_V), (True, DRAFT_V), (True, V)], ids=["plain", "embed", "whole"]
)
def test_an_eagle3_head_gives_the_reference_logits(tmp_path: Path, own_embed: bool, draft_vocab_size: int):
    tensors = make_head(own_embed=own_embed, draft_vocab_size=draft_vocab_size)
    folder = write_files(tmp_path / "head", HEAD | {"draft_vocab_size": draft_vocab_size}, tensors)
    params = make_target_params()
    runner = DrafterRunner("eagle3", folder, read_target(), params)
    assert runner.model.aux_layers == (2, 4, 6)
    embed = tensors["embed_tokens.weight"] if own_embed else np.asarray(params["embed"]["weight"])
    fc = tensors["fc.weight"].astype(np.float64)
    check_parity(runner, lambda hidden: fc @ hidden, make_eagle3_step(tensors, embed), 3)


@pytest.mark.parametrize("norms", ["joint", "each"])
def test_the_forms_of_speculators_give_the_reference_logits(tmp_path: Path, norms: str):
    tensors = make_head(prefix="layers.0", num_aux=4)
    fc, rng = tensors["fc.weight"].astype(np.float64), np.random.default_rng(2)
    sizes = {"input_norm.weight": 4 * D} if norms == "joint" else {f"fc_norm.{i}.weight": D for i in range(4)}
    weights = {name: rng.standard_normal(size).astype(np.float32) for name, size in sizes.items()}
    tensors |= weights
    layer = {key: value for key, value in HEAD.items() if key not in ("architectures", "draft_vocab_size")}
    config = {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_config": {"algorithm": "eagle3"},
        "transformer_layer_config": layer,
        "draft_vocab_size": DRAFT_V,
        "eagle_aux_hidden_state_layer_ids": [1, 3, 5, 9],
        "norm_before_fc" if norms == "joint" else "fc_norm": True,
        "norm_output": True,
    }
    params = make_target_params()
    runner = DrafterRunner("eagle3", write_files(tmp_path / "head", config, tensors), read_target(), params)
    assert runner.model.aux_layers == (1, 3, 5, 9) and runner.model.norm_before_residual

    def combine(hidden: np.ndarray) -> np.ndarray:
        parts = np.split(hidden, len(weights))
        normed = [
            rms_norm(weight.astype(np.float64), part) for weight, part in zip(weights.values(), parts, strict=True)
        ]
        return fc @ np.concatenate(normed)

    embed = np.asarray(params["embed"]["weight"])
    step = make_eagle3_step(tensors, embed, prefix="layers.0", norm_before_residual=True, norm_output=True)
    check_parity(runner, combine, step, 4)


def test_the_layer_of_mimo_gives_the_reference_logits(tmp_path: Path):
    tensors, params = make_mtp(), make_target_params()
    others = {"model.norm.weight": np.ones(D, np.float32)}  # the target's, which the drafter leaves alone
    folder = write_files(tmp_path / "mimo", MIMO, tensors | others)
    runner = DrafterRunner("mtp", folder, read_target(MIMO), params)
    assert runner.model.aux_layers == (2,)
    embed, head = (np.asarray(params[name]["weight"], np.float64) for name in ("embed", "lm_head"))
    layer = ReferenceLayer(tensors, "model.mtp_layers.0")

    def step(state: np.ndarray, token: int) -> tuple[np.ndarray, np.ndarray]:
        beside = np.concatenate([layer.norm("hidden_layernorm", state), layer.norm("token_layernorm", embed[token])])
        x = layer.get("input_proj.weight") @ beside
        x = x + layer.attend(layer.norm("input_layernorm", x))
        x = x + layer.feed_forward(layer.norm("post_attention_layernorm", x))
        final = layer.norm("final_layernorm", x)
        return final, head @ final

    check_parity(runner, lambda hidden: hidden, step, 1)


def test_layers_after_the_first_are_those_of_llama(tmp_path: Path):
    tensors = make_head() | make_layer("layers.1", D, bias=False, seed=8)
    folder = write_files(tmp_path / "head", HEAD | {"num_hidden_layers": 2}, tensors)
    params = make_target_params()
    runner = DrafterRunner("eagle3", folder, read_target(), params, stack="stacked")
    one, second = make_eagle3_step(tensors, np.asarray(params["embed"]["weight"])), ReferenceLayer(tensors, "layers.1")
    norm, head, fc = (tensors[f"{name}.weight"].astype(np.float64) for name in ("norm", "lm_head", "fc"))

    def step(state: np.ndarray, token: int) -> tuple[np.ndarray, np.ndarray]:
        x, _ = one(state, token)
        x = x + second.attend(second.norm("input_layernorm", x))
        x = x + second.feed_forward(second.norm("post_attention_layernorm", x))
        return x, head @ rms_norm(norm, x)

    check_parity(runner, lambda hidden: fc @ hidden, step, 3)


def test_a_draft_model_gives_the_logits_of_its_own(tmp_path: Path):
    raw = TARGET | {"num_hidden_layers": 2, "hidden_size": 8, "num_attention_heads": 2}
    config = dataclasses.replace(parse_config(raw), dtype="float32")
    tensors = make_tensors(config, seed=4)
    runner = DrafterRunner("draft_model", write_files(tmp_path / "draft", raw, tensors), read_target(), {})
    ids = np.random.default_rng(7).integers(0, V, TOKENS + PASSES).tolist()
    states = [runner.follow(None, ids[:7])]
    runner.follow(None, ids[STORED], only_stores=True)
    states.append(runner.follow(None, ids[14:TOKENS]))
    states += [runner.run_pass(states[-1][-1:], token) for token in ids[TOKENS:]]
    (expected,) = NaiveRunner(config, build_params(config, tensors), 1).run([ids])
    expected = np.delete(expected, STORED, axis=0)
    np.testing.assert_allclose(runner.logits(jnp.concatenate(states)), expected, rtol=0, atol=TOLERANCE)


def test_forward_captures_the_inputs_of_layers():
    config = read_target(TARGET | {"num_hidden_layers": 3})
    params = build_params(config, make_tensors(config, seed=2))
    ids = jnp.asarray(np.random.default_rng(7).integers(0, V, TOKENS), jnp.int32)
    attention = config.layers[0].attention
    spec = KVSpec(attention.num_kv_heads, attention.head_dim, TOKENS, "float32")
    batch = prepare_batch(
        jnp.ones((1, 1), jnp.int32),
        jnp.asarray([TOKENS], jnp.int32),
        jnp.asarray([0, TOKENS], jnp.int32),
        jnp.asarray([0, 0, 1], jnp.int32),
        num_tokens=TOKENS,
        shape=AttnShape(attention.num_heads, spec, "float32"),
        max_query_len=None,
        impl="xla",
    )

    def run(num_layers: int, aux_layers: tuple[int, ...] = ()) -> tuple[jnp.ndarray, jnp.ndarray | None]:
        part = dataclasses.replace(config, layers=config.layers[:num_layers])
        layout = CacheLayout((0, 2, 4), (0, 0, 0), (0,))
        pages = (jnp.zeros(pool_shape(spec, 6), jnp.float32),)
        hidden, _, aux = forward(part, params, ids, pages, (batch,), layout=layout, mesh=None, aux_layers=aux_layers)
        return hidden, aux

    hidden, aux = run(3, (0, 1, 3))
    np.testing.assert_array_equal(aux, np.concatenate([run(0)[0], run(1)[0], hidden], axis=1))
    assert run(3)[1] is None


def test_mimo_is_qwen2_with_layers_for_a_drafter():
    case = load_case("qwen2_window")
    mimo = case.config | {"model_type": "mimo", "architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1}
    config, qwen2 = parse_config(mimo), parse_config(case.config)
    assert dataclasses.replace(config, family="qwen2") == qwen2
    names, expected = ({name for s in weight_sources(c).values() for name in s.names} for c in (config, qwen2))
    assert names == expected
    assert any(re.fullmatch(pattern, "model.mtp_layers.0.input_proj.weight") for pattern in ignored_weights(config))


def test_drafts_are_mapped_to_the_vocabulary_of_the_target(tmp_path: Path):
    tensors = make_head()
    runner = DrafterRunner("eagle3", write_files(tmp_path / "head", HEAD, tensors), read_target(), make_target_params())
    ids = np.flatnonzero(tensors["t2d"])
    mapped = map_drafts(runner.model, runner.params, jnp.arange(DRAFT_V))
    np.testing.assert_array_equal(mapped, ids)
    logits = np.random.default_rng(0).standard_normal((2, DRAFT_V)).astype(np.float32)
    expanded = np.asarray(expand_logits(runner.model, runner.params, jnp.asarray(logits), V))
    np.testing.assert_array_equal(expanded[:, ids], logits)
    assert np.isneginf(np.delete(expanded, ids, axis=1)).all()
    same = dataclasses.replace(runner.model, maps_vocab=False)
    assert expand_logits(same, {}, expanded, V) is expanded and map_drafts(same, {}, mapped) is mapped


def test_sixteen_bits_stay_near(tmp_path: Path):
    folder, rng = write_files(tmp_path / "head", HEAD, make_head()), np.random.default_rng(3)
    hidden, ids = rng.standard_normal((TOKENS, 3 * D)).astype(np.float32), rng.integers(0, V, TOKENS)
    logits = []
    for dtype in ("float32", "bfloat16"):
        params = jax.tree.map(lambda leaf: leaf.astype(dtype), make_target_params())  # noqa: B023 used at once
        runner = DrafterRunner("eagle3", folder, dataclasses.replace(read_target(), dtype=dtype), params)
        states = runner.follow(hidden.astype(dtype), ids)
        states = jnp.concatenate([states, runner.run_pass(states[-1:], 3)])
        assert states.dtype == runner.pages[0].dtype == dtype
        logits.append(runner.logits(states))
    assert logits[1].dtype == np.float32
    assert np.abs(logits[1] - logits[0]).mean() < 0.01 * np.abs(logits[0]).max()

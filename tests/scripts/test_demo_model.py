"""The demo model's own forward pass, answers and export, on random weights: nothing is trained here."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

from demo_lm import tokens
from demo_lm.answering import answer_exam, generate
from demo_lm.export import export_checkpoint, load_checkpoint
from demo_lm.model import DemoConfig, DemoModel, compute_loss, product
from demo_lm.scoring import Problem
from demo_lm.tokens import load_tokenizer, train_tokenizer
from demo_lm.training import adopt_checkpoint

pytestmark = pytest.mark.thorough


@pytest.fixture(scope="module")
def model() -> DemoModel:
    return DemoModel(
        DemoConfig(
            vocab_size=200,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
        )
    )


@pytest.fixture(scope="module")
def params(model: DemoModel):
    empty = jnp.zeros((1, 4), jnp.int32)
    drawn = jax.jit(model.init)(jax.random.key(0), empty, empty)["params"]
    return jax.tree.map(lambda x: 8 * x if x.ndim == 2 else x, drawn)  # far from ties


def test_a_position_sees_neither_later_tokens_nor_other_segments(model: DemoModel, params) -> None:
    ids = np.arange(12)[None] + 20
    segments = np.array([[1] * 6 + [2] * 6])
    apply = jax.jit(model.apply)
    logits = apply({"params": params}, ids, segments)
    first = apply({"params": params}, ids[:, :6], segments[:, :6])
    np.testing.assert_allclose(logits[:, :6], first, atol=1e-5)
    changed = np.where(segments == 1, ids + 100, ids)
    np.testing.assert_allclose(apply({"params": params}, changed, segments)[:, 6:], logits[:, 6:], atol=1e-5)
    whole = apply({"params": params}, ids, np.ones_like(ids))
    assert np.abs(whole[:, 6:] - logits[:, 6:]).max() > 0.01


@pytest.mark.parametrize("batch", [(), (4,)])
def test_a_product_has_the_gradients_of_a_product(batch: tuple[int, ...]) -> None:
    keys = jax.random.split(jax.random.key(1), 3)
    x, y = (jax.random.normal(key, (*batch, *shape)) for key, shape in zip(keys, ((6, 8), (8, 10)), strict=False))
    weight = jax.random.normal(keys[2], (*batch, 6, 10))
    found = jax.grad(lambda x, y: jnp.sum(product(x, y) * weight), (0, 1))(x, y)
    right = jax.grad(lambda x, y: jnp.sum(jnp.matmul(x, y, precision="highest") * weight), (0, 1))(x, y)
    jax.tree.map(partial(np.testing.assert_allclose, atol=0.05), found, right)  # the gradient is rounded to bf16


def test_weights_are_adopted_by_piece(model: DemoModel, params, tmp_path: Path) -> None:
    """A piece that the old vocabulary has keeps its row; the others get the mean of those that spell them."""
    train_tokenizer(tmp_path / "tokenizer.model", num_documents=300)
    old = load_tokenizer(tmp_path / "tokenizer.model")
    config = replace(model.config, vocab_size=old.vocab_size())
    empty = jnp.zeros((1, 4), jnp.int32)
    drawn = jax.jit(DemoModel(config).init)(jax.random.key(0), empty, empty)["params"]
    export_checkpoint(tmp_path / "checkpoint", config, drawn, tmp_path / "tokenizer.model")
    _, kept = load_checkpoint(tmp_path / "checkpoint")
    train_tokenizer(tmp_path / "new.model", seed=1, num_documents=300)
    new = load_tokenizer(tmp_path / "new.model")
    other = {**drawn, "embed_tokens": jnp.zeros_like(drawn["embed_tokens"])}
    rows = adopt_checkpoint(tmp_path / "checkpoint", other, new)["embed_tokens"]
    same = next(id for id in range(500, 1536) if old.piece_to_id(new.id_to_piece(id)) > 0)
    np.testing.assert_array_equal(rows[same], kept["embed_tokens"][old.piece_to_id(new.id_to_piece(same))])
    fresh = next(id for id in range(500, 1536) if old.piece_to_id(new.id_to_piece(id)) == 0)
    spelled = old.encode(new.id_to_piece(fresh).replace("\u2581", " "))
    np.testing.assert_allclose(rows[fresh], kept["embed_tokens"][np.array(spelled)].mean(axis=0), rtol=1e-5)


def test_loss_counts_weighted_tokens_only(model: DemoModel, params) -> None:
    ids = np.arange(8)[None]
    batch = {"tokens": ids, "targets": ids + 1, "segments": np.ones_like(ids)}
    half = np.array([[1.0] * 4 + [0.0] * 4], np.float32)
    other = {**batch, "targets": np.where(half > 0, ids + 1, 99)}
    compute = jax.jit(partial(compute_loss, model))
    assert compute(params, **batch, weights=half) == compute(params, **other, weights=half)
    assert compute(params, **batch, weights=0 * half) == 0


def test_exported_weights_read_back_as_bfloat16_under_the_names_of_llama(
    model: DemoModel, params, tmp_path: Path
) -> None:
    tokenizer, directory = tmp_path / "any.model", tmp_path / "checkpoint"
    tokenizer.write_bytes(b"pieces")
    export_checkpoint(directory, model.config, params, tokenizer)
    config, loaded = load_checkpoint(directory)
    assert config == model.config
    rounded = jax.tree.map(lambda x: x.astype(jnp.bfloat16).astype(jnp.float32), params)
    assert jax.tree.structure(loaded) == jax.tree.structure(rounded)
    jax.tree.map(np.testing.assert_array_equal, loaded, rounded)
    written = json.loads((directory / "config.json").read_text())
    assert written["model_type"] == "llama"
    assert written["tie_word_embeddings"] is True
    assert written["eos_token_id"] == tokens.EOS_ID
    assert {path.name for path in directory.iterdir()} == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.model",
        "tokenizer_config.json",
    }


class _Numbers:
    """A tokenizer whose text is the ids themselves, so that any generated text is encoded as it was generated."""

    def encode(self, text: str) -> list[int]:
        return [int(word) for word in text.split()]

    def decode(self, ids: list[int]) -> str:
        return " ".join(map(str, ids))


def test_one_pass_recognizes_what_generation_would_say(model: DemoModel, params) -> None:
    ending = {**params, "embed_tokens": params["embed_tokens"].at[tokens.EOS_ID].mul(6)}  # answers end soon
    questions = [f"{number} {number + 1} 7" for number in range(20, 52)]
    asked = [Problem("glossary", "", question, "") for question in questions]
    answers = generate(model, ending, _Numbers(), asked, max_tokens=16)
    ended = [(q, a) for q, a in zip(questions, answers, strict=True) if 0 < len(a.split()) < 16]
    assert len(ended) >= 5
    problems = [Problem("glossary", "exact", question, answer) for question, answer in ended]
    problems += [Problem("glossary", "other", question, answer + " 9") for question, answer in ended]
    scores = answer_exam(model, ending, _Numbers(), problems, explain=False)
    assert scores.right == {("glossary", "exact"): len(ended), ("glossary", "other"): 0}

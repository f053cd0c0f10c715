"""The demo model's EAGLE-3 head: the unrolled passes, the counting of runs, what is exported, and what ships."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from rich.console import Console
from safetensors.numpy import load_file

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

from demo_lm import head as head_module
from demo_lm import model as model_module
from demo_lm import scoring, tokens
from demo_lm.export import load_checkpoint
from demo_lm.head import Head, HeadConfig, compute_head_loss, read_target, shift
from demo_lm.head_export import export_head, load_head
from demo_lm.head_scoring import LEAST_LENGTH, Lengths, count_runs, measure_head, sum_lengths
from demo_lm.head_texts import Prompt, Text, choose_draft_ids, draw_prompts, list_held_out_prompts
from demo_lm.head_training import HeadSettings, Target, start_params, train_head
from demo_lm.model import DemoConfig, DemoModel
from demo_lm.packing import Shape
from demo_lm.tokens import load_tokenizer

pytestmark = pytest.mark.thorough

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "jaxserve" / "demo"
LENGTH = 9


@pytest.fixture
def exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products in float32, so that two orders of the same sums agree."""

    def multiply(x: jax.Array, kernel: jax.Array) -> jax.Array:
        return jnp.matmul(x, kernel, precision="highest")

    monkeypatch.setattr(head_module, "multiply", multiply)
    monkeypatch.setattr(model_module, "multiply", multiply)
    monkeypatch.setattr(head_module, "_narrow", lambda x: x)


@pytest.fixture(scope="module")
def target() -> Target:
    model = DemoModel(
        DemoConfig(
            vocab_size=60,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
        )
    )
    empty = jnp.zeros((1, 4), jnp.int32)
    drawn = jax.jit(model.init)(jax.random.key(0), empty, empty)["params"]
    params = jax.tree.map(lambda x: 8 * x if x.ndim == 2 else x, drawn)
    return Target(model, params, np.arange(3, 60, 2, dtype=np.int32)[:20])


@pytest.fixture(scope="module")
def config() -> HeadConfig:
    return HeadConfig(
        vocab_size=60,
        draft_vocab_size=20,
        hidden_size=32,
        intermediate_size=24,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        aux_layers=(2, 3, 4),  # several, side by side; the head that ships has one
    )


@pytest.fixture(scope="module")
def params(config: HeadConfig, target: Target) -> Any:
    drawn = start_params(Head(config), target, seed=1)
    return jax.tree.map(lambda x: 6 * x if x.ndim == 2 else x, drawn)


def _draw_inputs(config: HeadConfig, rows: int) -> tuple[jax.Array, jax.Array]:
    keys = jax.random.split(jax.random.key(2), 2)
    aux = jax.random.normal(keys[0], (rows, LENGTH, len(config.aux_layers) * config.hidden_size))
    return aux, jax.random.normal(keys[1], (rows, LENGTH, config.hidden_size))


def _rotate(x: np.ndarray, position: int, theta: float) -> np.ndarray:
    half = x.shape[-1] // 2
    angles = position * theta ** (-np.arange(half) / half)
    first, second = x[..., :half], x[..., half:]
    cos, sin = np.cos(angles), np.sin(angles)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


class _Chain:
    """The head as a server runs it: one position at a time, over a list of keys."""

    def __init__(self, config: HeadConfig, params: Any) -> None:
        self.config = config
        self.weights = {name: np.asarray(jax.tree.leaves(leaf)[0], np.float64) for name, leaf in params.items()}
        self.past: list[tuple[np.ndarray, np.ndarray]] = []

    def step(self, hidden: np.ndarray, embedded: np.ndarray, position: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the state and the logits, and keeps the keys of the position."""
        cfg, w = self.config, self.weights
        x = np.concatenate([self._norm("input_layernorm", embedded), self._norm("hidden_norm", hidden)])
        query = _rotate((x @ w["q_proj"]).reshape(cfg.num_attention_heads, -1), position, cfg.rope_theta)
        key = _rotate((x @ w["k_proj"]).reshape(cfg.num_key_value_heads, -1), position, cfg.rope_theta)
        self.past.append((key, (x @ w["v_proj"]).reshape(cfg.num_key_value_heads, -1)))
        group = cfg.num_attention_heads // cfg.num_key_value_heads
        heads = []
        for index, line in enumerate(query):
            scores = np.array([line @ keys[index // group] for keys, _ in self.past]) * cfg.head_dim**-0.5
            shares = np.exp(scores - scores.max())
            values = np.stack([values[index // group] for _, values in self.past])
            heads.append(shares / shares.sum() @ values)
        hidden = hidden + np.concatenate(heads) @ w["o_proj"]
        normed = self._norm("post_attention_layernorm", hidden)
        gate = normed @ w["gate_proj"]
        hidden = hidden + (gate / (1 + np.exp(-gate)) * (normed @ w["up_proj"])) @ w["down_proj"]
        return hidden, self._norm("norm", hidden) @ w["lm_head"].T

    def _norm(self, name: str, x: np.ndarray) -> np.ndarray:
        return x / np.sqrt(np.mean(x**2) + self.config.rms_norm_eps) * self.weights[name]


@pytest.mark.parametrize("start", [0, 3, 5])
@pytest.mark.usefixtures("exact")
def test_the_unrolled_passes_are_those_of_a_chain_that_begins_anywhere(
    config: HeadConfig, params: Any, start: int
) -> None:
    aux, embedded = _draw_inputs(config, 1)
    logits = Head(config).apply({"params": params}, aux, embedded, jnp.ones((1, LENGTH), jnp.int32), 4)
    chain = _Chain(config, params)
    for position in range(start + 1):
        fused = np.asarray(aux[0, position], np.float64) @ chain.weights["fc"]
        hidden, found = chain.step(fused, np.asarray(embedded[0, position], np.float64), position)
        np.testing.assert_allclose(logits[0, 0, position], found, atol=2e-4)
    for index in range(1, 4):
        hidden, found = chain.step(hidden, np.asarray(embedded[0, start + index], np.float64), start + index)
        np.testing.assert_allclose(logits[index, 0, start + index], found, atol=2e-4)


def test_a_segment_sees_nothing_of_others(config: HeadConfig, params: Any) -> None:
    aux, embedded = _draw_inputs(config, 1)
    segments = jnp.array([[1] * 4 + [2] * 5])
    apply = jax.jit(Head(config).apply, static_argnums=4)
    logits = apply({"params": params}, aux, embedded, segments, 3)
    changed = apply({"params": params}, aux.at[:, :4].add(1), embedded.at[:, :4].add(1), segments, 3)
    for index in range(3):
        np.testing.assert_allclose(changed[index, 0, 4 + index :], logits[index, 0, 4 + index :], atol=1e-5)


def test_shifting_moves_positions_and_fills_with_zeros() -> None:
    x = jnp.arange(1, 5)[None]
    assert shift(x, 2).tolist() == [[0, 0, 1, 2]]
    assert shift(x, -1).tolist() == [[2, 3, 4, 0]]
    assert shift(x, 0).tolist() == x.tolist()


def test_auxiliary_states_are_those_before_layers_and_behind_the_last(target: Target) -> None:
    ids = jnp.arange(8)[None]
    logits, aux = read_target(target.model, target.params, ids, jnp.ones_like(ids), (0, 2, 4))
    before, middle, behind = jnp.split(aux, 3, axis=-1)
    np.testing.assert_array_equal(before, target.params["embed_tokens"][ids])
    assert np.abs(middle - before).max() > 0.1 < np.abs(behind - middle).max()
    eps = target.model.config.rms_norm_eps
    normed = behind * jax.lax.rsqrt(jnp.mean(behind**2, axis=-1, keepdims=True) + eps)
    again = model_module.multiply(normed * target.params["norm"]["scale"], target.params["embed_tokens"].T)
    np.testing.assert_allclose(again, logits, atol=1e-4)


def test_the_loss_counts_chains_of_written_tokens_only(config: HeadConfig, params: Any, target: Target) -> None:
    aux, embedded = _draw_inputs(config, 1)
    logits = jax.random.normal(jax.random.key(3), (1, LENGTH, 60))
    weights = jnp.array([[0.0, 0, 0, 1, 1, 1, 0, 0, 0]])  # the tokens 4, 5 and 6 are written

    def compute(logits: jax.Array, num_passes: int, scale: float = 1.0) -> float:
        return float(
            compute_head_loss(
                Head(config),
                params,
                logits=logits,
                aux=aux,
                embedded=embedded,
                weights=scale * weights,
                segments=jnp.ones((1, LENGTH), jnp.int32),
                draft_ids=target.draft_ids,
                num_passes=num_passes,
            )
        )

    # Drafts are tokens 5 and 6, from the chains that know token 4 or 5: labels are the target's at positions 4 and 5.
    for position in range(LENGTH):
        differs = compute(logits.at[0, position].multiply(3), 2) != compute(logits, 2)
        assert differs == (position in (4, 5)), position
    assert compute(logits.at[0, 4].multiply(3), 1) != compute(logits, 1)
    assert compute(logits, 3, scale=0.0) == 0
    no_draft = jnp.setdiff1d(jnp.arange(60), target.draft_ids)
    assert compute(logits.at[..., no_draft].add(5.0), 2) == compute(logits, 2), "other tokens cannot be drafted"


def test_runs_end_behind_the_first_wrong_draft_and_with_the_text() -> None:
    nothing = np.zeros((3, 10), bool)
    assert count_runs(nothing, 4) == Lengths(7, 7, [0, 0, 0])
    assert count_runs(~nothing, 4) == Lengths(2, 7, [2, 2, 2])  # runs of 4 and 3: the text has no further token
    first = nothing.copy()
    first[0] = True
    assert count_runs(first, 4) == Lengths(4, 7, [4, 0, 0])  # three runs of 2 and one of 1, cut
    gap = ~nothing
    gap[1] = False
    assert count_runs(gap, 4) == count_runs(first, 4), "what follows a wrong draft does not count"
    assert count_runs(nothing[:, :3], 5).steps == 0, "the prompt's step gave the only token"


def test_counts_add_up() -> None:
    total = Lengths()
    total.add(Lengths(2, 5, [2, 1]))
    total.add(Lengths(1, 1, [0, 0]))
    assert (total.mean, total.accepted) == (2.0, [2, 1])
    report = {("a", 0.0): Lengths(1, 3, [1, 1]), ("b", 0.0): Lengths(1, 1, [0, 0]), ("a", 1.0): Lengths(9, 9, [0, 0])}
    assert sum_lengths(report, 0.0) == Lengths(2, 4, [1, 1])


def test_the_draft_vocabulary_is_what_answers_have_most_often() -> None:
    texts = [Text(Prompt("any", (9,), 0.0), answer) for answer in ((7, 7, 4), (4, 2, 7))]
    ids, share = choose_draft_ids(texts, 10, 2)
    assert ids.tolist() == [4, 7]
    assert share == 5 / 6
    assert choose_draft_ids(texts, 10, 5)[0].tolist() == [0, 1, 2, 4, 7]


def test_prompts_wait_for_an_answer_and_the_exam_shares_none_with_training() -> None:
    tokenizer = load_tokenizer(DEMO / "tokenizer.model")
    prompts = draw_prompts(tokenizer, 400, seed=0)
    assert prompts == draw_prompts(tokenizer, 400, seed=0) != draw_prompts(tokenizer, 400, seed=1)
    assert {prompt.ids[-1] for prompt in prompts} == {tokens.ASSISTANT_ID, tokens.BOS_ID}
    assert {prompt.temperature for prompt in prompts} == {0.0, 0.7, 1.0}
    held_out = list_held_out_prompts(tokenizer, 20)
    assert len(held_out) == len(set(held_out)) == 2 * 4 * 20
    unseen = {prompt.ids for prompt in held_out if prompt.skill != "story"}
    assert unseen.isdisjoint(prompt.ids for prompt in prompts)


def test_a_tiny_training_lowers_the_loss_and_exports_a_head_that_reads_back(
    config: HeadConfig, target: Target, tmp_path: Path
) -> None:
    text = Text(Prompt("any", (1, 3, 5, 7), 0.0), (9, 11, 13, 15, 17, 19, 21, 23))
    console = Console(file=(tmp_path / "log").open("w"), width=80)
    settings = HeadSettings(num_steps=3, num_passes=2, report_every=1)
    shapes = (Shape(rows=2, length=24, isolated=True),)
    trained = train_head(config, target, [text], settings, console, shapes=shapes)
    export_head(tmp_path / "head", config, trained, target.draft_ids)
    loaded_config, loaded, draft_ids = load_head(tmp_path / "head")
    assert loaded_config == config
    np.testing.assert_array_equal(draft_ids, target.draft_ids)
    jax.tree.map(
        lambda ours, theirs: np.testing.assert_array_equal(np.asarray(ours, ml_dtypes.bfloat16), theirs),
        trained,
        loaded,
    )
    _check_checkpoint(tmp_path / "head", config)
    report = measure_head(Head(config), loaded, target, [text], 2)
    assert report["any", 0.0].tokens == len(text.answer) - 1


def test_the_head_in_the_package_is_whole_and_small() -> None:
    directory = DEMO / "eagle3"
    config, _, draft_ids = load_head(directory)
    _check_checkpoint(directory, config)
    target = json.loads((DEMO / "config.json").read_text())
    assert (config.vocab_size, config.hidden_size) == (target["vocab_size"], target["hidden_size"])
    assert max(config.aux_layers) <= target["num_hidden_layers"]
    assert (np.diff(draft_ids) > 0).all()
    assert (directory / "model.safetensors").stat().st_size < 2_200_000


def test_the_head_in_the_package_drafts_three_tokens_a_step() -> None:
    target_config, target_params = load_checkpoint(DEMO)
    config, params, draft_ids = load_head(DEMO / "eagle3")
    tokenizer = load_tokenizer(DEMO / "tokenizer.model")
    texts = [
        Text(
            Prompt(problem.skill, tuple(tokens.encode_prompt(tokenizer, problem.question)), 0.0),
            (*tokenizer.encode(problem.expected), tokens.EOS_ID),  # what the model writes, nearly always
        )
        for problem in scoring.list_problems(30, 30, per_entry=1, seed=5)
    ]
    target = Target(DemoModel(target_config), target_params, draft_ids)
    report = measure_head(Head(config), params, target, texts, 4)
    assert sum_lengths(report, 0.0).mean >= LEAST_LENGTH


@pytest.mark.slow
@pytest.mark.thorough
def test_the_script_writes_a_checkpoint_and_says_that_it_is_too_poor(tmp_path: Path) -> None:
    sizes = ["--steps", "2", "--texts", "8", "--problems", "2", "--passes", "2", "--draft-vocab-size", "300"]
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / "train_demo_head.py", "--export", tmp_path / "head", *sizes],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "120"},
    )
    assert done.returncode == 1, done.stderr
    assert "verify steps with 4 drafts" in done.stdout
    config, _, _ = load_head(tmp_path / "head")
    assert config.draft_vocab_size == 300
    _check_checkpoint(tmp_path / "head", config)


def _check_checkpoint(directory: Path, config: HeadConfig) -> None:
    """Names, shapes and types of published EAGLE-3 heads."""
    width, inner = config.hidden_size, config.intermediate_size
    query, kv = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    expected = {
        "fc.weight": (width, len(config.aux_layers) * width),
        "midlayer.input_layernorm.weight": (width,),
        "midlayer.hidden_norm.weight": (width,),
        "midlayer.post_attention_layernorm.weight": (width,),
        "midlayer.self_attn.q_proj.weight": (query, 2 * width),
        "midlayer.self_attn.k_proj.weight": (kv, 2 * width),
        "midlayer.self_attn.v_proj.weight": (kv, 2 * width),
        "midlayer.self_attn.o_proj.weight": (width, query),
        "midlayer.mlp.gate_proj.weight": (inner, width),
        "midlayer.mlp.up_proj.weight": (inner, width),
        "midlayer.mlp.down_proj.weight": (width, inner),
        "norm.weight": (width,),
        "lm_head.weight": (config.draft_vocab_size, width),
        "d2t": (config.draft_vocab_size,),
        "t2d": (config.vocab_size,),
    }
    tensors = load_file(directory / "model.safetensors")
    assert {name: tensor.shape for name, tensor in tensors.items()} == expected
    kinds = {name: tensor.dtype for name, tensor in tensors.items()}
    assert (kinds.pop("d2t"), kinds.pop("t2d")) == (np.int64, np.bool_)
    assert set(kinds.values()) == {np.dtype(ml_dtypes.bfloat16)}
    drafted = tensors["d2t"] + np.arange(config.draft_vocab_size)
    np.testing.assert_array_equal(np.flatnonzero(tensors["t2d"]), drafted)
    described = json.loads((directory / "config.json").read_text())
    assert described["architectures"] == ["LlamaForCausalLMEagle3"]
    assert described["draft_vocab_size"] == config.draft_vocab_size
    assert described["eagle_aux_hidden_state_layer_ids"] == list(config.aux_layers)
    assert {path.name for path in directory.iterdir()} == {"config.json", "model.safetensors"}

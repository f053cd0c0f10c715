"""Greedy answers of the model in training, without an engine: checked in one pass, generated only where that fails."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import sentencepiece as spm

from demo_lm.model import DemoModel, Params
from demo_lm.scoring import Problem, Scores, judge
from demo_lm.tokens import EOS_ID, encode_open

_ROWS, _LENGTH = 8, 512  # of every forward pass here: one compiled program


def answer_exam(
    model: DemoModel,
    params: Params,
    tokenizer: spm.SentencePieceProcessor,
    problems: Sequence[Problem],
    *,
    explain: bool = True,
) -> Scores:
    """Scores the answers that greedy generation would give.

    Greedy generation repeats an expected answer exactly when each of its tokens is the likeliest after the true tokens
    before it, so one forward pass decides for most problems. The others are generated, to be read and judged by
    `Problem.accepts` (the working of a right sum may differ); without `explain` they count as wrong.
    """
    expected = [problem.expected for problem in problems]
    exact = _check_exactness(model, params, tokenizer, problems)
    failed = [index for index, is_exact in enumerate(exact) if not is_exact]
    answers = [text if is_exact else "" for text, is_exact in zip(expected, exact, strict=True)]
    if explain:
        asked = [problems[index] for index in failed]
        for index, answer in zip(failed, generate(model, params, tokenizer, asked), strict=True):
            answers[index] = answer
    verdicts = [problem.accepts(answer) for problem, answer in zip(problems, answers, strict=True)]
    return judge(problems, verdicts, answers)


def generate(
    model: DemoModel,
    params: Params,
    tokenizer: spm.SentencePieceProcessor,
    problems: Sequence[Problem],
    *,
    max_tokens: int = 160,
) -> list[str]:
    """Greedy answers, as far as 512 positions reach. No KV cache: a small tool, not an engine."""
    answers = []
    for begin in range(0, len(problems), _ROWS):
        prompts = [encode_problem(tokenizer, problem) for problem in problems[begin : begin + _ROWS]]
        rows = [list(prompt) for prompt in prompts]
        limits = [min(_LENGTH, len(prompt) + max_tokens) for prompt in prompts]
        running = list(range(len(rows)))
        while running:
            best = _predict_rows(model, params, rows)
            for row in running:
                rows[row].append(int(best[row, len(rows[row]) - 1]))
            running = [row for row in running if rows[row][-1] != EOS_ID and len(rows[row]) < limits[row]]
        for row, prompt in zip(rows, prompts, strict=True):
            answers.append(tokenizer.decode([token_id for token_id in row[len(prompt) :] if token_id != EOS_ID]))
    return answers


def encode_problem(tokenizer: spm.SentencePieceProcessor, problem: Problem) -> list[int]:
    """The ids of all that is shown, up to the point where the assistant speaks."""
    return encode_open(tokenizer, problem.prompt, thinks=problem.thinks)


def _check_exactness(
    model: DemoModel, params: Params, tokenizer: spm.SentencePieceProcessor, problems: Sequence[Problem]
) -> list[bool]:
    verdicts: list[bool] = []
    for begin in range(0, len(problems), _ROWS):
        rows, starts = [], []
        for problem in problems[begin : begin + _ROWS]:
            prompt = encode_problem(tokenizer, problem)
            rows.append([*prompt, *tokenizer.encode(problem.expected), EOS_ID])
            starts.append(len(prompt))
        best = _predict_rows(model, params, rows)
        for row, (ids, start) in enumerate(zip(rows, starts, strict=True)):
            verdicts.append(best[row, start - 1 : len(ids) - 1].tolist() == ids[start:])
    return verdicts


def _predict_rows(model: DemoModel, params: Params, rows: Sequence[Sequence[int]]) -> np.ndarray:
    """The likeliest token after each position, `[8, 512]` int32; at most 8 rows of at most 512 ids."""
    tokens = np.zeros((_ROWS, _LENGTH), np.int32)
    for row, ids in enumerate(rows):
        tokens[row, : len(ids)] = ids
    return np.asarray(_predict(model, params, tokens))


@partial(jax.jit, static_argnums=0)
def _predict(model: DemoModel, params: Params, tokens: jax.Array) -> jax.Array:
    logits = model.apply({"params": params}, tokens, jnp.ones_like(tokens))
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)

"""A drafter that knows the answers beforehand, and pairs of engines, with drafts and without, that must agree."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array, Int, Int32

from jaxserve import LLM
from jaxserve.features.speculation import NO_DRAFT, LookupState, row_block_specs, unpack_block
from jaxserve.features.speculation.history import write_tokens
from jaxserve.request import Request, RequestOutput

MAX_TEXTS = 48
Outputs = dict[str, RequestOutput]  # by request id


class Mode(IntEnum):
    """What becomes of the text that a row is known to continue with."""

    RIGHT = 0
    WRONG = 1  # every draft is another token
    MIXED = 2  # by position: right, wrong, or none from here on


@flax.struct.dataclass
class Script:
    """The texts that are known, in the place of finished answers. A test writes them."""

    texts: Int32[Array, "N L"]
    ends: Int32[Array, " N"]  # tokens of each text; 0: there is none
    mode: Int32[Array, ""]


@dataclass(frozen=True, eq=False)
class ScriptedDrafter:
    """Has the interface of `LookupDrafter`: drafts what follows in the known text that begins with a row's tokens.

    It finds a text only if the whole history of the row is right.
    """

    num_drafts: int
    keeps_answers: bool = False
    corpus_shape: None = None

    def state_specs(
        self, num_rows: int, max_model_len: int, sharding: jax.sharding.Sharding | None = None
    ) -> LookupState:
        history, *script = (
            jax.ShapeDtypeStruct(shape, jnp.int32, sharding=sharding)
            for shape in ((num_rows, max_model_len), (MAX_TEXTS, max_model_len), (MAX_TEXTS,), ())
        )
        return LookupState(history, Script(*script))

    def write_rows(self, state: LookupState, line: Int32[Array, " E"]) -> LookupState:
        block = unpack_block(line, row_block_specs(len(state.history)))
        history = write_tokens(state.history, block.rows, block.positions, block.tokens, block.rows >= 0)
        return replace(state, history=history)

    def append(
        self, state: LookupState, row_ids: Array, positions: Array, ids: Int[Array, "S W"], counts: Int[Array, " S"]
    ) -> LookupState:
        index = jnp.arange(ids.shape[1])
        keep = (index < counts[:, None]) & (ids >= 0)
        rows = jnp.broadcast_to(row_ids[:, None], ids.shape)
        return replace(state, history=write_tokens(state.history, rows, positions[:, None] + index, ids, keep))

    def propose(self, state: LookupState, row_ids: Int[Array, " S"], lengths: Int[Array, " S"]) -> Int32[Array, "S K"]:
        script: Any = state.corpus
        known = jnp.arange(state.history.shape[1]) < lengths[:, None]
        is_equal = ~known[:, None] | (state.history[row_ids][:, None] == script.texts)  # [S, N, L]
        is_found = jnp.all(is_equal, axis=2) & (script.ends > lengths[:, None])
        text = jnp.argmax(is_found, axis=1)
        positions = lengths[:, None] + jnp.arange(self.num_drafts)
        right = script.texts.at[text[:, None], positions].get(mode="fill", fill_value=0)
        wrong = jnp.where(right > 3, right - 1, right + 1)
        lot = (positions * 40503 + text[:, None] * 7919) % 65521 % 8
        mixed = jnp.where(lot == 0, NO_DRAFT, jnp.where(lot <= 2, wrong, right))
        drafts = jnp.where(script.mode == Mode.RIGHT, right, jnp.where(script.mode == Mode.WRONG, wrong, mixed))
        drafts = jnp.where((positions < script.ends[text][:, None]) & jnp.any(is_found, axis=1)[:, None], drafts, -1)
        is_draft = jnp.cumprod(drafts >= 0, axis=1) == 1
        return jnp.where(is_draft, drafts, NO_DRAFT)


def patch_drafter(patch: pytest.MonkeyPatch) -> None:
    """Puts a scripted drafter in the place of the one of the method `ngram`."""
    patch.setattr(
        "jaxserve.features.choose.make_lookup_drafter",
        lambda config, in_library: ScriptedDrafter(config.num_speculative_tokens),
    )


def make_scripted(make: Callable[..., LLM], num_drafts: int, *, forced: bool = True) -> LLM:
    """An engine with a scripted drafter.

    Args:
        make: takes `speculative_config`.
        forced: it verifies in each step without chunks; otherwise the scheduler chooses.
    """
    config: dict[str, Any] = {"method": "ngram", "num_speculative_tokens": num_drafts}
    if forced:
        config["num_speculative_tokens_per_batch_size"] = [[1, 64, num_drafts]]
    with pytest.MonkeyPatch.context() as patch:
        patch_drafter(patch)
        return make(speculative_config=config)


def teach(llm: LLM, texts: Sequence[Sequence[int]], mode: Mode) -> None:
    """Tells a scripted drafter what the rows will become."""
    runner = llm.ready.runner
    (lookup,) = runner.features
    script: Any = lookup.state.corpus
    lines, ends = np.zeros(script.texts.shape, np.int32), np.zeros(MAX_TEXTS, np.int32)
    for index, text in enumerate(texts):
        lines[index, : len(text)], ends[index] = text, len(text)
    sent = jax.device_put((lines, ends, np.int32(mode)), script.mode.sharding)
    lookup.state = LookupState(lookup.state.history, Script(*sent))


def list_texts(outputs: Sequence[RequestOutput]) -> list[list[int]]:
    return [[*output.prompt_token_ids, *each.token_ids] for output in outputs for each in output.outputs]


def compare(found: Sequence[RequestOutput], expected: Sequence[RequestOutput]) -> None:
    """Asserts that two engines answered the same, log-probabilities to 1e-4."""
    for one, other in zip(found, expected, strict=True):
        assert one.error is None or type(one.error) is type(other.error)
        for mine, its in zip(one.outputs, other.outputs, strict=True):
            assert mine.token_ids == its.token_ids
            assert (mine.text, mine.finish_reason, mine.stop_reason) == (its.text, its.finish_reason, its.stop_reason)
            _compare_logprobs(mine.logprobs, its.logprobs)
        _compare_logprobs(one.prompt_logprobs, other.prompt_logprobs)
        if other.embedding is not None:
            np.testing.assert_allclose(one.embedding, other.embedding, atol=1e-5)


def _compare_logprobs(found: Any, expected: Any) -> None:
    assert (found is None) == (expected is None)
    for mine, its in zip(found or (), expected or (), strict=True):
        assert (mine is None) == (its is None)
        if mine is not None:
            assert {token: entry.rank for token, entry in mine.items()} == {t: entry.rank for t, entry in its.items()}
            values = [[line[token].logprob for token in its] for line in (mine, its)]
            np.testing.assert_allclose(values[0], values[1], rtol=0, atol=1e-4)


@dataclass
class Tally:
    """What an engine drafted in a part of a test."""

    chains: int
    drafts: int
    accepted: int
    by_position: list[int]
    rows: int  # of verify steps, with drafts or without


class Counter:
    """Counts from its making until it is read."""

    def __init__(self, llm: LLM) -> None:
        self._counts, self._runner = llm.ready.engine.scheduler.counts, llm.ready.runner
        self._rows, self._start = 0, llm.ready.runner.start
        self._runner.start = self._note  # type: ignore[method-assign]
        self._before = self._take()

    def _note(self, plan: Any) -> Any:
        self._rows += len(plan.decode_rows) if plan.width > 1 else 0
        return self._start(plan)

    def _take(self) -> list[int]:
        counts = self._counts
        by_position = [*counts.num_accepted_by_position, *[0] * 8][:8]
        return [counts.num_drafts, counts.num_draft_tokens, counts.num_accepted_tokens, *by_position]

    def read(self) -> Tally:
        self._runner.start = self._start  # type: ignore[method-assign]
        chains, drafts, accepted, *by_position = (a - b for a, b in zip(self._take(), self._before, strict=True))
        return Tally(chains, drafts, accepted, [count for count in by_position if count], self._rows)


def drive(llm: LLM, requests: Sequence[Request], events: Mapping[int, Callable[[], Any]] | None = None) -> Outputs:
    """Runs requests to their ends, with `events` in front of the steps so numbered; returns their last outputs."""
    engine, done = llm.ready.engine, {}
    for request in requests:
        engine.add_request(request)
    step = 0
    while engine.has_unfinished:
        (events or {}).get(step, int)()
        done |= {output.request_id: output for output in engine.step() if output.finished}
        step += 1
    return done


def run_scripted(llm: LLM, inputs: Any, params: Any, expected: Sequence[RequestOutput], mode: Mode) -> Tally:
    """Runs requests whose answers are known and compares them; returns what was drafted."""
    teach(llm, list_texts(expected), mode)
    counter = Counter(llm)
    found = llm.generate(inputs, params, use_tqdm=False)
    compare(found, expected)
    return check_tally(llm, counter, mode)


def check_tally(llm: LLM, counter: Counter, mode: Mode) -> Tally:
    """Asserts that pages and counters are whole; returns the latter."""
    tally, scheduler = counter.read(), llm.ready.engine.scheduler
    scheduler.pages.check()
    assert all(pool.num_referenced == 0 for pool in scheduler.pages.pools)
    assert sum(tally.by_position) == tally.accepted <= tally.drafts
    assert tally.by_position == sorted(tally.by_position, reverse=True)
    assert tally.drafts, "nothing was verified"
    if mode is Mode.WRONG:
        assert tally.accepted == 0
    elif mode is Mode.MIXED:
        assert tally.accepted < tally.drafts
    return tally

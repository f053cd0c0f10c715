"""The CPU's library looks up the same drafts as XLA's operations, and keeps the same answers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.config import EngineConfig
from jaxserve.families.registry import parse_config
from jaxserve.features.choose import make_shapes
from jaxserve.features.speculation import NO_DRAFT, AnswerQueue, LookupState, make_lookup_drafter
from jaxserve.features.speculation.answers import MAX_POSITION
from jaxserve.presets import load_preset
from jaxserve.speculative_config import SpeculativeConfig
from pallas_kernels.cpu import library
from tests.examples import scale_examples
from tests.features.speculation.cases import Table, pack_all
from tests.pallas_kernels.cpu_library import BUILT

pytestmark = BUILT
R, L = 5, 150  # more than the library compares at once, and no multiple of it
SALTS = [(0, 0), (7, 2**32 - 1), (7, 0)]


def make_suffix(depth: int, count: int, factor: float, share: float, answers: int = 0, tokens: int = 64) -> Any:
    return SpeculativeConfig(
        "suffix",
        count,
        suffix_decoding_max_tree_depth=depth,
        suffix_decoding_max_spec_factor=factor,
        suffix_decoding_min_token_prob=share,
        suffix_decoding_max_cached_requests=answers,
        suffix_decoding_corpus_tokens=tokens,
    )


ROW_RULES = [(1, 1, 9.0, 1.0), (3, 8, 2.5, 0.5), (6, 2, 1.0, 0.1), (24, 8, 1.0, 0.1), (24, 5, 0.34, 0.0)]
# A ring of 64 tokens is overwritten within an answer, larger ones hold several, of which some keep fewer than fit. One
# is larger than a block.
CORPUS_RULES = [
    (2, 3, 3.0, 0.4, 100, 64),
    (3, 8, 2.0, 0.3, 3, 512),
    (8, 4, 1.5, 0.3, 100, 64),
    (12, 1, 1.0, 0.1, 5, 700),
    (24, 8, 1.0, 0.1, 10000, 512),
]
BOUNDS = [(1, 1), (1, 2), (2, 2), (1, 5), (2, 5), (5, 5), (1, 7), (3, 7), (7, 7)]
NGRAMS = [SpeculativeConfig("ngram", 1 + 7 * (low % 2), None, low, high) for low, high in BOUNDS]
CONFIGS = {f"ngram {each.prompt_lookup_min} to {each.prompt_lookup_max}": each for each in NGRAMS}
CONFIGS |= {f"suffix {rule}": make_suffix(*rule) for rule in (*ROW_RULES, *CORPUS_RULES)}


@dataclass(frozen=True)
class Pair:
    """The same drafter twice, with one state."""

    table: Table
    propose: Any  # by the library
    write_answers: Any
    write_by_xla: Any

    def check(self, row_ids: list[int], lengths: list[int]) -> np.ndarray:
        """Compares both; returns the drafts."""
        columns = np.array(row_ids, np.int32), np.array(lengths, np.int32)
        found = np.asarray(self.propose(self.table.state, *columns))
        np.testing.assert_array_equal(found, self.table.propose(row_ids, lengths))
        return found


@lru_cache
def make_pair(config: SpeculativeConfig) -> Pair:
    drafter = make_lookup_drafter(config, in_library=True)
    both = drafter, make_lookup_drafter(config)
    writes = (jax.jit(each.write_answers, donate_argnums=0) for each in both)
    return Pair(Table(config, R, L), jax.jit(drafter.propose), *writes)


def draw_text(rng: np.random.Generator, count: int) -> np.ndarray:
    """Text, mostly of few tokens, in which a piece often comes again."""
    tokens = rng.integers(0, rng.choice([1, 2, 3, 4, 6, 40, 400]), count)
    for _ in range(rng.integers(0, 4)):
        size = rng.integers(1, count)
        begin, to = rng.integers(0, count - size, 2) if size < count else (0, 0)
        tokens[to : to + size] = tokens[begin : begin + size].copy()
    if rng.random() < 0.2:
        tokens = np.resize(tokens[: rng.integers(1, 9)], count)
    return tokens.astype(np.int32)


def fill(pair: Pair, rng: np.random.Generator, num_answers: int) -> None:
    """Rows and answers share pieces of text. What lies after a row's tokens is anything."""
    table = pair.table
    table.clear()
    if table.drafter.corpus_shape is not None and rng.random() < 0.3:
        position = MAX_POSITION - int(rng.integers(0, 300))
        table.answers = AnswerQueue(table.drafter.corpus_shape, position=position)
    texts = [draw_text(rng, L) for _ in range(3)]
    for _ in range(num_answers if table.drafter.keeps_answers else 0):
        begin, end = np.sort(rng.integers(0, L + 1, 2))
        text = texts[rng.integers(3)].copy()
        text[rng.integers(0, L)] = rng.integers(0, 9)
        table.remember(text[begin:end].tolist(), SALTS[rng.integers(len(SALTS))])
    for row in range(R):
        begin = rng.integers(0, L)
        text = np.roll(texts[rng.integers(3)], -begin)
        table.set_row(row, text.tolist(), SALTS[rng.integers(len(SALTS))])


@pytest.mark.parametrize("name", CONFIGS)
@settings(max_examples=scale_examples(60), deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    num_answers=st.integers(0, 9),
    rows=st.lists(
        st.tuples(st.integers(0, R - 1), st.one_of(st.integers(0, 12), st.integers(0, L), st.integers(L - 9, L + 3))),
        min_size=6,
        max_size=6,
    ),
)
def test_drafts_are_the_same(name: str, seed: int, num_answers: int, rows: list[tuple[int, int]]) -> None:
    pair, rng = make_pair(CONFIGS[name]), np.random.default_rng(seed)
    fill(pair, rng, num_answers)
    row_ids, lengths = map(list, zip(*rows, strict=True))
    history = np.array(pair.table.state.history)
    for row, length in rows:
        if row_ids.count(row) == 1:  # nothing after a row's tokens counts
            history[row, length:] = rng.integers(-(2**31), 2**31, max(0, L - length))
    pair.table.state = pair.table.state.replace(history=jnp.asarray(history))
    pair.check(row_ids, lengths)


@pytest.mark.parametrize("name", CONFIGS)
def test_there_are_drafts_to_compare(name: str) -> None:
    """Of the row, and of the corpus where there is one, after it has wrapped."""
    pair, rng = make_pair(CONFIGS[name]), np.random.default_rng(1)
    fill(pair, rng, 12)
    pair.table.set_row(4, [5, 6, 7] * 30)
    found = pair.check([0, 1, 2, 3, 4, 0], [60, 70, 80, 90, 84, 10])
    assert found[4, 0] == 5
    if pair.table.drafter.keeps_answers:
        text = (np.arange(40) + 100).tolist()
        pair.table.remember(text)
        pair.table.set_row(2, text[10:36])
        pair.table.set_row(3, text[10:36], SALTS[1])
        found = pair.check([2, 3] * 3, [26] * 6)
        assert found[0, 0] == 136 and (found[1] == NO_DRAFT).all()


@pytest.mark.parametrize("rule", CORPUS_RULES, ids=str)
@settings(max_examples=scale_examples(30), deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    start=st.one_of(st.just(0), st.integers(0, 2**20), st.integers(MAX_POSITION - 300, MAX_POSITION + 300)),
    answers=st.lists(
        st.tuples(st.sampled_from(SALTS), st.one_of(st.just(0), st.integers(2, 3 * L)), st.booleans()),
        min_size=1,
        max_size=12,
    ),
)
def test_answers_are_kept_alike(
    rule: tuple[Any, ...], seed: int, start: int, answers: list[tuple[tuple[int, int], int, bool]]
) -> None:
    """Every number is equal after each block, whether answers share one or not, also where positions move down."""
    pair, rng = make_pair(make_suffix(*rule)), np.random.default_rng(seed)
    queue = AnswerQueue(pair.table.drafter.corpus_shape, position=start)
    states = [pair.table.make_empty().corpus for _ in range(2)]  # both are donated
    for salt, count, waits in answers:
        queue.add(draw_text(rng, count).tolist() if count else [], np.array(salt, np.uint32))
        for block in () if waits else pack_all(queue):
            writes = pair.write_answers, pair.write_by_xla
            states = [write(state, block) for write, state in zip(writes, states, strict=True)]
            jax.tree.map(np.testing.assert_array_equal, *states)


def test_answers_are_kept_in_place() -> None:
    pair = make_pair(make_suffix(*CORPUS_RULES[-1]))
    pair.table.clear()
    corpus = pair.table.make_empty().corpus
    places = jax.tree.map(lambda leaf: leaf.unsafe_buffer_pointer(), corpus)
    (block,) = pair.table.pack(list(range(9)), (0, 0))
    corpus = pair.write_answers(corpus, block)
    found = jax.tree.map(lambda leaf: leaf.unsafe_buffer_pointer(), corpus)
    assert found.replace(oldest=places.oldest) == places  # one number is new
    assert corpus.tokens[:12].tolist() == [-1, *range(9), -1, 0]


@pytest.mark.parametrize("rule", CORPUS_RULES, ids=str)
def test_nothing_is_read_outside_the_arrays(rule: tuple[Any, ...]) -> None:
    """Whatever lies on the device: the same drafts where XLA's arithmetic does not overflow, and an end anyway."""
    pair, rng = make_pair(make_suffix(*rule)), np.random.default_rng(2)
    empty = pair.table.make_empty()
    for most in (200, 2**28, 2**31 - 1):
        for _ in range(scale_examples(100)):
            pair.table.state = draw_state(empty, rng, most)
            row_ids = rng.integers(0, R, 6).tolist()
            lengths = [*rng.integers(-3, L + 4, 2).tolist(), *rng.integers(2, 9, 4).tolist()]  # few: a corpus has more
            if most < 2**31 - 1:
                pair.check(row_ids, lengths)
            columns = [rng.integers(-most, most, 6).astype(np.int32) for _ in range(2)]
            jax.block_until_ready(pair.propose(pair.table.state, *columns))


def draw_state(empty: LookupState, rng: np.random.Generator, most: int) -> LookupState:
    assert empty.corpus is not None

    def draw(like: jax.Array, low: int, high: int) -> jax.Array:
        return jnp.asarray(rng.integers(low, high, like.shape), like.dtype)

    corpus = replace(
        empty.corpus,
        tokens=draw(empty.corpus.tokens, -1, 2),
        salts=draw(empty.corpus.salts, 0, 2),
        ends=draw(empty.corpus.ends, -most, most),
        oldest=draw(empty.corpus.oldest, 0, most),
        row_salts=draw(empty.corpus.row_salts, 0, 2),
    )
    return LookupState(draw(empty.history, 0, 2), corpus)


def find_drafter(platform: str = "cpu", device_kind: str = "cpu", **options: Any) -> Any:
    model = parse_config(load_preset("llama-3.1-8b") or {}).with_max_model_len(L)
    config = EngineConfig.from_options(model="llama-3.1-8b", speculative_config={"method": "suffix"}, **options)
    (lookups,) = make_shapes(config, model, platform, device_kind).features
    return lookups.drafter


def test_engines_on_one_cpu_call_the_library() -> None:
    """Not where portable attention is asked for: then nothing of the library is used."""
    plain = find_drafter(attention_impl="xla")
    assert find_drafter() == replace(plain, in_library=True) != plain
    for options in (
        {"tensor_parallel_size": 2},
        {"platform": "tpu", "device_kind": "TPU v5e"},
        {"platform": "gpu", "device_kind": "NVIDIA H200"},
    ):
        assert find_drafter(**options) == plain
    for drafter in (plain, find_drafter()):
        columns = [jax.ShapeDtypeStruct((2,), jnp.int32)] * 2
        text = jax.jit(drafter.propose).lower(drafter.state_specs(R, L), *columns).as_text()
        assert (library.LOOKUP in text) == drafter.in_library

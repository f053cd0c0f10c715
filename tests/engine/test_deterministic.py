"""What a token's computation may depend on with `deterministic`: its position and its prompt's length, nothing else."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from jaxserve.core.pages.prefix import extend_keys
from jaxserve.engine.engine import Engine
from jaxserve.request import Request, ServiceTier
from jaxserve.sampling_params import OutputKind, SamplingParams
from tests.engine.helpers import greedy, make_engine, run
from tests.examples import scale_examples
from tests.fake_device import FakeDevice, continue_alone

_Asked = tuple[int, int, int, int, int]  # tokens that all share, further ones, answer, n, the step of arrival


def check_kinds(device: FakeDevice, edge: int = 32) -> None:
    """Every token of a request was computed in the kind of step that its position asks for. Its seed is its length."""
    lengths: dict[int, int] = {}  # by row
    for plan in device.plans:
        is_single = plan.num_tokens == plan.num_rows
        assert is_single or not plan.decode_rows, "a mixed step"
        lengths |= {new_row.row: new_row.seed for new_row in plan.new_rows}
        for chunk in plan.chunks:
            assert is_single or len(chunk.token_ids) > 1
            assert chunk.end % edge == 0 or chunk.end >= lengths[chunk.row] - 1
            kinds = {is_alone(position, lengths[chunk.row], edge) for position in range(chunk.start, chunk.end)}
            assert kinds == {is_single}


def check_index(engine: Engine, requests: list[Request]) -> None:
    """Only pages of prompts can be found."""
    known: set[bytes] = set()
    for request in requests:
        keys: list[bytes] = []
        ids = request.prompt_token_ids
        extend_keys(keys, ids, page_size=32, num_pages=len(ids) // 32, salt=request.salt)
        known |= set(keys)
    assert set(engine.scheduler.pages.pools[0]._index) <= known


def is_alone(position: int, num_prompt: int, edge: int) -> bool:
    """Whether a token belongs into a step of single tokens."""
    return position >= num_prompt or position == num_prompt - 1 == position // edge * edge


def arrive(engine: Engine, requests: list[tuple[int, Request]], strikes: set[int]) -> dict[str, list[list[int]]]:
    """Runs requests that arrive in given steps; the device's state is lost in the steps `strikes`."""
    step, tokens = 0, dict[str, list[list[int]]]()
    while requests or engine.has_unfinished:
        for arrival in [each for each in requests if each[0] <= step]:
            engine.add_request(arrival[1])
            requests.remove(arrival)
        if step in strikes:
            engine.reset()
        for output in engine.step():
            tokens[output.request_id] = [completion.token_ids for completion in output.outputs]
        step += 1
    return tokens


@settings(max_examples=scale_examples(100), deadline=None)
@given(
    st.lists(
        st.tuples(
            st.integers(0, 130), st.integers(1, 70), st.integers(1, 40), st.sampled_from([1, 1, 3]), st.integers(0, 30)
        ),
        min_size=1,
        max_size=6,
    ),
    st.integers(10, 40),
    st.sampled_from([64, 200]),
    st.sets(st.integers(1, 40), max_size=2),
    st.booleans(),
    st.sampled_from([(32, None), (32, 8), (64, 0), (64, 2), (64, 8)]),
)
@example([(0, 65, 5, 1, 0), (0, 97, 5, 1, 0)], 20, 200, set(), True, (32, None))
@example([(64, 1, 5, 3, 0), (64, 33, 5, 1, 3)], 20, 64, set(), False, (32, None))
@example([(64, 1, 5, 3, 0), (64, 33, 5, 1, 3), (0, 20, 5, 1, 3), (0, 97, 5, 1, 3)], 20, 64, set(), False, (64, 8))
def test_a_tokens_kind_of_step_depends_on_its_position_alone(
    asked: list[_Asked],
    num_pages: int,
    budget: int,
    strikes: set[int],
    overlap: bool,
    states: tuple[int, int | None],
) -> None:
    """States have an edge and a number of snapshots; None: the model has no states."""
    edge, num_snapshots = states
    options = {"edge": edge, "num_snapshots": num_snapshots, "caching": num_snapshots != 0}
    engine, device = make_engine(num_pages=num_pages, budget=budget, overlap=overlap, deterministic=True, **options)
    device.wants_edges = not strikes
    requests = []
    for index, (shared, own, answer, n, step) in enumerate(asked):
        prompt = (*range(shared), *range(1000 * (index + 1), 1000 * (index + 1) + own))
        params = SamplingParams(temperature=0, max_tokens=answer, n=n, output_kind=OutputKind.FINAL_ONLY)
        requests.append((step, Request(f"r{index}", prompt, params, seed=len(prompt))))
    tokens = arrive(engine, requests.copy(), strikes)
    for _, request in requests:
        params = request.params
        alone = continue_alone(request.prompt_token_ids, params.max_tokens or 0, [None], device.vocab_size)
        assert tokens[request.request_id] == [alone] * params.n
    assert strikes or engine.scheduler.counts.num_preemptions == 0
    check_kinds(device, edge)
    check_index(engine, [request for _, request in requests])


def test_tokens_forced_by_a_grammar_are_computed_one_by_one() -> None:
    engine, device = make_engine(deterministic=True)
    device.wants_edges = False
    engine.add_request(greedy("forced", range(40), 30, seed=40))
    while not device.plans or not device.plans[-1].decode_rows:
        engine.step()
    engine.drain()
    (sequence,) = engine.scheduler.batch.decoding
    engine.scheduler.batch.compute_again(sequence)  # as for a late mask
    engine._show(engine.scheduler.extend(sequence, [5, 6, 7]))
    run(engine, [])
    check_kinds(device)


def test_whole_needs_are_reserved_so_nobody_is_preempted() -> None:
    requests = [greedy(f"r{i}", range(i, i + 33), 60) for i in range(3)]
    for deterministic, most in ((False, 2), (True, 1)):
        engine, device = make_engine(num_pages=6, caching=False, deterministic=deterministic)
        run(engine, requests)
        assert bool(engine.scheduler.counts.num_preemptions) != deterministic
        assert max(plan.num_rows for plan in device.plans) >= most
    assert max(plan.num_rows for plan in device.plans) == 1, "five pages are room for one whole need"


def test_flex_keeps_its_row() -> None:
    engine, _ = make_engine(rows=1, deterministic=True)
    engine.add_request(greedy("flex", range(40), 20, service_tier=ServiceTier.FLEX))
    engine.step()
    run(engine, [greedy("usual", range(40), 20)])
    assert engine.scheduler.counts.num_preemptions == 0


def test_pages_of_answers_are_not_shared() -> None:
    for deterministic, cached in ((False, 96), (True, 64)):
        engine, device = make_engine(deterministic=deterministic)
        prompt = list(range(70))
        answer = continue_alone(prompt, 40, [None], device.vocab_size)
        run(engine, [greedy("first", prompt, 40)])
        output = run(engine, [greedy("second", [*prompt, *answer], 2)])["second"]
        assert output.num_cached_tokens == cached


@pytest.mark.parametrize("deterministic", [False, True])
def test_masks_are_waited_for(deterministic: bool) -> None:
    engine, _ = make_engine(deterministic=deterministic)
    assert (engine._grammars._mask_timeout is None) == deterministic

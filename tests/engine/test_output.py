"""Text as users see it: stop strings over token borders, deltas that add up, hidden stop tokens."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.core.pages import PageGroup, PageManager
from jaxserve.core.scheduler import Commit, Scheduler, SchedulerLimits, StepOutputs, StepPlan
from jaxserve.engine.engine import Engine
from jaxserve.engine.output import StopMatcher
from jaxserve.request import CompletionOutput, Request, RequestOutput
from jaxserve.sampling_params import OutputKind, SamplingParams
from tests.fake_device import FakeDevice, continue_alone

VOCAB = 26
PROMPT = (1, 2, 3)


class Letters:
    """Token i is the i-th letter; text appears one token late, as with bytes that wait for their character."""

    eos_token_ids = ()

    def __init__(self) -> None:
        self._held = ""

    def new_stream(
        self,
        skip_special_tokens: bool = True,
        prompt_ids: Sequence[int] = (),
        spaces_between_special_tokens: bool = True,
    ) -> Letters:
        assert tuple(prompt_ids) == PROMPT
        return Letters()

    def push(self, token_id: int) -> str:
        piece, self._held = self._held, chr(ord("a") + token_id)
        return piece

    def flush(self) -> str:
        return self._held


def make_engine() -> Engine:
    groups = [PageGroup(20)]
    pages = PageManager(groups, page_size=32, max_chunk=64, enable_prefix_caching=True)
    return Engine(
        Scheduler(
            SchedulerLimits(max_num_seqs=2, max_num_batched_tokens=64, max_model_len=200, max_prefix_updates=8), pages
        ),
        FakeDevice(groups, page_size=32, vocab_size=VOCAB),
        tokenizer=Letters(),  # type: ignore[arg-type]
    )


def run(params: SamplingParams) -> list[RequestOutput]:
    engine = make_engine()
    engine.add_request(Request("r", PROMPT, params))
    outputs = []
    while engine.has_unfinished:
        outputs += engine.step()
    assert all(pool.num_referenced == 0 for pool in engine.scheduler.pages.pools)
    return outputs


IDS = continue_alone(PROMPT, 40, [None], VOCAB)
TEXT = "".join(chr(ord("a") + token_id) for token_id in IDS)


@pytest.mark.parametrize("kind", list(OutputKind))
def test_kinds_say_the_same(kind: OutputKind) -> None:
    outputs = run(SamplingParams(temperature=0, max_tokens=40, output_kind=kind))
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    completions = [output.outputs[0] for output in outputs]
    assert completions[-1].finish_reason == "length"
    if kind is OutputKind.DELTA:
        assert "".join(c.text for c in completions) == TEXT
        assert [i for c in completions for i in c.token_ids] == IDS
    else:
        assert (completions[-1].text, completions[-1].token_ids) == (TEXT, IDS)
        assert len(outputs) == (1 if kind is OutputKind.FINAL_ONLY else 40)
        assert all(TEXT.startswith(c.text) for c in completions)


@pytest.mark.parametrize("least", [0, 1, 5, 40])
def test_text_before_min_tokens_is_not_searched(least: int) -> None:
    stops = sorted(set(TEXT[:8]))
    last = run(SamplingParams(temperature=0, min_tokens=least, max_tokens=40, stop=stops))[-1].outputs[0]
    shown = max(0, least - 1) if least < 40 else 40  # text appears one token late
    assert last.text == TEXT[:shown] and last.finish_reason == ("stop" if least < 40 else "length")
    assert len(last.token_ids) == max(2, least + 1) if least < 40 else 40


def test_runs_that_are_passed_on_are_whole_outputs() -> None:
    """They are made without calling their classes, so a field could be missing."""
    outputs = run(SamplingParams(temperature=0, max_tokens=40, output_kind=OutputKind.DELTA))[:-1]
    shown = [output.outputs[0] for output in outputs]
    assert shown == [CompletionOutput(0, each.text, each.token_ids) for each in shown]
    assert outputs == [RequestOutput("r", None, list(PROMPT), [each], False, 0) for each in shown]


@pytest.mark.parametrize("include", [False, True])
def test_stop_string_over_tokens_ends_the_text_before_or_after_it(include: bool) -> None:
    stop = TEXT[10:14]
    at = TEXT.find(stop)
    params = SamplingParams(
        temperature=0,
        max_tokens=40,
        stop=["zzzzzz", stop],
        include_stop_str_in_output=include,
        output_kind=OutputKind.DELTA,
    )
    outputs = run(params)
    last = outputs[-1].outputs[0]
    assert "".join(output.outputs[0].text for output in outputs) == TEXT[: at + (4 if include else 0)]
    assert (last.finish_reason, last.stop_reason) == ("stop", stop)


def test_no_part_of_a_stop_string_is_ever_shown() -> None:
    stop = TEXT[20:26]
    outputs = run(SamplingParams(temperature=0, max_tokens=40, stop=stop, output_kind=OutputKind.CUMULATIVE))
    assert all(TEXT[:20].startswith(output.outputs[0].text) for output in outputs)


def test_stop_string_that_begins_but_never_ends_is_text() -> None:
    stop = TEXT[-1] + "0"
    assert run(SamplingParams(temperature=0, max_tokens=40, stop=stop))[-1].outputs[0].text == TEXT


@pytest.mark.parametrize("kind", list(OutputKind))
def test_a_stop_string_in_a_jump_ends_text_and_ids_at_the_same_place(kind: OutputKind) -> None:
    engine = make_engine()
    engine.add_request(Request("r", PROMPT, SamplingParams(max_tokens=90, stop=["yz"], output_kind=kind)))
    outputs = engine.step() + engine.step() + engine.drain()
    (sequence,) = engine.scheduler.batch.decoding
    word = [ord(letter) - ord("a") for letter in "xyzabc"]
    outputs += engine._show(engine.scheduler.extend(sequence, word))
    assert outputs[-1].finished and outputs[-1].outputs[0].stop_reason == "yz"
    said = [output.outputs[0] for output in (outputs if kind is OutputKind.DELTA else outputs[-1:])]
    assert [token for each in said for token in each.token_ids] == [*IDS[:2], *word[:4]]
    assert "".join(each.text for each in said) == f"{TEXT[:2]}x"
    shown = [len(output.outputs[0].token_ids) for output in outputs]
    assert shown == {"cumulative": [1, 2, 6], "delta": [1, 1, 4], "final_only": [6]}[kind.value]


@pytest.mark.parametrize("include", [False, True])
def test_stop_token_is_in_the_ids_and_not_in_the_text(include: bool) -> None:
    stop_id = IDS[12]
    end = IDS.index(stop_id) + 1
    params = SamplingParams(temperature=0, max_tokens=40, stop_token_ids=[stop_id], include_stop_str_in_output=include)
    completion = run(params)[-1].outputs[0]
    assert completion.token_ids == IDS[:end]
    assert completion.text == TEXT[: end if include else end - 1]
    assert (completion.finish_reason, completion.stop_reason) == ("stop", stop_id)


def test_detokenize_off_gives_ids_only() -> None:
    completion = run(SamplingParams(temperature=0, max_tokens=5, detokenize=False))[-1].outputs[0]
    assert (completion.text, completion.token_ids) == ("", IDS[:5])


@given(
    st.lists(st.text("ab", max_size=3), max_size=12),
    st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_matcher_equals_search_in_the_whole_text(pieces: list[str], stops: list[str]) -> None:
    matcher, shown, found, seen = StopMatcher(tuple(stops)), "", None, ""
    for piece in pieces:
        seen += piece
        text, found = matcher.push(piece)
        shown += text
        if found is not None:
            break
    if found is None:
        shown += matcher.flush()
    matches = [(seen.find(stop), stop) for stop in stops if stop in seen]
    if matches:
        first = min(at for at, _ in matches)
        assert found in stops and shown == seen[:first] and seen.startswith(found, first)
    else:
        assert found is None and shown == seen


def test_drafts_are_told_by_step(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, steps = make_engine(), [(4, 2), (0, 0), (4, 0), (3, 3), (0, 0)]
    commit, left = engine.scheduler.commit, iter(steps)

    def count(plan: StepPlan, outputs: StepOutputs) -> Commit:
        made = commit(plan, outputs)
        for sequence in made.sequences:
            drafts, accepted = next(left)
            if drafts:
                sequence.verified.append((drafts, accepted))
        return made

    monkeypatch.setattr(engine.scheduler, "commit", count)
    engine.add_request(Request("r", PROMPT, SamplingParams(temperature=0, max_tokens=5)))
    while engine.has_unfinished:
        outputs = engine.step()
    metrics = outputs[-1].metrics
    assert metrics is not None and (metrics.num_draft_tokens, metrics.num_accepted_tokens) == (11, 5)
    assert metrics.verified == ((4, 2), (4, 0), (3, 3))
    assert run(SamplingParams(temperature=0, max_tokens=5))[-1].metrics.verified == ()  # type: ignore[union-attr]

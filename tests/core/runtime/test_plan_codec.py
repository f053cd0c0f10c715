"""Plans and masks through JSON and back, whatever their fields hold."""

from __future__ import annotations

import base64
import dataclasses
import json
import random
import zlib
from typing import Any, get_args, get_origin, get_type_hints

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.core.runtime import plan_codec
from jaxserve.core.runtime.plan_codec import MaskDecoder, MaskEncoder, PlanDecoder, PlanEncoder, encode_object
from jaxserve.core.scheduler.step_plan import (
    ChunkImages,
    ChunkWork,
    FinishedAnswer,
    ImageWrite,
    NewRow,
    RowHistory,
    StepPlan,
)
from jaxserve.media.items import MediaItem
from jaxserve.sampling_params import OutputKind, SamplingParams
from jaxserve.structured_params import StructuredOutputsParams
from jaxserve.token_automaton import TokenAutomaton

IDS = st.integers(0, 2**31 - 1)
TEXT = st.text(min_size=1, max_size=5).filter(lambda text: text.strip() and text.isprintable())
STRUCTURED = st.one_of(
    st.builds(StructuredOutputsParams, json=st.just({"type": "object"}), whitespace_pattern=st.just(r"[ ]?")),
    st.builds(StructuredOutputsParams, json_object=st.just(True), disable_any_whitespace=st.booleans()),
    st.builds(StructuredOutputsParams, regex=st.just("[a-z]+")),
    st.builds(StructuredOutputsParams, choice=st.lists(TEXT, min_size=1, max_size=3)),
    st.builds(StructuredOutputsParams, grammar=st.just('start: "yes"')),
)


def maybe(strategy: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.none() | strategy


PARAMS: dict[str, st.SearchStrategy[Any]] = {
    "n": st.integers(1, 128),
    "presence_penalty": st.floats(-2, 2),
    "frequency_penalty": st.floats(-2, 2),
    "repetition_penalty": st.floats(0.01, 2),
    "temperature": st.floats(0, 100) | st.just(0),
    "top_p": st.floats(0.001, 1),
    "top_k": st.integers(-1, 2**31 - 1),
    "min_p": st.floats(0, 1),
    "seed": maybe(st.integers(-(2**63), 2**63 - 1)),
    "max_tokens": maybe(st.integers(100, 2**31 - 1)),
    "stop": maybe(TEXT | st.lists(TEXT, max_size=3)),
    "stop_token_ids": maybe(st.lists(IDS, max_size=3)),
    "ignore_eos": st.booleans(),
    "min_tokens": st.integers(0, 100),
    "logprobs": maybe(st.integers(-1, 20)),
    "prompt_logprobs": maybe(st.integers(0, 20)),
    "logit_bias": maybe(st.dictionaries(IDS, st.floats(-100, 100), max_size=3)),
    "allowed_token_ids": maybe(st.lists(IDS, min_size=1, max_size=3)),
    "bad_words": maybe(st.lists(TEXT | st.lists(IDS, min_size=1, max_size=3), max_size=3)),
    "suppress_tokens": maybe(st.lists(IDS, max_size=3)),
    "structured_outputs": maybe(STRUCTURED),
    "extra_args": maybe(st.dictionaries(TEXT, st.floats(-3e38, 3e38), max_size=3)),
    "truncate_prompt_tokens": maybe(st.integers(1, 2**31 - 1) | st.just(-1)),
    "detokenize": st.booleans(),
    "skip_special_tokens": st.booleans(),
    "spaces_between_special_tokens": st.booleans(),
    "include_stop_str_in_output": st.booleans(),
    "output_kind": st.sampled_from(OutputKind),
    "best_of": st.none(),
}


@st.composite
def draw_params(draw: st.DrawFn) -> SamplingParams:
    names = draw(st.lists(st.sampled_from(sorted(PARAMS.keys() - {"stop", "detokenize"})), max_size=3, unique=True))
    return SamplingParams(**({"max_tokens": None} | {name: draw(PARAMS[name]) for name in names}))


def find_values(hint: Any) -> st.SearchStrategy[Any]:
    """Values of a field's type, so that a field added later gets some."""
    if hint is SamplingParams:
        return draw_params()
    if dataclasses.is_dataclass(hint):
        hints = get_type_hints(hint)
        return st.builds(hint, **{f.name: find_values(hints[f.name]) for f in dataclasses.fields(hint)})
    parts = get_args(hint)
    if get_origin(hint) is tuple and parts[-1] is Ellipsis:
        return st.lists(find_values(parts[0]), max_size=2).map(tuple)
    if get_origin(hint) is tuple:
        return st.tuples(*map(find_values, parts))
    if type(None) in parts:
        return maybe(find_values(parts[0]))
    numbers = {int: st.integers(-(2**64), 2**64), bool: st.booleans()}
    return {**numbers, str: st.text(max_size=3), bytes: st.binary(max_size=3)}[hint]


PLANS = find_values(StepPlan)


def send(plans: list[StepPlan]) -> list[StepPlan]:
    encoder, decoder = PlanEncoder(), PlanDecoder()
    lines = [json.dumps(encoder.encode(plan), default=encode_object) for plan in plans]
    return [decoder.decode(json.loads(line)) for line in lines]


def list_types(value: Any) -> Any:
    """The types of a value and of all within it: a list is not a tuple, 1 is not True."""
    if dataclasses.is_dataclass(value):
        return type(value), [list_types(getattr(value, f.name)) for f in dataclasses.fields(value)]
    return (type(value), [list_types(each) for each in value]) if isinstance(value, tuple) else type(value)


@given(st.lists(PLANS, min_size=1, max_size=4))
def test_plans_come_back_as_they_were(plans: list[StepPlan]) -> None:
    found = send([*plans, plans[0], plans[0]])
    assert found == [*plans, plans[0], plans[0]]
    for plan, read in zip(plans, found, strict=False):
        for name in ("decode_rows", "decode_tickets", "page_updates"):
            assert list_types(getattr(plan, name)) == list_types(getattr(read, name))
        for chunk, other in zip(plan.chunks, read.chunks, strict=True):
            assert list_types(chunk) == list_types(other)


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(SamplingParams)])
def test_each_sampling_parameter_comes_back(name: str) -> None:
    """Whatever its value: one that the codec left out would come back as the default."""

    @given(PARAMS[name])
    def check(value: Any) -> None:
        params = SamplingParams(**{"max_tokens": None, name: value})
        new_row = dataclasses.replace(ROW, params=params, seed=2**63)
        (plan,) = send([dataclasses.replace(EMPTY, new_rows=(new_row,))])
        assert plan.new_rows == (new_row,)
        assert all(
            getattr(plan.new_rows[0].params, f.name) == getattr(params, f.name) for f in dataclasses.fields(params)
        )

    check()


EMPTY = StepPlan(**{name: hint() if hint in (int, bool) else () for name, hint in get_type_hints(StepPlan).items()})
HISTORY = RowHistory((1, 2), 1, (3,), ((4, 5),), TokenAutomaton(((0, 1, 2), (2, 7, 0))))
ORDERED = SamplingParams(logit_bias={5: 1.5}, extra_args={"b": 1.0, "a": 2.0})
ROW = NewRow(
    3,
    32,
    ORDERED,
    seed=9,
    sequence_index=1,
    max_num_tokens=99,
    history=HISTORY,
    wants_embedding=True,
    token_ids=(8,),
    cache_salt="s",
    adapter=3,
    rope_delta=-4,
)


def test_the_fields_of_every_part_are_there() -> None:
    """None of these values is a default, so each must be written."""
    images = ChunkImages((0,), (8,), (1, 2))
    chunk = ChunkWork(1, 2, 3, (4, 5), True, 6, images)
    write = ImageWrite(MediaItem(b"d", b"p", (1, 2, 2), 1), (8,))
    plan = dataclasses.replace(EMPTY, step_id=7, new_rows=(ROW,), chunks=(chunk,), image_writes=(write,))
    written = json.loads(json.dumps(PlanEncoder().encode(plan), default=encode_object))
    assert written.keys() == {f.name for f in dataclasses.fields(StepPlan)}
    for kind, found in (
        (ChunkWork, written["chunks"][0]),
        (ChunkImages, written["chunks"][0]["images"]),
        (ImageWrite, written["image_writes"][0]),
        (MediaItem, written["image_writes"][0]["item"]),
        (NewRow, written["new_rows"][0]),
        (RowHistory, written["new_rows"][0]["history"]),
        (TokenAutomaton, written["new_rows"][0]["history"]["automaton"]),
    ):
        assert found.keys() == {f.name for f in dataclasses.fields(kind)}
    assert send([plan]) == [plan]
    assert list((send([plan])[0].new_rows[0].params.extra_args or {}).items()) == [("b", 1.0), ("a", 2.0)], "in order"


def test_fields_are_described_with_their_types() -> None:
    found = plan_codec.describe_fields()
    kinds = (
        StepPlan,
        ChunkImages,
        ChunkWork,
        FinishedAnswer,
        ImageWrite,
        MediaItem,
        NewRow,
        RowHistory,
        SamplingParams,
        StructuredOutputsParams,
        TokenAutomaton,
    )
    assert found.keys() == {kind.__name__ for kind in kinds}
    assert "decode_rows: tuple[int, ...]" in found["StepPlan"] and "seed: int" in found["NewRow"]


def test_a_step_that_repeats_the_last_is_short() -> None:
    encoder = PlanEncoder()
    first = dataclasses.replace(EMPTY, decode_rows=tuple(range(500)), decode_tickets=tuple(range(500)))
    encoder.encode(first)
    assert encoder.encode(dataclasses.replace(first, step_id=1)) == {"step_id": 1}


@dataclasses.dataclass(frozen=True)
class _Strange:
    field: dict[str, int]


def test_a_field_that_cannot_be_read_back_is_refused_when_the_program_is_loaded() -> None:
    with pytest.raises(TypeError, match=r"dict\[str, int\] cannot be read"):
        plan_codec._list_readers(_Strange)
    with pytest.raises(TypeError, match="set has no form"):
        encode_object({1})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("step_id", "7"),
        ("step_id", True),
        ("decode_rows", [1.0]),
        ("decode_rows", 3),
        ("chunks", [{"row": 1}]),
        ("chunks", [{"row": 1, "ticket": 1, "start": 0, "token_ids": [1], "samples": 1}]),
        ("new_rows", [{"__reduce__": 1}]),
        ("page_updates", [[1, 2, 3]]),
        ("new_rows", [{"params": {"n": 0}}]),
        ("new_rows", [{"params": 5}]),
        ("more", 1),
    ],
)
def test_values_of_other_types_are_refused(name: str, value: Any) -> None:
    good = json.loads(json.dumps(PlanEncoder().encode(EMPTY), default=encode_object))
    assert PlanDecoder().decode(good) == EMPTY
    with pytest.raises((ValueError, TypeError)):
        PlanDecoder().decode(good | {name: value})


@given(st.data())
def test_masks_come_back_as_they_were(data: st.DataObject) -> None:
    words = data.draw(st.integers(1, 5))
    lines = st.lists(st.integers(0, 2**32 - 1), min_size=words, max_size=words)
    known = data.draw(st.lists(lines, min_size=1, max_size=3))  # so that lines repeat
    masks = data.draw(st.lists(st.lists(lines | st.sampled_from(known), min_size=1, max_size=4), max_size=8))
    encoder, decoder = MaskEncoder(), MaskDecoder(words)
    for mask in (np.array(rows, np.uint32) for rows in masks):
        found = decoder.decode(json.loads(json.dumps(encoder.encode(mask))))
        assert found.dtype == np.uint32 and np.array_equal(found, mask)


def test_few_mask_lines_are_kept_and_none_is_mistaken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_codec, "_MASK_LINES", 4)
    encoder, decoder, draw = MaskEncoder(), MaskDecoder(2), random.Random(0)
    for _ in range(300):
        rows = draw.choice([1, 2, 5])
        mask = np.array([[draw.randrange(9), 7] for _ in range(rows)], np.uint32)
        assert np.array_equal(decoder.decode(encoder.encode(mask)), mask)
    assert len(decoder._lines) <= 10, "twice the largest mask"


def test_a_mask_line_of_another_length_is_refused_without_being_unpacked() -> None:
    for data in (b"", bytes(4), bytes(10**8)):
        line = base64.b64encode(zlib.compress(data)).decode()
        with pytest.raises(ValueError, match="8 bytes"):
            MaskDecoder(2).decode({"slots": [0], "lines": {"0": line}})
    with pytest.raises(KeyError):
        MaskDecoder(2).decode({"slots": [0], "lines": {}})


def test_every_parameter_has_values() -> None:
    assert PARAMS.keys() == {field.name for field in dataclasses.fields(SamplingParams)}

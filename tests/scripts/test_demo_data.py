"""What the demo model is taught and asked: reproducible, split cleanly, and of bounded length."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

from demo_lm import calling, corpus, exam, scoring, tasks, tokens, toolbox
from demo_lm.glossary import load_glossary
from demo_lm.packing import Packer, Shape, seed_step
from demo_lm.questions import (
    HELD_OUT_TEMPLATES,
    TEMPLATES,
    draw_question,
    list_held_out_questions,
    list_training_questions,
)

from jaxserve.errors import InvalidRequestError
from jaxserve.tokenizers.template import render_template

pytestmark = pytest.mark.thorough

_LONGEST_TURN = 160  # tokens of a question without tools and its answer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory):
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.model"
    tokens.train_tokenizer(path, num_documents=6000)
    return tokens.load_tokenizer(path)


def _draw_many(seed: int, count: int) -> list[corpus.Conversation]:
    rng = seed_step(0, seed)
    return [corpus.draw_conversation(rng) for _ in range(count)]


def test_the_same_seed_gives_the_same_conversations_and_another_seed_others() -> None:
    assert _draw_many(1, 50) == _draw_many(1, 50)
    assert _draw_many(1, 50) != _draw_many(2, 50)


def test_the_exam_is_the_same_every_time() -> None:
    assert scoring.list_problems(20, 10) == scoring.list_problems(20, 10)


def test_training_never_adds_a_held_out_pair() -> None:
    rng = random.Random(0)
    for _ in range(3000):
        a, b = tasks.draw_pair(rng, held_out=False)
        assert not tasks.is_held_out_pair(a, b)
        assert not tasks.is_held_out_pair(b, a)


def test_the_exam_adds_held_out_pairs_of_two_and_three_digits_only() -> None:
    sums = [p for p in scoring.list_problems(200, 0) if p.skill == "addition"]
    assert len(sums) == 200
    for problem in sums:
        a, b = map(int, problem.expected.partition(":")[0].split(" + "))
        assert tasks.is_held_out_pair(a, b)
        assert 10 <= min(a, b) <= max(a, b) <= 999


def test_about_three_percent_of_the_pairs_are_held_out() -> None:
    share = sum(tasks.is_held_out_pair(a, b) for a in range(100, 300) for b in range(100, 300)) / 200**2
    assert 0.02 < share < 0.04


def test_every_glossary_entry_can_be_asked_for_in_many_ways_and_keeps_some_back() -> None:
    for entry in load_glossary():
        assert len(set(list_training_questions(entry))) >= 8, entry.key
        assert len(set(list_held_out_questions(entry))) >= 2, entry.key
        assert len(entry.unseen) >= 2, entry.key


def test_glossary_answers_differ() -> None:
    answers = [entry.answer for entry in load_glossary()]
    assert len(set(answers)) == len(answers) >= 40


def test_no_training_question_is_held_out() -> None:
    held_out = {question.lower() for entry in load_glossary() for question in list_held_out_questions(entry)}
    for entry in load_glossary():
        assert held_out.isdisjoint(question.lower() for question in list_training_questions(entry)), entry.key
    assert set(TEMPLATES).isdisjoint(HELD_OUT_TEMPLATES)


def test_disturbed_questions_are_not_held_out_either() -> None:
    held_out = {question.lower() for entry in load_glossary() for question in list_held_out_questions(entry)}
    rng = random.Random(3)
    for entry in load_glossary():
        assert all(draw_question(rng, entry).lower() not in held_out for _ in range(40)), entry.key


def test_training_and_exam_share_no_record() -> None:
    rng = random.Random(4)
    seen = {tasks.write_record(tasks.draw_record(rng, held_out=False)) for _ in range(2000)}
    kept = {tasks.write_record(tasks.draw_record(rng, held_out=True)) for _ in range(200)}
    assert seen.isdisjoint(kept)


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 999), st.integers(0, 999))
def test_worked_additions_are_right_in_every_line(a: int, b: int) -> None:
    text = tasks.work_addition(a, b)
    assert tasks.read_sum(text) == a + b
    for line in text.partition(": ")[2].split(", ")[:-1]:
        left, _, right = line.partition("=")
        assert sum(map(int, left.split("+"))) == int(right)


@pytest.mark.parametrize("text", ["", "no number", "= 12 apples", "1 + 2"])
def test_text_without_a_sum_at_its_end_has_none(text: str) -> None:
    assert tasks.read_sum(text) is None


def test_json_answers_hold_the_record() -> None:
    rng = random.Random(5)
    for _ in range(100):
        record = tasks.draw_record(rng, held_out=False)
        assert json.loads(tasks.write_json(record)) == record
    assert tasks.write_record({"name": "Ada", "age": 36}) == "name: Ada, age: 36"


def test_an_unknown_skill_is_refused() -> None:
    with pytest.raises(ValueError, match="poetry"):
        corpus.draw_turn(random.Random(0), "poetry")


def test_judging_accepts_equal_answers_and_nothing_else() -> None:
    problems = scoring.list_problems(10, 10)
    perfect = scoring.evaluate(lambda problems: [p.expected for p in problems], problems)
    assert perfect.passes()
    assert not perfect.wrong
    silent = scoring.evaluate(lambda problems: ["" for _ in problems], problems)
    assert not silent.passes()
    assert len(silent.wrong) == len(problems)
    assert not any(silent.right.values())


def test_a_sum_counts_by_its_result_and_a_record_by_its_content() -> None:
    addition = scoring.Problem("addition", "", "1 + 2", tasks.work_addition(1, 2))
    assert addition.accepts("= 3")
    assert not addition.accepts("= 4")
    record = scoring.Problem("json", "", "", '{"a": 1}')
    assert record.accepts('{"a":1}')
    assert not record.accepts('{"a": 2}')
    assert not record.accepts("a: 1")


def test_every_turn_fits_into_the_exam_window(tokenizer) -> None:
    rng = random.Random(6)
    for skill in corpus.SHARES:
        for _ in range(300):
            question, answer = corpus.draw_turn(rng, skill)
            length = len(tokens.encode_prompt(tokenizer, question)) + len(tokenizer.encode(answer)) + 1
            assert length <= _LONGEST_TURN, (question, answer)
    for problem in scoring.list_problems(50, 50):
        prompt = tokens.encode_prompt(tokenizer, problem.question)
        assert len(prompt) + len(tokenizer.encode(problem.expected)) < _LONGEST_TURN, problem


def test_encoding_keeps_the_text_and_weighs_the_answer(tokenizer) -> None:
    messages = (
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What is 12 + 3?"},
        {"role": "assistant", "content": "= 15"},
    )
    ids, weights = tokens.encode_conversation(tokenizer, corpus.Conversation(messages))
    assert tokenizer.decode(ids) == "Be brief.What is 12 + 3?= 15"
    answer = [*tokenizer.encode("= 15"), tokens.EOS_ID]
    assert ids[-len(answer) :] == answer
    assert weights[-len(answer) :] == [1.0] * len(answer)
    assert max(weights[: -len(answer)]) == tokens.USER_WEIGHT


def test_digits_are_single_pieces_and_typed_control_tokens_stay_text(tokenizer) -> None:
    assert [tokenizer.id_to_piece(i) for i in tokenizer.encode("4096")] == ["4", "0", "9", "6"]
    assert min(tokenizer.encode("<|user|><s><|end|>")) > tokens.SYSTEM_ID
    assert tokenizer.decode(tokenizer.encode("né  \n🙂")) == "né  \n🙂"


def test_the_chat_template_agrees_with_the_encoding(tokenizer) -> None:
    rng = random.Random(8)
    drawn = [corpus.draw_conversation(rng) for _ in range(300)]
    for conversation in filter(lambda each: each.messages, drawn):
        text = render_template(
            tokens.CHAT_TEMPLATE, list(conversation.messages), {"bos_token": tokens.BOS}, tools=list(conversation.tools)
        )
        parts = "".join(f"<|{role}|>{part}<|end|>" for role, part in tokens.write_parts(conversation))
        assert text == tokens.BOS + parts
    assert sum(bool(each.tools) for each in drawn) > 50


@pytest.mark.parametrize("thinks", [False, True])
def test_an_open_answer_is_encoded_as_the_template_begins_it(tokenizer, thinks: bool) -> None:
    messages = ({"role": "user", "content": "Hi"},)
    variables = {"bos_token": tokens.BOS, "add_generation_prompt": True, "enable_thinking": thinks}
    text = render_template(tokens.CHAT_TEMPLATE, list(messages), variables)
    ids = tokens.encode_open(tokenizer, corpus.Conversation(messages), thinks=thinks)
    assert "".join(tokenizer.id_to_piece(token_id) for token_id in ids).replace("<0x0A>", "\n") == text


def test_results_that_follow_each_other_share_a_turn_and_calls_a_message() -> None:
    calls = [{"type": "function", "function": {"name": name, "arguments": {"a": 1}}} for name in ("one", "two")]
    messages = (
        {"role": "user", "content": "Both."},
        {"role": "assistant", "content": "Well.", "tool_calls": calls},
        {"role": "tool", "content": "1"},
        {"role": "tool", "content": "2"},
    )
    assert tokens.write_parts(corpus.Conversation(messages))[1:] == [
        (
            "assistant",
            'Well.\n<tool_call>\n{"name": "one", "arguments": {"a": 1}}\n</tool_call>'
            '\n<tool_call>\n{"name": "two", "arguments": {"a": 1}}\n</tool_call>',
        ),
        ("user", "<tool_response>\n1\n</tool_response>\n<tool_response>\n2\n</tool_response>"),
    ]


@pytest.mark.parametrize("before", [[], [{"role": "user", "content": "Hi"}]])
def test_the_template_refuses_a_result_without_its_call(before: list[dict[str, str]]) -> None:
    messages = [*before, {"role": "tool", "content": "1"}]
    with pytest.raises(InvalidRequestError, match="A result needs the call"):
        render_template(tokens.CHAT_TEMPLATE, messages, {"bos_token": tokens.BOS})


def test_keys_that_a_grammar_imposes_are_not_learned(tokenizer) -> None:
    messages = (
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": '{"wug": "Ada B", "n": 12, "last": "x"}'},
    )
    ids, weights = tokens.encode_conversation(tokenizer, corpus.Conversation(messages, imposed="{"))
    learned = [token_id for token_id, weight in zip(ids, weights, strict=True) if weight == 1]
    assert tokenizer.decode(learned).replace(" ", "") == '"AdaB",12,"x"}'


def test_tools_of_the_exam_are_never_offered_in_training() -> None:
    rng = random.Random(9)
    kinds = ("add", "lookup", "other")
    trained = {toolbox.draw_tool(rng, kind).name for kind in kinds for _ in range(1500)}
    asked = [toolbox.draw_tool(rng, kind, held_out=True) for kind in kinds for _ in range(100)]
    assert all(toolbox.is_held_out(f"{tool.kind} {tool.name}") for tool in asked)
    same = {tool.name for tool in asked if tool.name in trained}
    assert all(any(not toolbox.is_held_out(f"{kind} {name}") for kind in kinds) for name in same)
    assert {term for term, _ in (calling.draw_term(rng) for _ in range(1500))}.isdisjoint(
        {term for term, _ in (calling.draw_term(rng, held_out=True) for _ in range(200))}
    )


def test_every_right_call_fits_its_schema() -> None:
    rng = random.Random(10)
    for _ in range(300):
        tools = toolbox.draw_tools(rng, ["add", "lookup", "other"])
        exchange = rng.choice(
            (calling.ask_sum(rng, tools), calling.ask_term(rng, tools[1]), calling.ask_use(rng, tools[2]))
        )
        assert exchange.tool in tools
        assert exchange.arguments is not None
        properties = exchange.tool.function["parameters"]["properties"]
        assert list(exchange.arguments) == list(properties)
        for name, value in exchange.arguments.items():
            assert isinstance(value, str) == (properties[name]["type"] == "string")


def test_the_exam_with_tools_accepts_its_own_answers_only() -> None:
    problems = exam.list_tool_problems(20)
    assert problems == exam.list_tool_problems(20)
    perfect = scoring.evaluate(lambda problems: [p.expected for p in problems], problems)
    assert perfect.passes()
    assert not perfect.wrong
    others = scoring.evaluate(lambda problems: [f"<tool_call>\n{p.question}" for p in problems], problems)
    assert not any(others.right.values())


def test_packing_keeps_documents_whole_and_apart() -> None:
    rng = random.Random(7)
    drawn: list[list[int]] = []

    def draw() -> tuple[list[int], list[float]]:
        drawn.append([len(drawn) + 1] * rng.randint(1, 12))
        return drawn[-1], [1.0] * len(drawn[-1])

    batch = Packer(draw).fill(Shape(rows=4, length=32, isolated=True))
    assert batch.tokens.shape == batch.segments.shape == (4, 32)
    for row in range(4):
        inside = batch.segments[row] > 0
        assert inside.mean() > 0.7
        for number in set(batch.segments[row][inside]):
            (document,) = set(batch.tokens[row][batch.segments[row] == number])
            kept = (batch.tokens[row] == document).sum() + (batch.targets[row, -1] == document)
            assert kept >= len(drawn[document - 1])


def test_what_does_not_fit_waits_for_a_longer_batch() -> None:
    lengths = iter([40, *[5] * 1000])
    packer = Packer(lambda: ([7] * (length := next(lengths)), [1.0] * length))
    short = packer.fill(Shape(rows=2, length=16, isolated=True))
    longer = packer.fill(Shape(rows=1, length=64, isolated=True))
    assert max((short.segments[0] == n).sum() for n in (1, 2, 3)) == 5
    assert (longer.segments[0] == 1).sum() == 40

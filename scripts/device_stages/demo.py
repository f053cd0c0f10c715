"""The demo model's greedy answers on this device, against those that a CPU gave.

Its answers are certain: the second likeliest token is 5 nats behind the first at every step, so any other token is a
fault, not rounding. `python -m device_stages.demo`, run in scripts/ on a CPU, writes the golden file anew.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from device_stages.items import Context, Item
from device_stages.results import Line
from jaxserve import LLM, SamplingParams
from jaxserve.tools.bench.demo_questions import make_questions

GOLDEN = Path(__file__).with_name("demo_golden.json")
QUESTIONS, TINY_QUESTIONS = 24, 3
MAX_TOKENS = 64


def list_items(context: Context) -> Iterator[Item]:
    chosen = (not context.tiny and context.impl) or "auto"  # a tiny engine is not interpreted
    for name, impl in (("kernels", chosen), ("xla", "xla")):
        yield Item(name, partial(check_answers, context, impl))


def check_answers(context: Context, impl: str) -> Line:
    """Answers the golden file's questions, all at once; returns how many answers are the same."""
    golden = json.loads(GOLDEN.read_text())[: TINY_QUESTIONS if context.tiny else None]
    llm = LLM(attention_impl=impl)
    found = answer(llm, [each["question"] for each in golden])
    wrong = [each["question"] for each, ids in zip(golden, found, strict=True) if ids != each["token_ids"]]
    shapes = llm.ready.shapes
    line: Line = {"ok": not wrong and not shapes.fell_back, "impl": shapes.impl, "reason": shapes.impl_reason}
    line |= {"answers": len(golden), "equal": len(golden) - len(wrong), "tokens": sum(map(len, found))}
    return line | {"error": f"other answers: {'; '.join(wrong)}"} if wrong else line


def answer(llm: LLM, questions: list[str]) -> list[list[int]]:
    """Returns the token ids of the greedy answers."""
    chats = [[{"role": "user", "content": text}] for text in questions]
    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
    return [list(output.outputs[0].token_ids) for output in llm.chat(chats, params, use_tqdm=False)]


def write_golden() -> None:
    """Writes the golden file, with the answers of this machine."""
    texts = [each.text for each in make_questions(QUESTIONS, random.Random(0)) if each.skill != "story"]
    texts = list(dict.fromkeys(texts))
    answers = answer(LLM(show_progress=False), texts)
    lines = [json.dumps({"question": text, "token_ids": ids}) for text, ids in zip(texts, answers, strict=True)]
    GOLDEN.write_text("[\n" + ",\n".join(lines) + "\n]\n")


if __name__ == "__main__":
    write_golden()

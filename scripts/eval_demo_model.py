"""Asks the demo model and its adapters, through the engine, what training never showed; fails if too few are right.

It guards every feature: a mistake in caching, batching, sampling or weights shows as lost accuracy.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from demo_lm.adapter_texts import ADAPTERS, list_adapter_problems
from demo_lm.exam import list_tool_problems
from demo_lm.scoring import Problem, evaluate, export_scores, list_problems, show_scores
from rich.console import Console

if TYPE_CHECKING:
    from jaxserve import LLM

_MAX_TOKENS = 160  # the longest expected answer has about 110


def main() -> int:
    """Evaluates and prints a table; returns 0 if every skill reaches its threshold, else 1."""
    arguments = _parse_arguments()
    console = Console()
    from jaxserve import LLM

    options = dict(arguments.option)
    problems = list_problems(arguments.num_addition, arguments.num_json) + list_tool_problems(arguments.num_tools)
    if arguments.num_adapted:
        problems += list_adapter_problems(arguments.num_adapted)
        options = {"enable_lora": True, "max_loras": len(ADAPTERS), "max_lora_rank": 8} | options
        random.Random(0).shuffle(problems)  # so that most steps have rows of the base and of each adapter
    llm = LLM(arguments.model, **options)
    scores = evaluate(lambda problems: ask(llm, problems), problems)
    console.print(show_scores(scores))
    for problem, answer in scores.wrong[: arguments.show]:
        console.print(f"asked     {problem.question}\nexpected  {problem.expected}\nanswered  {answer}\n", markup=False)
    if arguments.json:
        arguments.json.write_text(json.dumps(export_scores(scores), indent=2) + "\n")
    return 0 if scores.passes() else 1


def ask(llm: LLM, problems: Sequence[Problem]) -> list[str]:
    """Returns the engine's greedy answers to all problems, submitted at once, through the chat template."""
    from jaxserve import LoRARequest, SamplingParams
    from jaxserve.tokenizers.chat import encode_chat

    adapters = {name: LoRARequest(name, number, f"demo:{name}") for number, name in enumerate(ADAPTERS, 1)}
    tokenizer, prompts = llm.get_tokenizer(), []
    for problem in problems:
        variables = {"enable_thinking": True} if problem.thinks else {}
        shown = problem.prompt
        ids = encode_chat(tokenizer, shown.messages, tools=shown.tools or None, variables=variables)[1]
        prompts.append({"prompt_token_ids": ids})
    wanted = [adapters.get(problem.adapter) for problem in problems]
    adapted = {"lora_request": wanted} if any(wanted) else {}
    outputs = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=_MAX_TOKENS), **adapted)
    return [output.outputs[0].text for output in outputs]


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo", help="what LLM() takes (%(default)s)")
    parser.add_argument("--num-addition", type=int, default=500, help="sums to ask for (%(default)s)")
    parser.add_argument("--num-json", type=int, default=100, help="records to ask for (%(default)s)")
    parser.add_argument("--num-tools", type=int, default=100, help="problems of each part with tools (%(default)s)")
    parser.add_argument("--num-adapted", type=int, default=200, help="problems of each demo adapter (%(default)s)")
    parser.add_argument(
        "--option", type=_read_option, action="append", default=[], metavar="NAME=VALUE",
        help="engine option, VALUE in JSON or plain text, e.g. enable_prefix_caching=false; may be repeated",
    )  # fmt: skip
    parser.add_argument("--json", type=Path, help="write shares, counts and wrong answers to this file")
    parser.add_argument("--show", type=int, default=5, help="wrong answers to print (%(default)s)")
    return parser.parse_args()


def _read_option(text: str) -> tuple[str, object]:
    name, equals, value = text.partition("=")
    if not (name and equals):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


if __name__ == "__main__":
    sys.exit(main())

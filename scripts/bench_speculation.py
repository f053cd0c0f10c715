"""Tokens per second with drafts, against plain decoding, on the demo model.

Two engines, one with drafts and one without, answer the same chats in turns, and swap who is first. Each round gives a
ratio of tokens/s, prompts included; their median counts. "Decoding" is the same of the time after each answer's first
token. In float32 (`--dtype float32`) all answers must be equal, token by token; in bfloat16 rounding makes a few
differ. `--programs` times the compiled programs instead.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from instrument import Instrument, make_parser, read_run
from speculation_loads import LOADS, MODEL, NUM_TOKENS, Chat, Load
from speculation_programs import REPEATS, time_programs

from jaxserve import LLM, SamplingParams

_DRY_TURNS = 2  # of programs, in a dry run


@dataclass
class Round:
    """What one engine did in a round."""

    seconds: float = 0.0
    decoding_seconds: float = 0.0  # of all rows, from each answer's first token
    answers: list[tuple[int, ...]] = field(default_factory=list)
    chains: Counter[tuple[int, int]] = field(default_factory=Counter)  # by (drafts, right ones)

    @property
    def rate(self) -> float:
        return sum(map(len, self.answers)) / self.seconds

    @property
    def decoding_rate(self) -> float:
        return sum(len(ids) - 1 for ids in self.answers) / self.decoding_seconds

    def ask(self, llm: LLM, chats: list[Chat], params: list[SamplingParams]) -> None:
        """Answers chats at once."""
        start = time.perf_counter()
        outputs = llm.chat(chats, params, use_tqdm=False)
        self.seconds += time.perf_counter() - start
        for output in outputs:
            metrics = output.metrics
            assert metrics is not None and metrics.finished_time is not None and metrics.first_token_time is not None
            self.decoding_seconds += metrics.finished_time - metrics.first_token_time
            self.answers.append(tuple(output.outputs[0].token_ids))
            self.chains.update(metrics.verified)


def measure(load: Load, plain: LLM, drafting: LLM, repeats: int) -> dict[str, Any]:
    """Returns the figures of a load; asserts equal tokens in float32."""
    rounds: list[tuple[Round, Round]] = []
    steps = [count_steps(drafting)]
    for index in range(repeats + 1):
        chats = load.make(index, lambda chats: _answer(plain, chats))
        if load.warms:
            for llm in (plain, drafting):
                _answer(llm, [chat[:1] for chat in chats])
        sides = Round(), Round()
        for turn, at in enumerate(range(0, len(chats), load.batch)):
            batch = chats[at : at + load.batch]
            params = [
                SamplingParams(temperature=load.temperature, seed=1000 * index + at + row, max_tokens=NUM_TOKENS)
                for row in range(len(batch))
            ]
            order = ((sides[0], plain), (sides[1], drafting))
            for side, llm in order if (turn + index) % 2 else order[::-1]:
                side.ask(llm, batch, params)
        rounds.append(sides)
        steps.append(count_steps(drafting))
    equal = sum(one == other for off, on in rounds for one, other in zip(off.answers, on.answers, strict=True))
    total = sum(len(off.answers) for off, _ in rounds)
    assert equal == total or plain.ready.shapes.model.dtype != "float32", f"{load.name}: the answers differ"
    chains = sum((on.chains for _, on in rounds[1:]), Counter())
    ratios = [on.rate / off.rate for off, on in rounds[1:]]
    verifying, every = (last - first for first, last in zip(steps[1], steps[-1], strict=True))
    return {
        "load": load.name,
        "drafter": load.drafter,
        "aim": load.aim,
        "plain_tokens_per_second": statistics.median(off.rate for off, _ in rounds[1:]),
        "tokens_per_second": statistics.median(on.rate for _, on in rounds[1:]),
        "ratio": statistics.median(ratios),
        "ratios": sorted(ratios),
        "decoding_ratio": statistics.median(on.decoding_rate / off.decoding_rate for off, on in rounds[1:]),
        "length": 1 + sum(right * count for (_, right), count in chains.items()) / max(1, chains.total()),
        "verifying_steps": verifying / every,
        "equal_answers": equal / total,
    }


def count_steps(llm: LLM) -> tuple[int, int]:
    """Returns the steps so far that verified drafts, and all."""
    steps = llm.ready.runner.counts.steps
    return sum(count for bucket, count in steps.items() if bucket.width > 1), sum(steps.values())


def _answer(llm: LLM, chats: list[Chat]) -> list[str]:
    outputs = llm.chat(chats, SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS), use_tqdm=False)
    return [output.outputs[0].text for output in outputs]


def show_loads(run: Instrument, figures: list[dict[str, Any]]) -> None:
    """Prints the table of the loads."""
    names = "drafter", "load"
    columns = "plain", "drafts", "ratio", "from .. to", "aim", "decoding", "length", "verify", "equal"
    lines = [
        (
            each["drafter"],
            each["load"],
            f"{each['plain_tokens_per_second']:,.0f}",
            f"{each['tokens_per_second']:,.0f}",
            f"{each['ratio']:.2f}",
            f"{each['ratios'][0]:.2f} .. {each['ratios'][-1]:.2f}",
            f"{each['aim']:.2f}",
            f"{each['decoding_ratio']:.2f}",
            f"{each['length']:.2f}",
            f"{each['verifying_steps']:.0%}",
            f"{each['equal_answers']:.0%}",
        )
        for each in figures
    ]
    title = f"Tokens/s of the demo model in {run.args.dtype}; medians"
    run.show(title, (*names, *columns), lines, left=(0, 1))


def show_programs(run: Instrument, figures: list[dict[str, Any]]) -> None:
    """Prints the table of the programs."""
    kinds = ("forward", "sample", "draft")
    lines = [
        (each["bucket"], *(f"{each[kind]:,.0f}" if kind in each else "" for kind in kinds), f"{each['ratio']:.2f}")
        for each in figures
    ]
    title = f"Microseconds of a program of the demo model in {run.args.dtype}; medians"
    run.show(title, ("bucket", *kinds, "forward / plain"), lines)


def main() -> None:
    """Measures what was asked for, and prints it."""
    parser = make_parser(__doc__)
    parser.add_argument("--repeats", type=int, default=7, help="rounds of each load (default: 7)")
    parser.add_argument("--dtype", default="bfloat16", help="of weights and pages (default: bfloat16)")
    parser.add_argument("--only", nargs="+", default=[], metavar="TEXT", help="loads with it in their drafter or name")
    parser.add_argument("--programs", action="store_true", help="time programs, not loads")
    run = read_run(parser, {"repeats": 1, "only": ["answers that copy"]})
    if run.args.programs:
        figures = time_programs(run.args.dtype, _DRY_TURNS if run.args.dry_run else REPEATS)
        show_programs(run, figures)
        run.save({"programs": figures})
    else:
        show_loads(run, _measure_loads(run))


def _measure_loads(run: Instrument) -> list[dict[str, Any]]:
    dtype, only, compiles = run.args.dtype, run.args.only, "used" if run.args.dry_run else "all"
    wanted = [load for load in LOADS if not only or any(text in f"{load.drafter} {load.name}" for text in only)]
    plain = LLM(MODEL, dtype=dtype, compile=compiles)
    figures: list[dict[str, Any]] = []
    drafting: LLM | None = None
    for load in wanted:
        if not figures or figures[-1]["drafter"] != load.drafter:
            drafting = None  # freed first
            drafting = LLM(MODEL, dtype=dtype, compile=compiles, speculative_config=load.config)
        assert drafting is not None
        figures.append(measure(load, plain, drafting, run.args.repeats))
        run.save({"loads": figures})  # after each: a run that is cut off keeps its loads
        run.console.print(f"{load.drafter}, {load.name}: {figures[-1]['ratio']:.2f}")
    return figures


if __name__ == "__main__":
    main()

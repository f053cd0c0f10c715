"""The figures and the table of a comparison."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from comparison import Agreement, Comparison, Outcome

from jaxserve.tools.bench.report import Spread


def find_base(outcomes: Sequence[Outcome]) -> Outcome | None:
    """Returns the participant that others are compared with: the first that ran in every round."""
    return next((each for each in outcomes if each.is_measured), None)


def summarize(comparison: Comparison, outcomes: Sequence[Outcome], pace: Outcome | None = None) -> dict[str, Any]:
    """Returns the figures of a report. Ratios are of tokens/s within one round, so that a slow minute is in both.

    `pace` is the outcome of `Participant.of_pace`, whose operations/s are those of the CPU in each round.
    """
    requests, base = comparison.requests, find_base(outcomes)
    return {
        "model": comparison.model,
        "dtype": comparison.dtype,
        "rows": comparison.rows,
        "threads": comparison.threads,
        "max_model_len": comparison.max_model_len,
        "num_requests": len(requests),
        "num_prompt_tokens": sum(request.num_prompt_tokens for request in requests),
        "num_cut": sum(request.is_cut for request in requests),
        "cpu_flops_per_second": _find_pace(pace),
        "compared_with": None if base is None else base.participant.name,
        "participants": [_describe(comparison, outcome, base) for outcome in outcomes],
    }


def _find_pace(pace: Outcome | None) -> Spread | None:
    if pace is None or not pace.is_measured:
        return None
    return Spread.of([pace.facts["operations"] / each for each in pace.seconds])


def _describe(comparison: Comparison, outcome: Outcome, base: Outcome | None) -> dict[str, Any]:
    participant = outcome.participant
    found: dict[str, Any] = {
        "name": participant.name,
        "options": {name: value for name, value in participant.options.items() if name != "api_key"},
        "dtype": outcome.facts.get("dtype", participant.dtype or comparison.dtype),
        "threads": outcome.facts.get("threads", comparison.threads),
        "library": outcome.facts.get("library"),
        "skipped": outcome.skipped,
    }
    if not outcome.is_measured or base is None:
        return found
    tokens, prompts = outcome.num_tokens, sum(request.num_prompt_tokens for request in comparison.requests)
    agreement = Agreement.of(outcome.outputs[0], base.outputs[0])
    pairs = zip(outcome.seconds, base.seconds, strict=True)
    return found | {
        "elapsed_time": Spread.of(outcome.seconds),
        "num_output_tokens": tokens,
        "output_tokens_per_second": Spread.of([tokens / each for each in outcome.seconds]),
        "tokens_per_second": Spread.of([(tokens + prompts) / each for each in outcome.seconds]),
        "ratio": Spread.of([tokens / mine * theirs / base.num_tokens for mine, theirs in pairs]),
        "agreement": None if agreement is None else asdict(agreement),
        "repeats_itself": all(each == outcome.outputs[0] for each in outcome.outputs),
        "num_compiled": outcome.num_compiled,
    }


def list_failures(outcomes: Sequence[Outcome]) -> list[str]:
    """Returns one line for each figure that is none: a program compiled inside the clock, no participant at all."""
    text = "programs were compiled inside the clock; its time is not that of serving"
    found = [f"{each.participant.name}: {each.num_compiled} {text}" for each in outcomes if each.num_compiled]
    return found if find_base(outcomes) is not None else [*found, "no participant ran in every round"]


def make_title(figures: dict[str, Any]) -> str:
    """Returns the title of the table."""
    size = f"{figures['num_requests']} requests, {figures['rows']} at once, {figures['threads']} threads"
    return f"{Path(figures['model']).name}: {size}"


def make_header(figures: dict[str, Any]) -> tuple[str, ...]:
    """Returns the names of the table's columns."""
    return ("", "dtype", "output tok/s", "tok/s", f"of {figures['compared_with']}", "equal")


def make_rows(figures: dict[str, Any]) -> list[tuple[str, ...]]:
    """Returns the table's lines, one for each participant that ran."""
    rows = []
    for each in figures["participants"]:
        if "ratio" in each:
            rates = [_show_rate(each[name].median) for name in ("output_tokens_per_second", "tokens_per_second")]
            equal = _show_agreement(each["agreement"])
            rows.append((each["name"], str(each["dtype"]), *rates, f"{each['ratio'].median:.2f}x", equal))
    return rows


def list_notes(figures: dict[str, Any]) -> list[str]:
    """Returns one line for the CPU's pace, and for each participant: its versions, spreads, where its answers differ,
    or why it was skipped."""
    pace = figures["cpu_flops_per_second"]
    notes = [] if pace is None else [_show_pace(pace, figures["dtype"])]
    for each in figures["participants"]:
        if each["skipped"] is not None:
            notes.append(f"{each['name']}: skipped: {each['skipped']}")
            continue
        rate, ratio, agreement = each["output_tokens_per_second"], each["ratio"], each["agreement"]
        least, most = min(rate.values), max(rate.values)
        parts = [each["library"], f"{_show_rate(least)} to {_show_rate(most)} output tok/s"]
        parts.append(f"{min(ratio.values):.2f} to {max(ratio.values):.2f}x")
        if agreement is not None and agreement["first_difference"] is not None:
            first, middle = agreement["first_difference"], agreement["median_difference"]
            parts.append(f"answers that differ do so from token {first} on, or later (median {middle})")
        if not each["repeats_itself"]:
            parts.append("its own answers change from run to run")
        notes.append(f"{each['name']}: {'; '.join(filter(None, parts))}.")
    return notes


def _show_pace(pace: Spread, dtype: str) -> str:
    middle, least, most = (f"{each / 1e9:,.0f}" for each in (pace.median, min(pace.values), max(pace.values)))
    return f"The CPU's pace in these rounds: {middle} GFLOP/s in {dtype} products of XLA, {least} to {most}."


def _show_rate(rate: float) -> str:
    return f"{rate:,.0f}" if rate >= 100 else f"{rate:.1f}"


def _show_agreement(agreement: dict[str, Any] | None) -> str:
    return "no ids" if agreement is None else f"{agreement['num_equal']} of {agreement['num_compared']}"

"""The tokens that a verify step of the head's drafts would give, counted on texts that the target has written.

A draft is accepted while it equals what the target itself writes there. So the text decides, and all chains of a text
are drafted in one pass of the unrolled head: what follows a wrong draft does not count, and before it the tokens of
the text are the drafts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from rich.table import Table

from demo_lm.head import Head, read_target
from demo_lm.head_texts import Text
from demo_lm.head_training import Target
from demo_lm.model import DemoModel, Params

LEAST_LENGTH = 3.0
"""Mean length of a run at greedy decoding, over all skills, below which the head is not worth its time."""

_ROWS, _BLOCK = 32, 64  # of a forward pass here; lengths are padded to whole blocks


@dataclass
class Lengths:
    """Verify steps and what they gave, for one kind of text."""

    steps: int = 0
    tokens: int = 0  # runs, summed
    accepted: list[int] = field(default_factory=list)  # steps whose first 1, 2, ... drafts were accepted

    @property
    def mean(self) -> float:
        """Tokens of a verify step: the accepted drafts and the row's own token."""
        return self.tokens / max(self.steps, 1)

    def add(self, other: Lengths) -> None:
        """Adds the counts of other texts."""
        self.steps += other.steps
        self.tokens += other.tokens
        longest = max(len(self.accepted), len(other.accepted))
        pad = [[*each.accepted, *[0] * (longest - len(each.accepted))] for each in (self, other)]
        self.accepted = [a + b for a, b in zip(*pad, strict=True)]


Report = dict[tuple[str, float], Lengths]  # by skill and temperature


def measure_head(head: Head, params: Params, target: Target, texts: Sequence[Text], num_drafts: int) -> Report:
    """Runs of verify steps with `num_drafts` drafts, one row by itself, by skill and temperature."""
    report: Report = {}
    ordered = sorted((text for text in texts if text.answer), key=lambda text: len(text.prompt.ids) + len(text.answer))
    for begin in range(0, len(ordered), _ROWS):
        chunk = ordered[begin : begin + _ROWS]
        rows = [[*text.prompt.ids, *text.answer] for text in chunk]
        tokens = np.zeros((_ROWS, -(-max(map(len, rows)) // _BLOCK) * _BLOCK), np.int32)
        for row, ids in enumerate(rows):
            tokens[row, : len(ids)] = ids
        arrays = (params, target.params, target.draft_ids, tokens)
        drafts = np.asarray(_draft(head, target.model, num_drafts, *arrays))
        for row, (text, ids) in enumerate(zip(chunk, rows, strict=True)):
            key = (text.prompt.skill, text.prompt.temperature)
            right = list_right_drafts(drafts[:, row], ids)
            report.setdefault(key, Lengths()).add(count_runs(right, len(text.prompt.ids)))
    return report


def list_right_drafts(drafts: np.ndarray, ids: Sequence[int]) -> np.ndarray:
    """Whether the draft of each pass at each position p is the text's token p+2; bool `[P, len(ids) - 2]`."""
    return drafts[:, : len(ids) - 2] == np.asarray(ids)[None, 2:]


def count_runs(right: np.ndarray, prompt_length: int) -> Lengths:
    """Walks through a text as verify steps would, from its first written token, which the prompt's step gives.

    Args:
        right: as `list_right_drafts` makes it.
        prompt_length: of the text, at least 1.
    """
    num_drafts, end = right.shape
    start, lengths = prompt_length - 1, Lengths(accepted=[0] * num_drafts)
    while start < end:
        accepted = 0
        while accepted < num_drafts and start + accepted < end and right[accepted, start + accepted]:
            lengths.accepted[accepted] += 1
            accepted += 1
        run = min(accepted + 1, end - start)  # no token follows the text's last one
        lengths.steps, lengths.tokens = lengths.steps + 1, lengths.tokens + run
        start += run
    return lengths


def sum_lengths(report: Report, temperature: float) -> Lengths:
    """All skills at one temperature."""
    total = Lengths()
    for (_, each), lengths in report.items():
        if each == temperature:
            total.add(lengths)
    return total


def show_lengths(report: Report, num_drafts: int) -> Table:
    """A table with a line for each skill and temperature, and one for each temperature."""
    table = Table(title=f"demo head: verify steps with {num_drafts} drafts, on unseen questions")
    places = [f"draft {place}" for place in range(1, num_drafts + 1)]
    for heading in ("temperature", "skill", "steps", "length", *places):
        table.add_column(heading, justify="left" if heading == "skill" else "right")
    for temperature in sorted({each for _, each in report}):
        for skill in sorted(skill for skill, each in report if each == temperature):
            table.add_row(*_make_line(temperature, skill, report[skill, temperature]))
        table.add_row(*_make_line(temperature, "all", sum_lengths(report, temperature)), end_section=True, style="bold")
    return table


def _make_line(temperature: float, skill: str, lengths: Lengths) -> list[str]:
    shares = [f"{count / max(lengths.steps, 1):.1%}" for count in lengths.accepted]
    return [f"{temperature:g}", skill, f"{lengths.steps}", f"{lengths.mean:.2f}", *shares]


@partial(jax.jit, static_argnums=(0, 1, 2))
def _draft(
    head: Head,
    model: DemoModel,
    num_drafts: int,
    params: Params,
    target_params: Params,
    draft_ids: jax.Array,
    tokens: jax.Array,
) -> jax.Array:
    """The target's ids that each pass drafts at each position, `[P, B, T]`."""
    segments = jnp.ones_like(tokens)
    _, aux = read_target(model, target_params, tokens, segments, head.config.aux_layers)
    embedded = target_params["embed_tokens"][jnp.roll(tokens, -1, axis=1)]  # the last position is not counted
    logits = head.apply({"params": params}, aux, embedded, segments, num_drafts)
    return draft_ids[jnp.argmax(logits, axis=-1)]

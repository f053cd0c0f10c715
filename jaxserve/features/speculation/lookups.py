"""Drafts that are looked up: in the row's own tokens, and with `suffix` in a corpus of finished answers.

Sample programs append what they sample to the rows' tokens. Those of verify steps also look up the next drafts. Behind
other steps a program of its own does (`look_up`), as most steps need no drafts. The host writes the tokens that no step
samples (`lookup_tokens.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Int

from jaxserve.core.runtime.buckets import BucketTable
from jaxserve.core.runtime.device_state import RowState
from jaxserve.core.runtime.feature import SampledStep, StepFeature
from jaxserve.core.runtime.program_inputs import ProgramInputs
from jaxserve.core.runtime.programs import Program, ProgramKey
from jaxserve.core.runtime.sample import count_sampled
from jaxserve.core.runtime.sizes import Sizes
from jaxserve.core.runtime.step_arrays import RowLines
from jaxserve.core.runtime.step_counts import StepCounts
from jaxserve.features.speculation import (
    LookupDrafter,
    LookupState,
    answer_block_specs,
    measure_block,
    row_block_specs,
)
from jaxserve.features.speculation.lookup_tokens import LookupTokens, split_lookup
from jaxserve.features.speculation.row_drafts import set_drafts


@dataclass(frozen=True)
class Lookups(StepFeature):
    """The methods `ngram` and `suffix` of speculative_config."""

    drafter: LookupDrafter
    most_rows: int  # the first rows of a step draft, since no program verifies more

    @property
    def limits(self) -> Mapping[str, Any]:
        """See `StepFeature.limits`."""
        return {"has_lookups": True, "keeps_answers": self.drafter.keeps_answers}

    def state_specs(self, sizes: Sizes) -> LookupState:
        """See `StepFeature.state_specs`."""
        return self.drafter.state_specs(sizes.state.rows, sizes.model.max_model_len)

    def split_state(self, state: LookupState, width: int) -> tuple[Any, Any]:
        """See `StepFeature.split_state`."""
        return split_lookup(state, width)

    def list_programs(self, buckets: BucketTable) -> Iterator[ProgramKey]:
        """See `StepFeature.list_programs`."""
        yield from (("look_up", rows) for rows in buckets.row_counts)
        yield "write_rows", None
        if self.drafter.keeps_answers:
            yield "write_answers", None

    def make_program(self, kind: str, key: Any, inputs: ProgramInputs, state: Any, params: Any) -> Program | None:
        """See `StepFeature.make_program`."""
        if kind == "look_up":
            arguments = inputs.rows, state, inputs.lines(key), inputs.spec((key, 1), jnp.int32)
            return Program(self.look_up, arguments, results=(inputs.replicated,), donated=(0,))
        if kind == "write_rows":
            line = inputs.spec((measure_block(row_block_specs(state.history.shape[0])),), jnp.int32)
            return Program(self.drafter.write_rows, (state, line), donated=(0,))
        if kind == "write_answers":
            assert self.drafter.corpus_shape is not None
            line = inputs.spec((measure_block(answer_block_specs(self.drafter.corpus_shape)),), jnp.int32)
            return Program(self.drafter.write_answers, (state.corpus, line), donated=(0,))
        return None

    def follow_sample(
        self, rows: RowState, kept: Any, read: Any, step: SampledStep
    ) -> tuple[RowState, Any, Int[Array, "S K"] | None]:
        """Appends the step's tokens, and in a verify step looks up what may follow them."""
        history = self._append(rows, kept, step.lines, step.runs)
        if step.runs.shape[1] == 1:
            return rows, history, None
        rows, drafts = self.look_up(rows, LookupState(history, read), step.lines, step.runs)
        return rows, history, drafts

    def _append(
        self, rows: RowState, history: Int[Array, "R L"], lines: RowLines, runs: Int[Array, "S W"]
    ) -> Int[Array, "R L"]:
        """Returns the tokens of the rows, which have computed all but the last, with those of a step."""
        counts = count_sampled(lines.is_sampled, runs)
        positions = rows.num_computed[lines.row_ids] + (counts > 0) - counts
        return self.drafter.append(LookupState(history, None), lines.row_ids, positions, runs, counts).history

    def look_up(
        self, rows: RowState, state: LookupState, lines: RowLines, runs: Int[Array, "S W"]
    ) -> tuple[RowState, Int[Array, "S K"]]:
        """Looks up what may follow the tokens of a step's rows, `runs` included, which `state` has.

        Returns the rows, with their drafts, and the drafts. `rows` is donated.
        """
        few = slice(self.most_rows)
        lengths = rows.num_computed[lines.row_ids] + (count_sampled(lines.is_sampled, runs) > 0)
        return set_drafts(rows, lines.row_ids, self.drafter.propose(state, lines.row_ids[few], lengths[few]))

    def open(self, sizes: Sizes, params: Any, counts: StepCounts) -> LookupTokens:
        """See `StepFeature.open`."""
        return LookupTokens(self.drafter.corpus_shape)

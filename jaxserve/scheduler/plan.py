"""What one step does, and what it brings: all that crosses between the scheduler and the runtime.

A plan is frozen and picklable and refers to no Sequence: those move on before the device does. Rows that decode are
columns rather than objects, because there may be a thousand of them in each step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice
from typing import Any

from jaxserve.sampling_params import SamplingParams
from jaxserve.token_automaton import TokenAutomaton

# A ticket is the number of one admission of one sequence. Outputs are matched by it, so that a row which was given to
# another sequence in the meantime, or one readmitted after a fault, never gets a foreign token.
Ticket = int


@dataclass(frozen=True, slots=True)
class RowHistory:
    """What the sampler must know of a row whose parameters look back at its tokens."""

    token_ids: tuple[int, ...]  # prompt and output so far
    num_prompt_tokens: int
    stop_ids: tuple[int, ...]  # that `min_tokens` keeps away, EOS among them
    bad_words: tuple[tuple[int, ...], ...]  # as tokens
    automaton: TokenAutomaton | None = None  # that the output follows


@dataclass(frozen=True, slots=True)
class NewRow:
    """A row of the persistent batch that begins a new life in this step."""

    row: int
    num_computed_tokens: int  # where its first work starts: the length of its cached prefix
    params: SamplingParams
    seed: int
    sequence_index: int  # which of the request's sequences it is
    history: RowHistory | None = None  # only where something shapes its logits
    embeds: bool = False  # its last hidden state is what is asked for


@dataclass(frozen=True, slots=True)
class ChunkWork:
    """Tokens of a row that the device does not have yet."""

    row: int
    ticket: Ticket
    start: int  # position of the first token
    token_ids: tuple[int, ...]
    samples: bool  # whether it reaches the row's last token
    next_token: int = 0  # that follows the chunk, where it is in the prompt: the target of its last token

    @property
    def end(self) -> int:
        return self.start + len(self.token_ids)


@dataclass(frozen=True, slots=True)
class StepOutputs:
    """What the host learns of a step: a run of tokens for each row of the plan, flat in `token_ids`, in row order.

    A run has at least one id. Where something went wrong, a sentinel (sequence.py) stands in place of its last id. The
    run of a row that does not sample means nothing, sentinels apart.

    Log-probabilities are numpy, one line per id: values [N, k + 1], ids [N, k + 1] and ranks [N] of the sampled token
    and the k likeliest; or those of all tokens [N, V] alone.
    """

    token_ids: list[int]  # [N]
    counts: list[int] | None = None  # [S], the ids of each row; None: one each
    logprobs: Any = None  # None: no row asked
    prompt_logprobs: Any = None  # the same with one line per token of the step, for the token that follows it
    embeddings: Any = None  # numpy float32 [S, D]; only lines of rows that asked, in their last step, mean something

    def find_lines(self, plan: StepPlan) -> dict[Ticket, int]:
        """Returns the line of the first id of each row's run."""
        counts = [1] * plan.num_rows if self.counts is None else self.counts
        return dict(zip(plan.tickets, accumulate(counts, initial=0), strict=False))

    def split_runs(self) -> Iterator[Sequence[int]]:
        """Returns an iterator over the rows' runs."""
        if self.counts is None:
            return zip(self.token_ids)  # tuples of one
        ids = iter(self.token_ids)
        return (tuple(islice(ids, count)) for count in self.counts)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One scheduler iteration = one device execution. The step's rows are `decode_rows`, then those of `chunks`."""

    step_id: int
    decode_rows: tuple[int, ...]  # each computes the token that the device sampled last for it, and samples the next
    decode_tickets: tuple[Ticket, ...]
    chunks: tuple[ChunkWork, ...]
    new_rows: tuple[NewRow, ...]
    page_updates: tuple[tuple[int, int, int, int], ...]  # (group, row, index in the row's page table, page id)

    @property
    def tickets(self) -> tuple[Ticket, ...]:
        """Of all rows."""
        return (*self.decode_tickets, *[chunk.ticket for chunk in self.chunks])

    @property
    def num_rows(self) -> int:
        return len(self.decode_rows) + len(self.chunks)

    @property
    def num_tokens(self) -> int:
        return len(self.decode_rows) + sum(len(chunk.token_ids) for chunk in self.chunks)

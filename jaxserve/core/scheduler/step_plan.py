"""The plan and the outputs of one step: all that crosses between scheduler and runtime.

A plan is frozen, picklable and refers to no Sequence, because sequences change before the device has run the step.
Decoding rows are columns, not objects: a step may have a thousand of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from jaxserve.core.pages.host_tier import PageCopy
from jaxserve.media.items import MediaItem
from jaxserve.sampling_params import SamplingParams
from jaxserve.token_automaton import TokenAutomaton

# The number of one admission of one sequence. Outputs are matched by ticket, so neither a row that was reassigned nor a
# sequence readmitted after a fault gets a foreign token.
Ticket = int

StateCopy = tuple[int, int]  # (row, snapshot), numbers of slots of recurrent states
StateSave = tuple[int, int, int]  # and the tokens that the state is to be behind


@dataclass(frozen=True, slots=True)
class RowHistory:
    """The sampler's state for a row whose logits depend on its tokens."""

    token_ids: tuple[int, ...]  # prompt and output so far
    num_prompt_tokens: int
    stop_ids: tuple[int, ...]  # forbidden until `min_tokens`; EOS included
    bad_words: tuple[tuple[int, ...], ...]  # token ids
    automaton: TokenAutomaton | None = None  # constrains the output


@dataclass(frozen=True, slots=True)
class NewRow:
    """A row of the persistent batch that a sequence gets in this step."""

    row: int
    num_computed_tokens: int  # the length of its cached prefix, where computing starts
    params: SamplingParams
    seed: int
    sequence_index: int  # among the request's sequences
    max_num_tokens: int  # prompt and output together
    history: RowHistory | None = None  # only if parameters or an automaton shape its logits
    wants_embedding: bool = False  # the request wants its last hidden state
    token_ids: tuple[int, ...] = ()  # prompt and output so far; only if drafts are looked up in them
    cache_salt: str = ""  # whose finished answers its drafts may come from
    adapter: int = 0  # the slot of its adapter, from 1 on; 0: none
    rope_delta: int = 0  # added to the rotary positions of its tokens


@dataclass(frozen=True, slots=True)
class FinishedAnswer:
    """The answer of a sequence that has ended, with the last tokens of its prompt."""

    token_ids: tuple[int, ...]
    cache_salt: str = ""


@dataclass(frozen=True, slots=True)
class ChunkImages:
    """What a chunk's program must know of images, where any lies in the chunk or behind it."""

    places: tuple[int, ...]  # of placeholders, from the chunk's first token on
    rows: tuple[int, ...]  # where the vector of each is on the device
    shifts: tuple[int, ...] = ()  # [3, tokens of the chunk] flat, see `PromptImages`


@dataclass(frozen=True, slots=True)
class ImageWrite:
    """An image whose vectors are computed before a step's forward pass."""

    item: MediaItem
    rows: tuple[int, ...]  # one for each vector


@dataclass(frozen=True, slots=True)
class ChunkWork:
    """Consecutive tokens of a row, sent from the host."""

    row: int
    ticket: Ticket
    start: int  # position of the first token
    token_ids: tuple[int, ...]
    is_last: bool  # whether it reaches the row's last token, so that the next one is sampled
    next_token: int = 0  # the known token after the chunk, the target of its last position; 0 if there is none
    images: ChunkImages | None = None

    @property
    def end(self) -> int:
        return self.start + len(self.token_ids)


@dataclass(frozen=True, slots=True)
class StepOutputs:
    """A step's results on the host: one run of token ids per row, concatenated in row order.

    A run has at least one id. After a failure its last id is a sentinel (sequence.py). The run of a row that does not
    sample is meaningless, sentinels apart.

    Log-probabilities are numpy, one line per id: (values [N, k + 1], ids [N, k + 1], ranks [N]) of the sampled token
    and the k likeliest tokens; or one array [N, V] of all tokens.
    """

    token_ids: list[int]  # [N]
    counts: list[int] | None = None  # [S] ids per row; None: one each
    logprobs: Any = None  # None: not requested
    prompt_logprobs: Any = None  # like `logprobs`, one line per token of the step, for the token after it
    # numpy float32 [S, E], valid for embedding rows at the end of their prompt; or of each row [n, E], of its n tokens
    embeddings: Any = None
    drafts: list[list[int]] | None = None  # [S][K] drafts of each row's next tokens; below zero: none from here on
    failed_copies: frozenset[tuple[int, int]] = frozenset()  # (group, slot) of saves and loads that failed

    def find_lines(self, plan: StepPlan) -> dict[Ticket, int]:
        """Returns, by ticket, the line of the first id of the row's run."""
        counts = [1] * plan.num_rows if self.counts is None else self.counts
        return dict(zip(plan.tickets, accumulate(counts, initial=0), strict=False))

    def split_runs(self) -> list[Sequence[int]]:
        """Returns the runs, in row order."""
        ids, counts = tuple(self.token_ids), self.counts
        if counts is None:
            return [*zip(ids)]  # tuples of one
        return [ids[end - count : end] for count, end in zip(counts, accumulate(counts), strict=True)]


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One scheduler iteration = one device execution. Its rows are `decode_rows`, then those of `chunks`.

    Copies between a page on the device and a slot of host memory are (group, page, slot). Saves read their pages before
    the forward pass. Loads start with the step; their pages are written before the first step that is planned after
    this one was committed. A step may have copies and no rows. Of recurrent states, a row gets that of a snapshot
    before the forward pass, and a snapshot that of a row behind it, if the row then has the wanted number of tokens, or
    a verify step passes that. Adapters and vectors of images are written before the forward pass.
    """

    step_id: int
    decode_rows: tuple[int, ...]  # each computes its last sampled token and samples the next
    decode_tickets: tuple[Ticket, ...]
    chunks: tuple[ChunkWork, ...]
    new_rows: tuple[NewRow, ...]
    page_updates: tuple[tuple[int, int, int, int], ...]  # (group, row, index in the row's page table, page id)
    width: int = 1  # the most tokens that a decoding row computes; 1 if there are chunks
    num_drafts: int = 0  # drafts that the step makes for each row's next step
    finished_answers: tuple[FinishedAnswer, ...] = ()  # since the last plan; only if later drafts may come from them
    page_saves: tuple[PageCopy, ...] = ()
    page_loads: tuple[PageCopy, ...] = ()
    state_loads: tuple[StateCopy, ...] = ()
    state_saves: tuple[StateSave, ...] = ()
    adapters: int = 0  # the highest slot of an adapter that a running row has; 0: none has one
    adapter_writes: tuple[tuple[int, int], ...] = ()  # (slot, generation) of adapters that the rows need
    image_writes: tuple[ImageWrite, ...] = ()
    is_masked: bool = False  # a mask follows before the rows are sampled; only the engine knows

    @property
    def tickets(self) -> tuple[Ticket, ...]:
        """The tickets of all rows, in row order."""
        return (*self.decode_tickets, *[chunk.ticket for chunk in self.chunks])

    @property
    def num_rows(self) -> int:
        return len(self.decode_rows) + len(self.chunks)

    @property
    def has_images(self) -> bool:
        """Whether a chunk needs a program that reads images."""
        return any(chunk.images is not None for chunk in self.chunks)

    @property
    def num_tokens(self) -> int:
        return len(self.decode_rows) * self.width + sum([len(chunk.token_ids) for chunk in self.chunks])

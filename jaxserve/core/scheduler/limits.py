"""The limits that every plan keeps: compiled sizes, and the scheduler's options."""

from __future__ import annotations

from dataclasses import dataclass, field

from jaxserve.core.pages.manager import CHUNK_EDGE
from jaxserve.scheduler_options import SchedulerOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerLimits:
    """The sizes that the compiled programs impose, and the options that queue and policies read by name."""

    max_num_seqs: int  # rows
    max_num_batched_tokens: int  # tokens of a step
    max_model_len: int  # tokens of a sequence
    max_prefix_updates: int  # page-table entries of admitted prefixes in one step
    row_sizes: tuple[int, ...] = ()  # padded sizes of steps of decoding rows alone, ascending; empty: any size
    token_sizes: tuple[int, ...] = ()  # padded sizes of the other steps
    loop_rows: int = 0  # the most rows that can decode several steps in one dispatch
    verify_widths: tuple[tuple[int, int], ...] = ()  # (most rows, width) of each program that verifies drafts
    max_drafts: int = 0  # of a row in a step; 0: nobody drafts
    has_draft_passes: bool = False  # whether drafts are made by passes of a model; otherwise they are looked up
    fixed_drafts: tuple[tuple[int, int, int], ...] | None = None  # (from, to, drafts) by rows; None: chosen
    num_lookahead_tokens: int = 0  # slots behind a step's tokens that the drafter writes
    has_lookups: bool = False  # drafts are looked up in the rows' tokens, which the device must know
    keeps_answers: bool = False  # and in finished answers
    pads_cheaply: bool = False  # whether a padded token costs next to nothing
    reads_whole: bool = False  # each prompt is computed in one step, and nothing follows it
    generates: bool = True  # False: requests are for embeddings
    num_adapters: int = 0  # slots of adapters on the device
    max_image_rows: int = 0  # vectors of images that the device holds
    max_num_batched_patches: int = 0  # of the images whose vectors a step computes
    max_step_images: int = 0  # and how many they may be
    whole_image_tokens: int = 0  # of the largest image, where no chunk may cut one; 0: chunks may
    keeps_states: bool = False  # rows have a recurrent state: no token is computed twice
    # Tokens; a chunk that leaves some ends on a multiple of the first, or, if the budget reaches none, of a second.
    chunk_edges: tuple[int, ...] = (CHUNK_EDGE,)
    snapshot_grid: int = 0  # tokens; snapshots of states lie at its multiples; 0: there are none
    options: SchedulerOptions = field(default_factory=SchedulerOptions)

    @property
    def long_prefill_tokens(self) -> int:
        """The most tokens of one prompt in a step while others can use the rest."""
        threshold = 0 if self.reads_whole else self.options.long_prefill_token_threshold
        if threshold is None:
            threshold = min(self.max_model_len // 25, self.max_num_batched_tokens // 2)
        return max(threshold, self.chunk_edges[0]) if threshold else self.max_num_batched_tokens

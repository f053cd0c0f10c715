"""Runs plans on the device. A step's transfers are all here: arguments of programs, and what `StepFuture` reads."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np

from jaxserve.core.runtime.buckets import Bucket, BucketTable
from jaxserve.core.runtime.feature import DeviceState, FeatureHost, InFlight
from jaxserve.core.runtime.inputs import InputLayout, StateShape, StepPacker
from jaxserve.core.runtime.params import WeightWriter
from jaxserve.core.runtime.programs import Programs, call_program
from jaxserve.core.runtime.protocol import ParamUpdates
from jaxserve.core.runtime.rows import RowMirror, SampleVariant
from jaxserve.core.runtime.step import embedding_params, head_params
from jaxserve.core.runtime.step_arrays import HiddenStates, SampledTokens, SelectedLines
from jaxserve.core.runtime.step_counts import StepCounts
from jaxserve.core.runtime.step_future import StepFuture
from jaxserve.core.sampling import RowSetting, SamplerState, make_row_setting
from jaxserve.core.scheduler.step_plan import NewRow, StepPlan

# How often a bucket is timed, and how many of its steps run behind each other each time. Fixed numbers, because all
# nodes of an engine run the same programs in the same order.
_ROUNDS, _STEPS_OF_ROUND = 3, 2


@dataclasses.dataclass(frozen=True, slots=True)
class DispatchedStep:
    """A step whose outputs are on their way already: a loop of decode steps, or a step that only makes embeddings."""

    future: StepFuture

    def sample(self, mask: np.ndarray | None = None) -> StepFuture:
        """Returns the outputs; no row of such a step has a mask."""
        assert mask is None
        return self.future


@dataclasses.dataclass(frozen=True, slots=True)
class StartedStep:
    """A step whose forward pass was dispatched and whose tokens are not sampled yet."""

    runner: ModelRunner
    bucket: Bucket
    num_rows: int
    variant: SampleVariant
    wants_logprobs: bool
    selected: SelectedLines
    prompt_logprobs: Any
    embeddings: Any
    inputs: np.ndarray  # packed
    drafts: bool = False  # whether drafts follow its tokens
    beside: Sequence[InFlight] = ()

    def sample(self, mask: np.ndarray | None = None) -> StepFuture:
        """Dispatches sampling and returns its outputs; `mask` uint32 [num_rows * width, W] has the tokens' bits."""
        return self.runner.sample(self, mask)


class ModelRunner:
    """Owns the parameters and the donated state. `start` and `sample` do not wait for the device."""

    def __init__(
        self,
        programs: Programs,
        buckets: BucketTable,
        *,
        params: Any,
        writer: WeightWriter,
        sampler_specs: SamplerState,
        state_shape: StateShape,
        variants: Mapping[SampleVariant, SampleVariant],
        count_compiles: Callable[[], int] = lambda: 0,
        features: Sequence[FeatureHost] = (),
        counts: StepCounts | None = None,
        times_steps: bool = False,
        embeds_tokens: bool = False,
    ) -> None:
        self.params, self.features = params, tuple(features)
        self.counts = counts or StepCounts()
        self.step_costs: dict[tuple[int, ...], float] = {}  # see `StepCosts`
        self._embeds_tokens = embeds_tokens  # each token has a vector of its own
        self._times_steps = times_steps  # of decoding rows alone, each bucket before its first step
        self._count_compiles, self._compiles_before = count_compiles, count_compiles()
        self.device = DeviceState(programs)
        self._buckets, self._variants = buckets, variants
        self._layouts = {bucket: InputLayout(bucket, state_shape) for bucket in buckets.buckets}
        self._writer = writer
        self._state_shape = state_shape
        self._vocab_size = sampler_specs.token_stats.shape[1]
        self.num_mask_words = sampler_specs.allowed.shape[1]  # of 32 bits, for a line
        self.reset()

    @property
    def all_params(self) -> tuple[Any, ...]:
        """The parameters of the model, and of each feature or None."""
        return self.params, *(feature.params for feature in self.features)

    def _select_params(self, bucket: Bucket) -> tuple[Any, ...]:
        return tuple([feature.select_params(bucket) for feature in self.features])

    @property
    def num_programs(self) -> int:
        """Compiled programs that steps can use."""
        return len(self.device.programs)

    @property
    def num_compiles(self) -> int:
        """XLA compilations in this process since the runner was ready, cached or not."""
        return self._count_compiles() - self._compiles_before

    def reset(self) -> None:
        """Replaces all state on the device by zeros, at the start and after a failed step."""
        device = self.device
        device.cache, device.rows, device.sampler = (), None, None  # freed first: there is no room for two
        for feature in self.features:
            feature.state = None
        device.cache, device.rows, device.sampler, states = device.programs.get("zeros", None)()
        for feature, state in zip(self.features, states, strict=True):
            feature.reset(state)
        self._mirror = RowMirror(self._state_shape.rows)
        self._packer = StepPacker(self._mirror)

    def write_params(self, updates: ParamUpdates) -> None:
        """Replaces parameters by canonical name. No step may be in flight."""
        self.params = self._writer.write(self.params, updates)

    def warm_up(self) -> None:
        """Runs every program once on padding, and waits for it."""
        padding = self._state_shape.padding_row
        self._set_row(padding, make_row_setting(self._vocab_size, (), ()))
        for feature in self.features:
            feature.warm_up(self.device)
        for bucket in self._buckets.buckets:
            self._warm_up(bucket)
        self._compiles_before = self._count_compiles()

    def warm_thread(self) -> None:
        """Runs a compiled program on the calling thread, which will run the steps, and waits for it.

        XLA opens the random device when a thread runs its first program; by the first step the process may be out of
        file descriptors.
        """
        bucket = min(self.device.programs.of_kind("forward"))
        jax.block_until_ready(self._run(bucket, self._layouts[bucket].new()))

    def list_additions(self, programs: Programs, buckets: BucketTable) -> Iterator[Callable[[], None]]:
        """Yields functions to call in order, between steps; after the last one steps use the programs of `buckets`.

        `programs` must include those already in use.
        """
        known = self._buckets.buckets

        def change() -> None:
            self._buckets = buckets
            self._compiles_before = self._count_compiles()

        yield partial(setattr, self.device, "programs", programs)
        for bucket in buckets.buckets:
            if bucket not in known:
                yield partial(self._warm_up, bucket)
        yield change

    def _warm_up(self, bucket: Bucket) -> None:
        """Runs the programs of a bucket on padding, which touches no row."""
        layout = self._layouts.setdefault(bucket, InputLayout(bucket, self._state_shape))
        packed = layout.new()
        selected, hidden = self._run(bucket, packed)
        targets = np.zeros(bucket.tokens, np.int32) if bucket.is_mixed and self._variants else None
        prompt_logprobs = self._find_prompt_logprobs(hidden, targets)
        embeddings = self._embed(hidden) if bucket.width == 1 else None
        drafts = self._state_shape.max_drafts > 0
        if selected.logits is None:
            StepFuture(SampledTokens(None), (None, None, embeddings), 0).wait()
        for variant in sorted(set(self._variants.values())):  # none if the engine only makes embeddings
            if bucket.is_decode and ("loop", (bucket, variant)) in self.device.programs:
                self._run_loop(bucket, variant, layout.new())
            step = StartedStep(self, bucket, 0, variant, True, selected, prompt_logprobs, embeddings, packed, drafts)
            step.sample().result()
        self._time_bucket(bucket, SampleVariant.GREEDY)

    def _time_bucket(self, bucket: Bucket, variant: SampleVariant) -> None:
        """Notes the seconds of a step on padding: the least, since whatever else runs only makes it longer.

        Verify steps make drafts for the step behind them, others do not.
        """
        form = bucket.rows, bucket.width, *((1,) if bucket.adapters else ())
        if not self._times_steps or bucket.is_mixed or form in self.step_costs:
            return
        rounds = []
        for _ in range(1 + _ROUNDS):
            start = time.perf_counter()
            for _ in range(_STEPS_OF_ROUND):
                packed = self._layouts[bucket].new()
                selected, _ = self._run(bucket, packed)
                step = StartedStep(self, bucket, 0, variant, False, selected, None, None, packed, bucket.width > 1)
                future = step.sample()
            future.wait()
            rounds.append((time.perf_counter() - start) / _STEPS_OF_ROUND)
        self.step_costs[form] = min(rounds[1:])  # what ran before is in the first

    def start(self, plan: StepPlan) -> StartedStep | DispatchedStep:
        """Dispatches the forward pass of a step, or a loop; MissingProgramError if no program holds it."""
        sizes = plan.num_tokens, plan.num_rows, plan.width, plan.adapters
        bucket = self._buckets.find(*sizes, is_mixed=plan.has_images)
        is_loop = bucket.width < plan.width
        for new_row in plan.new_rows:
            if new_row.history is not None:
                self._set_row(new_row.row, _make_setting(self._vocab_size, new_row))
        prepared = [feature.prepare(self.device, plan) for feature in self.features]
        beside = [each for each in prepared if each is not None]
        packed = self._packer.pack(plan, self._layouts[bucket])
        self.counts.count(bucket, plan.num_tokens, plan.width if is_loop else 1)
        self._time_bucket(bucket, packed.variant)  # if nothing did so when it was compiled
        if is_loop:
            sampled = self._run_loop(bucket, packed.variant, packed.inputs)
            return DispatchedStep(StepFuture(sampled, None, plan.num_rows, beside))
        selected, hidden = self._run(bucket, packed.inputs)
        if selected.logits is None:
            more, lengths = (None, None, self._embed(hidden)), None
            if self._embeds_tokens:
                lengths = [len(chunk.token_ids) for chunk in plan.chunks]
            return DispatchedStep(StepFuture(SampledTokens(None), more, plan.num_rows, beside, lengths))
        return StartedStep(
            self,
            bucket,
            plan.num_rows,
            packed.variant,
            packed.wants_logprobs,
            selected,
            self._find_prompt_logprobs(hidden, _list_targets(plan, bucket, self._mirror)),
            self._embed(hidden) if self._wants_embeddings(plan) else None,
            packed.inputs,
            plan.num_drafts > 0,
            beside,
        )

    def sample(self, step: StartedStep, mask: np.ndarray | None) -> StepFuture:
        """See `StartedStep.sample`."""
        bucket, variant = step.bucket, self._variants[step.variant if mask is None else SampleVariant.MASKED]
        device, is_shaped = self.device, variant > SampleVariant.RANDOM
        states = [feature.sample_state(bucket.width) for feature in self.features]
        kept, read = tuple([own for own, _ in states]), tuple([other for _, other in states])
        sent = self._pad_mask(mask, bucket.rows * bucket.width) if variant is SampleVariant.MASKED else None
        program = device.programs.get("sample", (bucket.rows, bucket.width, variant))
        arguments = device.rows, kept, device.sampler if is_shaped else None, read, step.selected, sent
        device.rows, kept, sampler, sampled = program(*arguments) if sent is None else call_program(program, *arguments)
        if is_shaped:
            device.sampler = sampler
        for feature, own in zip(self.features, kept, strict=True):
            feature.keep(own)
        if bucket.width > 1 and self._state_shape.max_pending:
            program = device.programs.get("settle", (bucket.rows, bucket.width))
            device.cache = call_program(program, self.params, device.cache, device.rows, step.inputs, sampled.ids)
        if not step.drafts:
            sampled = SampledTokens(sampled.ids)  # the host does not read them
        else:
            for feature in self.features:
                sampled = feature.draft(device, self.params, step.selected, sampled)
        if not step.wants_logprobs and step.prompt_logprobs is None and step.embeddings is None:
            return StepFuture(sampled, None, step.num_rows, step.beside)
        logprobs = None
        if step.wants_logprobs:
            logprobs = device.programs.get("logprobs", (bucket.rows, bucket.width))(step.selected, sampled.ids)
        return StepFuture(sampled, (logprobs, step.prompt_logprobs, step.embeddings), step.num_rows, step.beside)

    def _run(self, bucket: Bucket, packed: np.ndarray) -> tuple[SelectedLines, HiddenStates]:
        device = self.device
        arguments = self.params, device.cache, device.rows, packed, self._select_params(bucket)
        program = device.programs.get("forward", bucket)
        device.cache, device.rows, selected, hidden = call_program(program, *arguments)
        return selected, hidden

    def _run_loop(self, bucket: Bucket, variant: SampleVariant, packed: np.ndarray) -> SampledTokens:
        device = self.device
        arguments = self.params, device.cache, device.rows, device.sampler, packed, self._select_params(bucket)
        program = device.programs.get("loop", (bucket, variant))
        device.cache, device.rows, device.sampler, sampled = call_program(program, *arguments)
        return sampled

    def _set_row(self, row: int, setting: RowSetting) -> None:
        program = self.device.programs.get("set_row", None)
        self.device.sampler = call_program(program, self.device.sampler, np.int32(row), setting)

    def _find_prompt_logprobs(self, hidden: HiddenStates, targets: np.ndarray | None) -> Any:
        if targets is None:
            return None
        program = self.device.programs.get("prompt_logprobs", len(targets))
        return call_program(program, head_params(self.params), hidden.every, targets)

    def _embed(self, hidden: HiddenStates) -> Any:
        return self.device.programs.get("embed", len(hidden.last))(embedding_params(self.params), hidden.last)

    def _wants_embeddings(self, plan: StepPlan) -> bool:
        return any(chunk.is_last and self._mirror.wants_embedding(chunk.row) for chunk in plan.chunks)

    def _pad_mask(self, mask: np.ndarray | None, rows: int) -> np.ndarray:
        """Returns the mask for all rows of the bucket; padding rows may sample anything, without a mask all rows."""
        padded = np.full((rows, self.num_mask_words), 2**32 - 1, np.uint32)
        if mask is not None:
            padded[: len(mask)] = mask
        return padded


def _list_targets(plan: StepPlan, bucket: Bucket, mirror: RowMirror) -> np.ndarray | None:
    """Returns the token after each token of the step [T]; None if no row wants a prompt's log-probabilities.

    Rows with a single token end their prompt or follow it, so decode buckets need none.
    """
    if not bucket.is_mixed or not any(mirror.wants_prompt_logprobs(chunk.row) for chunk in plan.chunks):
        return None
    targets, at = np.zeros(bucket.tokens, np.int32), len(plan.decode_rows)
    for chunk in plan.chunks:
        targets[at : at + len(chunk.token_ids)] = (*chunk.token_ids[1:], chunk.next_token)
        at += len(chunk.token_ids)
    return targets


def _make_setting(vocab_size: int, new_row: NewRow) -> RowSetting:
    params, history = new_row.params, new_row.history
    assert history is not None
    return make_row_setting(
        vocab_size,
        history.token_ids[: history.num_prompt_tokens],
        history.token_ids[history.num_prompt_tokens :],
        logit_bias=params.logit_bias,
        allowed_ids=params.allowed_token_ids,
        suppressed_ids=params.suppress_tokens or (),
        bad_words=history.bad_words,
        banned_ids=history.stop_ids if params.min_tokens else (),
        banned_until=history.num_prompt_tokens + params.min_tokens,
        automaton=history.automaton,
    )

"""`LLM`: generation inside the caller's own process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from jaxserve.config import DEMO_MODEL, EngineConfig
from jaxserve.engine.beam import BeamSearchOutput, BeamSearchParams, search_beams
from jaxserve.engine.build import ReadyEngine, RunningChoice, build_engine
from jaxserve.engine.progress import choose_progress
from jaxserve.engine.prompts import Message, Prompt
from jaxserve.errors import InvalidRequestError, TokenizerError
from jaxserve.logits_processor import LogitsProcessor
from jaxserve.request import EmbeddingOutput, Request, RequestOutput
from jaxserve.sampling_params import OutputKind, SamplingParams

if TYPE_CHECKING:
    from jaxserve.tokenizers import Tokenizer


class LLM:
    """A model, ready to generate. After the constructor returns, nothing is compiled any more.

    Args:
        model: a checkpoint directory, a Hugging Face model id, a preset's name (with `load_format="dummy"`), or
            nothing for the demo model.
        show_progress: bars for loading and compiling, on a terminal.
        logits_processor: a function of your own in the sampler; see `LogitsProcessor`.
        options: everything in `jaxserve.config`, by name.

    Raises:
        ConfigError, WeightsError, TokenizerError, CapacityError: name what to change.
    """

    def __init__(
        self,
        model: str = DEMO_MODEL,
        *,
        show_progress: bool = True,
        logits_processor: LogitsProcessor | None = None,
        **options: Any,
    ) -> None:
        config = EngineConfig.from_options(model=str(model), **options)
        self._ready: ReadyEngine = build_engine(
            config, progress=choose_progress(show_progress), processor=logits_processor
        )

    @property
    def ready(self) -> ReadyEngine:
        """The parts the engine is made of, for benchmarks and tests."""
        return self._ready

    def get_tokenizer(self) -> Tokenizer:
        """Returns the model's tokenizer; TokenizerError when there is none."""
        if self._ready.tokenizer is None:
            raise TokenizerError("there is none: skip_tokenizer_init is set, or a preset is served", field="tokenizer")
        return self._ready.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """Returns what the model's generation_config.json recommends."""
        return self._ready.default_params

    def update_weights(self, tree: Any, *, running: RunningChoice = "requeue") -> list[RequestOutput]:
        """Swaps the model's weights without compiling anything.

        Waits for the step in flight, then writes leaf by leaf. What the prefix cache knows belongs to the old weights
        and is forgotten; unfinished requests begin again with the tokens they have, or are aborted.

        Args:
            tree: canonical parameters as nested dictionaries, as `{dotted name: array}`, or as an `nnx.State`.

        Returns:
            What became visible meanwhile: the outputs of the step in flight, and of aborted requests.

        Raises:
            WeightsError: a leaf is missing, unknown or has another shape; the old weights stay.
            ConfigError: `running` is something else.
        """
        return self._ready.update_weights(tree, running)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Runs all prompts to their ends, as many at once as fit, and returns their outputs in order.

        Args:
            prompts: text, `{"prompt": text}` or `{"prompt_token_ids": ids}`, or a list of these.
            sampling_params: for all prompts, or one for each; default: `get_default_sampling_params`.
            use_tqdm: show a progress bar on a terminal (the name is vLLM's).

        Raises:
            InvalidRequestError, CapacityError: a prompt or a parameter cannot be served; nothing is generated then.
        """
        many = [prompts] if isinstance(prompts, str | Mapping) else list(prompts)
        params = self._spread(sampling_params, len(many))
        make = self._ready.requests.make
        return self._run([make(prompt, each) for prompt, each in zip(many, params, strict=True)], use_tqdm=use_tqdm)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        add_generation_prompt: bool = True,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Like `generate`, for one conversation or a list of them, through the tokenizer's own chat template."""
        one = not messages or isinstance(messages[0], Mapping)
        conversations: list[Any] = [messages] if one else list(messages)
        params = self._spread(sampling_params, len(conversations))
        requests = [
            self._ready.requests.make_chat(conversation, each, add_generation_prompt=add_generation_prompt)
            for conversation, each in zip(conversations, params, strict=True)
        ]
        return self._run(requests, use_tqdm=use_tqdm)

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        use_tqdm: bool = True,
        truncate_prompt_tokens: int | None = None,
    ) -> list[EmbeddingOutput]:
        """Returns where each prompt lies in the model's space, in order.

        An embedding is the hidden state of the prompt's last token after the final norm, in float32 and divided by its
        L2 norm. Prompts share batches, chunks and the prefix cache with everything else that runs.

        Args:
            prompts: as for `generate`.
            use_tqdm: show a progress bar on a terminal.
            truncate_prompt_tokens: keep the last so many tokens of each prompt; -1: as many as fit.

        Raises:
            InvalidRequestError, CapacityError: a prompt cannot be served; nothing is computed then.
            NonFiniteLogitsError, DeviceStepError: the model or the device failed on one of them.
        """
        many = [prompts] if isinstance(prompts, str | Mapping) else list(prompts)
        make = self._ready.requests.make_embedding
        requests = [make(prompt, truncate_prompt_tokens=truncate_prompt_tokens) for prompt in many]
        found = []
        for output in self._run(requests, use_tqdm=use_tqdm):
            if output.error is not None:
                raise output.error
            assert output.embedding is not None  # it has ended without an error
            name, text, ids = output.request_id, output.prompt, output.prompt_token_ids
            found.append(EmbeddingOutput(name, text, ids, output.embedding, output.num_cached_tokens))
        return found

    def beam_search(
        self, prompts: Prompt | Sequence[Prompt], params: BeamSearchParams, *, use_tqdm: bool = True
    ) -> list[BeamSearchOutput]:
        """Returns the likeliest texts that continue each prompt, best first.

        Raises:
            InvalidRequestError: a prompt cannot be served, or `max_logprobs` is below twice the width.
        """
        requests = self._ready.requests
        many = [prompts] if isinstance(prompts, str | Mapping) else list(prompts)
        plain = SamplingParams(max_tokens=params.max_tokens, output_kind=OutputKind.FINAL_ONLY)
        texts = [list(requests.make(prompt, plain).prompt_token_ids) for prompt in many]

        def generate(token_ids: list[list[int]], step: SamplingParams) -> list[RequestOutput]:
            made = [requests.make({"prompt_token_ids": ids}, step) for ids in token_ids]
            return self._run(made, use_tqdm=False)

        eos_token_ids = requests.make({"prompt_token_ids": texts[0]}, plain).eos_token_ids if texts else ()
        with choose_progress(use_tqdm)("Searching", unit="prompts"):
            found = search_beams(
                texts, params, generate, eos_token_ids, max_model_len=self._ready.shapes.model.max_model_len
            )
        if self._ready.tokenizer is None:
            return found
        decode = self._ready.tokenizer.decode
        return [
            BeamSearchOutput([replace(beam, text=decode(beam.token_ids)) for beam in output.sequences])
            for output in found
        ]

    def _run(self, requests: Sequence[Request], *, use_tqdm: bool) -> list[RequestOutput]:
        engine, outputs = self._ready.engine, {}
        try:
            for request in requests:
                engine.add_request(request)
            with choose_progress(use_tqdm)("Generating", unit="requests") as report:
                while engine.has_unfinished:
                    for output in engine.step():  # each is the last of its request
                        outputs[output.request_id] = output
                        report(len(outputs), len(requests))
        except BaseException as error:  # an interrupt as well: the engine is left able to work
            for request in requests:
                engine.abort_request(request.request_id)
            if isinstance(error, Exception):
                engine.drain()
            else:  # it may have struck where a program had taken the device's state, and nobody took the new one
                engine.reset()
            raise
        return [outputs[request.request_id] for request in requests]

    def _spread(self, params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
        if params is None or isinstance(params, SamplingParams):
            given = [params or self._ready.default_params] * count
        else:
            given = list(params)
        if len(given) != count:
            message = f"one for all, or one for each of the {count} prompts; got {len(given)}"
            raise InvalidRequestError(message, field="sampling_params", value=len(given))
        return [replace(each, output_kind=OutputKind.FINAL_ONLY) for each in given]

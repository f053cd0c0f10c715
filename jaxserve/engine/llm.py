"""`LLM`: generation inside the caller's own process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Unpack

from jaxserve.config import EngineConfig
from jaxserve.engine import pooled
from jaxserve.engine.beam import BeamSearchOutput, BeamSearchParams, decode_beams, find_beams
from jaxserve.engine.build import ReadyEngine, RunningChoice, build_engine
from jaxserve.engine.metrics import Metric, list_metrics
from jaxserve.engine.pooled import PoolingCall
from jaxserve.engine.progress import ShowProgress, choose_announce, choose_progress
from jaxserve.engine.prompt_forms import Message, Prompt, list_prompts
from jaxserve.engine.prompts import RequestFactory
from jaxserve.engine.request_options import (
    ChatArguments,
    EmbedArguments,
    EncodeArguments,
    PoolingArguments,
    RequestArguments,
    ScoreArguments,
    make_requests,
    read_arguments,
)
from jaxserve.engine.stats import read_stats
from jaxserve.engine_args import EngineArgs
from jaxserve.logits_processor import LogitsProcessor
from jaxserve.model_options import DEMO_MODEL
from jaxserve.request import (
    ClassificationOutput,
    EmbeddingOutput,
    PoolingOutput,
    Request,
    RequestOutput,
    ScoringOutput,
)
from jaxserve.sampling_params import SamplingParams
from jaxserve.vllm_names import refuse_attribute

if TYPE_CHECKING:
    from jaxserve.core.models.base import DecoderConfig
    from jaxserve.engine.engine import Engine
    from jaxserve.tokenizers import Tokenizer


class LLM:
    """A model, ready to generate.

    The constructor compiles the program of a short prompt; every other one is compiled when a step first needs it. With
    `compile="all"` the constructor compiles every program, and nothing is compiled later.

    Args:
        model: a checkpoint directory, a Hugging Face model id, or a preset with `load_format="dummy"`.
        show_progress: show progress on standard error; calls show theirs unless `use_tqdm` says otherwise.
        logits_processor: your own function in the sampler; see `LogitsProcessor`.
        options: the options of `jaxserve.config`, by name.

    Raises:
        ConfigError, DeviceError, WeightsError, TokenizerError, CapacityError: name what to change.
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
        config = config.with_compile("used" if config.nodes.nnodes in (None, 1) else "all")
        self._shows_progress = show_progress
        self._ready: ReadyEngine = build_engine(
            config,
            progress=choose_progress(show_progress),
            processor=logits_processor,
            announce=choose_announce(show_progress),
        )

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs, *, show_progress: bool = True) -> LLM:
        """Returns an `LLM` with the options of an `EngineArgs`, as vLLM's scripts pass them."""
        return cls(**engine_args.options, show_progress=show_progress)

    if not TYPE_CHECKING:  # a type checker is to miss what is missing
        __getattr__ = refuse_attribute

    @property
    def ready(self) -> ReadyEngine:
        """The engine's parts, for benchmarks and tests."""
        return self._ready

    def get_tokenizer(self) -> Tokenizer:
        """Returns the model's tokenizer; TokenizerError if there is none."""
        return self._ready.require_tokenizer()

    def get_default_sampling_params(self) -> SamplingParams:
        """Returns the parameters that the model's generation_config.json recommends."""
        return self._ready.default_params

    def get_metrics(self) -> list[Metric]:
        """Returns the engine's gauges and counters, as a server shows them at `/metrics`."""
        return list_metrics(read_stats(self._ready.engine), self._ready.shapes.config.model.model)

    def reset_prefix_cache(self) -> bool:
        """Empties the prefix cache; returns True."""
        self._ready.engine.scheduler.pages.drop_prefix_index()
        return True

    def update_weights(self, tree: Any, *, running: RunningChoice = "requeue") -> list[RequestOutput]:
        """Swaps the model's weights without compiling anything.

        Waits for the step in flight, writes leaf by leaf, and empties the prefix cache; a tower stays as it was loaded.

        Args:
            tree: canonical parameters as nested dictionaries, as `{dotted name: array}`, or as an `nnx.State`; or the
                directory of a checkpoint, which is the only form with several nodes.
            running: "requeue" recomputes unfinished requests with the tokens they have; "abort" ends them.

        Returns:
            The outputs of the step in flight and of aborted requests.

        Raises:
            WeightsError: a leaf is missing, unknown or has another shape; the old weights stay.
            ConfigError: `running` is neither "requeue" nor "abort"; or `tree` is not a path with several nodes.
        """
        return self._ready.update_weights(tree, running)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | None = None,
        **arguments: Unpack[RequestArguments],
    ) -> list[RequestOutput]:
        """Runs all prompts to their end, batched, and returns one output per prompt, in order.

        Args:
            prompts: text, `{"prompt": text}`, `{"prompt_token_ids": ids}` or a list of token ids; or a list of these.
            sampling_params: one for all prompts, or one for each; default: `get_default_sampling_params`.
            use_tqdm: show progress on standard error; default: as `show_progress` of the constructor.
            priority: one for all prompts, or one for each; smaller ones run first within a tier; default: 0.
            service_tier: "priority", "default" ("auto") or "flex"; one for all prompts, or one for each.
            cache_salt: prompts with different salts share no cached prefixes.
            lora_request: the adapter, with `enable_lora`; one for all prompts, or one or None for each.
            timeout: seconds; requests not finished by then end with finish_reason "timeout" and the tokens they have.
            arguments: those above, and others of vLLM's method with values that change nothing here.

        Raises:
            InvalidRequestError, CapacityError: a prompt or a parameter cannot be served; nothing is generated.
        """
        options = read_arguments("LLM.generate", arguments)
        params = self._ready.default_params if sampling_params is None else sampling_params
        many = list_prompts(prompts)
        return self._run(make_requests(self._ready.requests.make, many, options, params), use_tqdm=use_tqdm)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | None = None,
        **arguments: Unpack[ChatArguments],
    ) -> list[RequestOutput]:
        """Like `generate`, for one conversation or a list of them, through a chat template.

        Args:
            messages: dicts with `role` and `content`, as OpenAI's clients send them.
            tools: functions that the model may call, in OpenAI's format; calls stay in the output's text.
            chat_template: the text of a Jinja template; default: the tokenizer's own.
            chat_template_kwargs: variables of the template, such as Qwen 3's `{"enable_thinking": False}`.
            add_generation_prompt: begin an answer; default: not `continue_final_message`.
            continue_final_message: continue the last message, which must be the assistant's.
            arguments: those above, and those of `generate`.

        Raises:
            InvalidRequestError, CapacityError: a conversation or an argument cannot be served.
            TokenizerError: there is no chat template, or it is broken.
        """
        options = read_arguments("LLM.chat", arguments)
        params = self._ready.default_params if sampling_params is None else sampling_params
        one = not messages or isinstance(messages[0], Mapping)
        many: list[Any] = [messages] if one else list(messages)
        return self._run(make_requests(self._ready.requests.make_chat, many, options, params), use_tqdm=use_tqdm)

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        use_tqdm: bool | None = None,
        **arguments: Unpack[EmbedArguments],
    ) -> list[EmbeddingOutput]:
        """Returns one embedding per prompt, in order.

        How they are made is said by `pooler_config`, by the model's modules.json, or by its architecture, in this
        order. A decoder's is the hidden state of the last token after the final norm, divided by its L2 norm.

        Args:
            prompts, use_tqdm: as for `generate`.
            pooling_params: other forms of the vectors.
            prompt_name: which of the prompts in the model's files is put in front of each text, if not the default one.
            truncate_prompt_tokens: keep only so many tokens of each prompt, -1: as many as fit. They are the last ones
                or, where a text is read whole (an encoder, or the mean of all tokens), the first ones.
            arguments: those above, and others of vLLM's method, as for `generate`.

        Raises:
            InvalidRequestError, CapacityError: a prompt cannot be served; nothing is computed.
            NonFiniteLogitsError, DeviceStepError: the model or the device failed on a prompt.
        """
        options = read_arguments("LLM.embed", arguments)
        return self._pool(pooled.embed(*self._maker, prompts, options), use_tqdm)

    def classify(
        self, prompts: Prompt | Sequence[Prompt], *, use_tqdm: bool | None = None, **arguments: Unpack[PoolingArguments]
    ) -> list[ClassificationOutput]:
        """Returns the probabilities of the model's classes for each prompt; arguments and errors are `embed`'s."""
        options = read_arguments("LLM.classify", arguments)
        return self._pool(pooled.classify(*self._maker, prompts, options), use_tqdm)

    def encode(
        self, prompts: Prompt | Sequence[Prompt], *, use_tqdm: bool | None = None, **arguments: Unpack[EncodeArguments]
    ) -> list[PoolingOutput]:
        """Returns what `embed` or `classify` does, by `pooling_task`, as plain numbers; default: the model's task.

        With `token_embed` (a pooler of type ALL) or `token_classify`, `data` has those of each token.
        """
        options = read_arguments("LLM.encode", arguments)
        return self._pool(pooled.encode(*self._maker, prompts, options), use_tqdm)

    def score(
        self,
        data_1: str | Sequence[str],
        data_2: str | Sequence[str],
        *,
        use_tqdm: bool | None = None,
        **arguments: Unpack[ScoreArguments],
    ) -> list[ScoringOutput]:
        """Returns how well each text of `data_2` answers that of `data_1`: a reranker's score, or a cosine.

        A model without classes embeds both texts; their score is the cosine of the two vectors.

        Args:
            data_1: one text for all of `data_2`, or as many.
            max_tokens_per_doc: keep only so many tokens of each text of `data_2`.
            truncate_prompt_tokens: keep only so many tokens of each pair, -1: as many as fit.
            chat_template: a Jinja template with the roles query and document, in place of the model's own.
            arguments: those above, and those of `embed`.

        Raises:
            TokenizerError: the tokenizer says nothing of pairs, or a model that needs a template has none.
            As `embed`.
        """
        options = pooled.read_template(read_arguments("LLM.score", arguments), self._ready.tokenizer)
        return self._pool(pooled.score(*self._maker, data_1, data_2, options), use_tqdm)

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams,
        *,
        use_tqdm: bool | None = None,
        **foreign: Any,
    ) -> list[BeamSearchOutput]:
        """Returns, for each prompt, the `beam_width` likeliest continuations, best first.

        Raises:
            InvalidRequestError, CapacityError: a prompt cannot be served, or `max_logprobs` is below twice the width.
            NonFiniteLogitsError, DeviceStepError: the model or the device failed on a beam.
        """
        options = read_arguments("LLM.beam_search", foreign)
        run = partial(self._run, use_tqdm=False)
        with self._choose_progress(use_tqdm)("Searching", unit="prompts"):
            found, texts = find_beams(
                self._ready.requests,
                list_prompts(prompts),
                params,
                run,
                options,
                self._ready.shapes.model.max_model_len,
            )
        return found if self._ready.tokenizer is None else decode_beams(found, texts, self._ready.tokenizer)

    @property
    def _maker(self) -> tuple[RequestFactory, DecoderConfig]:
        return self._ready.requests, self._ready.shapes.model

    def _pool[T](self, call: PoolingCall[T], use_tqdm: bool | None) -> list[T]:
        return call.finish(self._run(call.requests, use_tqdm=use_tqdm))

    def _choose_progress(self, use_tqdm: bool | None) -> ShowProgress:
        return choose_progress(self._shows_progress if use_tqdm is None else use_tqdm)

    def _run(self, requests: Sequence[Request], *, use_tqdm: bool | None) -> list[RequestOutput]:
        return _run_all(self._ready.engine, requests, self._choose_progress(use_tqdm))


def _run_all(engine: Engine, requests: Sequence[Request], show: ShowProgress) -> list[RequestOutput]:
    """Runs requests to their end and returns their outputs in the same order."""
    outputs: dict[str, RequestOutput] = {}
    try:
        for request in requests:
            engine.add_request(request)
        with show("Generating", unit="requests") as report:
            report(0, len(requests))
            while engine.has_unfinished:
                for output in engine.step():  # each is the last of its request
                    outputs[output.request_id] = output
                    report(len(outputs), len(requests))
    except BaseException as error:  # interrupts too: the engine must stay usable
        for request in requests:
            engine.abort_request(request.request_id)
        if isinstance(error, Exception):
            engine.drain()
        else:  # an interrupt may have lost the device's state: donated to a program, its result not stored
            engine.reset()
        raise
    return [outputs[request.request_id] for request in requests]

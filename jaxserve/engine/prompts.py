"""From users' prompts to validated `Request`s."""

from __future__ import annotations

import contextlib
import itertools
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Unpack

from jaxserve.engine.images import ImageInput
from jaxserve.engine.pairs import PairEncoder
from jaxserve.engine.pooling import require_task
from jaxserve.engine.prompt_forms import Message, Prompt, add_prompt, as_mapping, keep_start
from jaxserve.engine.prompt_reader import PromptReader, ReadPrompt, check_token_id
from jaxserve.engine.request_options import (
    ChatOptions,
    FindAdapter,
    RequestOptions,
    make_fields,
    refuse_adapter,
    split_options,
)
from jaxserve.errors import InvalidRequestError, shorten
from jaxserve.logits_processor import LogitsProcessor
from jaxserve.media.items import MediaItem
from jaxserve.request import TOKEN_TYPE, Request, Task
from jaxserve.sampling_params import (
    MAX_BAD_WORD_TOKENS,
    MAX_SEED,
    SamplingParams,
    check_truncation,
    limit_prompt_logprobs,
)
from jaxserve.structured_params import StructuredOutputsParams

if TYPE_CHECKING:
    from jaxserve.core.weights.sentence_transformers import Prompts
    from jaxserve.features.grammars import GrammarCompiler
    from jaxserve.tokenizers import Tokenizer
    from jaxserve.tokenizers.pairs import PairTemplate

GrammarSource = Callable[[StructuredOutputsParams], Any]  # returns a compiled grammar
_SEED_BITS = 2**64 - 1


class RequestFactory:
    """Makes requests: tokenizes, validates and draws seeds."""

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        *,
        vocab_size: int,
        eos_token_ids: Iterable[int],
        seed: int,
        max_model_len: int,
        max_logprobs: int,
        reads_whole: bool = False,
        processor: LogitsProcessor | None = None,
        pairs: PairEncoder | None = None,
        tasks: Sequence[str] = ("generate", "embed"),
        prompts: Prompts | None = None,
        find_adapter: FindAdapter = refuse_adapter,
        images: ImageInput | None = None,
    ) -> None:
        """Takes the model's own values; `images`, if it reads some, is also how others load them."""
        self._tokenizer, self._find_adapter, self.images = tokenizer, find_adapter, images
        self._reader = PromptReader(tokenizer, vocab_size, images)
        self._vocab_size = vocab_size
        self._max_model_len, self._max_logprobs = max_model_len, max_logprobs
        self._processor, self._reads_whole = processor, reads_whole
        self._pairs, self._tasks, self._prompts = pairs or PairEncoder(tokenizer), tasks, prompts
        self._grammars: GrammarCompiler | None = None  # made with the first grammar
        own = tokenizer.eos_token_ids if tokenizer is not None else ()
        self._eos_token_ids = tuple(dict.fromkeys((*own, *eos_token_ids)))
        self._random = random.Random(seed)
        self._counter = itertools.count()

    def choose_prompt(self, names: Iterable[str]) -> str | None:
        """Returns the first of these names that one of the prompts in the model's files has, None if none has."""
        known = {} if self._prompts is None else self._prompts.by_name
        return next((name for name in names if name in known), None)

    def make(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        request_id: str | None = None,
        task: Task = Task.GENERATE,
        compile_grammar: GrammarSource | None = None,
        **options: Unpack[RequestOptions],
    ) -> Request:
        """Returns the request to continue a prompt. A prompt's own `cache_salt` takes precedence.

        Args:
            task: GENERATE or READ.
            compile_grammar: replaces `grammars.compile`.

        Raises:
            InvalidRequestError: names what is wrong with the prompt, the parameters or the options.
        """
        fields = _check_options(prompt, options, self._find_adapter)
        return replace(self._make(self._reader.read(prompt), params, request_id, task, compile_grammar), **fields)

    def make_chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams,
        *,
        request_id: str | None = None,
        compile_grammar: GrammarSource | None = None,
        images: Sequence[MediaItem] | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
        **options: Unpack[ChatOptions],
    ) -> Request:
        """Returns the request to answer a conversation, rendered by `chat_template` or else the tokenizer's own.

        The other arguments are those of `make`.

        Args:
            images: those of messages from which they were taken; None: they are taken and loaded here.
            mm_processor_kwargs: options of the image processor, for images that are loaded here.

        Raises:
            InvalidRequestError: names what is wrong with the messages, the parameters or the options.
            TokenizerError: there is no tokenizer, or it has no chat template.
        """
        fields, template = split_options(options, self._find_adapter)
        prompt = self._reader.read_chat(messages, template, images, mm_processor_kwargs)
        return replace(self._make(prompt, params, request_id, compile_grammar=compile_grammar), **fields)

    def make_embedding(
        self,
        prompt: Prompt,
        *,
        request_id: str | None = None,
        truncate_prompt_tokens: int | None = None,
        prompt_name: str | None = None,
        **options: Unpack[RequestOptions],
    ) -> Request:
        """Returns the request for a prompt's embedding; the arguments are those of `make`.

        Args:
            prompt_name: which of the prompts in the model's files is put in front of the text; default: the one that
                they say. Token ids are taken as they are.
            truncate_prompt_tokens: keep only so many tokens, -1: as many as fit: the last ones or, where texts are
                read whole, the first ones.

        Raises:
            InvalidRequestError: names what is wrong.
        """
        check_truncation(truncate_prompt_tokens)
        if as_mapping(prompt).get("prompt") == "":
            raise InvalidRequestError("is empty; give at least one character", field="prompt", value=prompt)
        fields = _check_options(prompt, options, self._find_adapter)
        prompt = add_prompt(prompt, self._prompts, prompt_name)
        text, token_ids = self._cut(*self._reader.read_text(prompt), truncate_prompt_tokens, Task.POOL)
        return Request(self._name(request_id), token_ids, prompt=text, task=Task.POOL, **fields)

    def make_pair(
        self,
        first: str,
        second: str,
        *,
        request_id: str | None = None,
        truncate_prompt_tokens: int | None = None,
        max_tokens_per_doc: int | None = None,
        template: PairTemplate | None = None,
        **options: Unpack[RequestOptions],
    ) -> Request:
        """Returns the request for what the model makes of two texts together; the arguments are those of `make`.

        Args:
            truncate_prompt_tokens: at most so many tokens, -1: as many as fit; the longer text is cut first, at its
                end, and with a chat template the second.
            max_tokens_per_doc: at most so many tokens of the second text, before that.
            template: in place of the model's own.

        Raises:
            InvalidRequestError: names what is wrong.
            TokenizerError: there is no tokenizer or template that says how pairs are read.
        """
        check_truncation(truncate_prompt_tokens)
        most = self._max_model_len if truncate_prompt_tokens == -1 else truncate_prompt_tokens
        if max_tokens_per_doc is not None and max_tokens_per_doc < 1:
            message = f"must be at least 1, got {max_tokens_per_doc}"
            raise InvalidRequestError(message, field="max_tokens_per_doc", value=max_tokens_per_doc)
        fields = make_fields(options, self._find_adapter)
        ids = self._pairs.encode(first, second, most=most, most_of_second=max_tokens_per_doc, template=template)
        for token_id in ids:
            check_token_id("prompt_token_ids", token_id & ~TOKEN_TYPE, self._vocab_size)
        return Request(self._name(request_id), ids, task=Task.POOL, **fields)

    def _make(
        self,
        prompt: ReadPrompt,
        params: SamplingParams,
        request_id: str | None,
        task: Task = Task.GENERATE,
        compile_grammar: GrammarSource | None = None,
    ) -> Request:
        require_task(self._tasks, "generate")
        if not isinstance(params, SamplingParams):
            raise InvalidRequestError("must be SamplingParams", field="sampling_params", value=params)
        if prompt.images is not None and params.truncate_prompt_tokens is not None:
            raise InvalidRequestError("is not supported with images; leave it out", field="truncate_prompt_tokens")
        text, token_ids = self._cut(prompt.text, prompt.token_ids, params.truncate_prompt_tokens, task)
        if params.stop and self._tokenizer is None:
            raise InvalidRequestError(
                "stop strings need a tokenizer, and there is none", field="stop", value=params.stop
            )
        for field in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
            for token_id in getattr(params, field) or ():
                check_token_id(field, token_id, self._vocab_size)
        _check_logprobs("logprobs", params.logprobs, self._max_logprobs)
        _check_logprobs("prompt_logprobs", params.prompt_logprobs, limit_prompt_logprobs(self._max_logprobs))
        if params.extra_args is not None:
            params = replace(params, extra_args=_order_arguments(self._processor, params.extra_args))
        form = params.structured_outputs
        grammar = None if form is None else (compile_grammar or self.grammars.compile)(form)
        has_ids = params.allowed_token_ids is not None or params.suppress_tokens  # they take an automaton's place
        return Request(
            request_id=self._name(request_id),
            prompt_token_ids=token_ids,
            params=params,
            prompt=text,
            eos_token_ids=() if params.ignore_eos else self._eos_token_ids,
            seed=self._random.randint(0, MAX_SEED) if params.seed is None else params.seed & _SEED_BITS,
            bad_words=tuple(_tokenize_bad_words(params.bad_words, self._tokenizer, self._vocab_size)),
            grammar=grammar,
            automaton=None if grammar is None or has_ids else grammar.automaton,
            task=task,
            images=prompt.images,
        )

    def _name(self, request_id: str | None) -> str:
        return request_id if request_id is not None else f"request-{next(self._counter)}"

    def _cut(
        self, text: str | None, token_ids: tuple[int, ...], count: int | None, task: Task
    ) -> tuple[str | None, tuple[int, ...]]:
        """Returns a prompt, cut to its last `count` tokens (-1: as many as fit), which have no text then."""
        if not token_ids:
            raise InvalidRequestError("is empty; give at least one token", field="prompt", value=text)
        if count is None:
            return text, token_ids
        most = self._max_model_len - (task is Task.GENERATE)
        most = most if count < 0 else count
        return None, keep_start(self._tokenizer, text, token_ids, most) if self._reads_whole else token_ids[-most:]

    @property
    def grammars(self) -> GrammarCompiler:
        """Compiles and keeps grammars; InvalidRequestError without a tokenizer."""
        if self._tokenizer is None:
            raise InvalidRequestError("needs a tokenizer, and there is none", field="structured_outputs", value=None)
        if self._grammars is None:
            from jaxserve.features.grammars import GrammarCompiler

            self._grammars = GrammarCompiler(self._tokenizer, vocab_size=self._vocab_size)
        return self._grammars

    def warm_up(self) -> None:
        """Starts the grammar compiler's process ahead of the first grammar; needs a tokenizer and llguidance."""
        if self._tokenizer is not None:
            with contextlib.suppress(InvalidRequestError):  # raised again for a request with a grammar
                self.grammars.warm_up()


def _tokenize_bad_words(
    words: Sequence[str | Sequence[int]], tokenizer: Tokenizer | None, vocab_size: int
) -> Iterable[tuple[int, ...]]:
    """Yields each word's tokens without and with a space before it, as in vLLM; lists of ids unchanged."""
    for word in words:
        if not isinstance(word, str):
            if max(word) < vocab_size:
                yield tuple(word)
            continue
        if tokenizer is None:
            message = "bad words need a tokenizer, and there is none; give lists of token ids"
            raise InvalidRequestError(message, field="bad_words", value=word)
        plain = word.lstrip()
        spaced = tuple(tokenizer.encode(f" {plain}", add_special_tokens=False))
        bare = tuple(tokenizer.encode(plain, add_special_tokens=False))
        for tokens in dict.fromkeys((bare, spaced)):
            if not 1 <= len(tokens) <= MAX_BAD_WORD_TOKENS:
                message = f"at most {MAX_BAD_WORD_TOKENS} tokens each; {shorten(word)} has {len(tokens)}"
                raise InvalidRequestError(message, field="bad_words", value=word)
            if max(tokens) < vocab_size:  # else a token has no logit, and the word cannot be sampled
                yield tokens


def _order_arguments(processor: LogitsProcessor | None, arguments: Mapping[str, float]) -> dict[str, float]:
    """Returns the logits processor's arguments in the order that it declares."""
    if processor is None:
        message = "this engine has no logits_processor that would read them"
        raise InvalidRequestError(message, field="extra_args", value=arguments)
    names = processor.arguments
    if arguments.keys() != set(names):
        message = f"must be {', '.join(names) or 'empty'}, got {shorten(list(arguments))}"
        raise InvalidRequestError(message, field="extra_args", value=arguments)
    return {name: arguments[name] for name in names}


def _check_options(prompt: Prompt, options: RequestOptions, find_adapter: FindAdapter) -> dict[str, Any]:
    """Returns the fields of `make_fields`, with the prompt's own `cache_salt` if it has one."""
    if isinstance(prompt, Mapping) and prompt.get("cache_salt") is not None:
        options["cache_salt"] = prompt["cache_salt"]
    return make_fields(options, find_adapter)


def _check_logprobs(field: str, count: int | None, most: int) -> None:
    """Raises InvalidRequestError if more than `most` likeliest tokens are wanted; -1 stands for all."""
    if count is None or most < 0 or 0 <= count <= most:
        return
    message = f"at most {most} likeliest tokens, got {'all' if count < 0 else count}; max_logprobs raises the limit"
    raise InvalidRequestError(message, field=field, value=count)

"""Fields that the bodies of several endpoints share."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, FailFast, Field, model_validator
from pydantic_core import PydanticCustomError

from jaxserve.errors import InvalidRequestError
from jaxserve.sampling_params import MAX_LOGIT_BIAS, OutputKind, SamplingParams
from jaxserve.server.protocol.foreign import SAMPLING_FIELDS, ForeignFields, is_harmless
from jaxserve.structured_params import StructuredOutputsParams


class AtFirst(FailFast):
    """Refuses a list at its first invalid item: a report of every item would be longer than the list."""

    __hash__ = object.__hash__  # pydantic's own does not work in a union


def _at_most(count: int) -> BeforeValidator:
    """Refuses a mapping with more members before they are validated, for the same reason."""

    def check(value: Any) -> Any:
        if isinstance(value, dict) and len(value) > count:
            raise PydanticCustomError("too_long", f"at most {count} members are possible")
        return value

    return BeforeValidator(check)


def _to_integer(value: Any) -> Any:
    """Returns 5 for 5.0: JSON has one kind of number, and some clients write every number with a point."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _refuse_tier(value: Any) -> Any:
    """Refuses OpenAI's tier of reserved capacity by the name of the nearest."""
    if value == "scale":
        message = "'scale' is not sold here; send 'auto', 'default', 'flex' or 'priority', which is the nearest"
        raise InvalidRequestError(message, field="service_tier", value=value)
    return value


Integer = Annotated[int, BeforeValidator(_to_integer)]
Texts = Annotated[list[str], AtFirst()]
Ids = Annotated[list[int], AtFirst()]
Objects = Annotated[list[dict[str, Any]], AtFirst()]
Prompts = str | Texts | Ids | Annotated[list[Ids], AtFirst()]
Labels = Annotated[dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]], _at_most(16)]


class Body(BaseModel):
    """A request's body. Values are not converted, and unknown fields are errors."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=())

    # OpenAI's fields that would change the answer and are not supported, with what to use instead.
    refused: ClassVar[dict[str, str]] = {}
    # Values of these fields that change nothing, beside null, false and [].
    neutral: ClassVar[dict[str, tuple[Any, ...]]] = {}
    foreign: ClassVar[ForeignFields] = {}

    @model_validator(mode="before")
    @classmethod
    def refuse_unknown(cls, value: Any) -> Any:
        """Refuses the first unknown field: a report of all would be longer than the body."""
        known = {field.alias or name for name, field in cls.model_fields.items()}
        unknown = [name for name in value if name not in known] if isinstance(value, dict) else []
        for name in unknown:
            if name not in cls.foreign:
                raise PydanticCustomError("unknown_parameter", "unknown parameter", {"name": name})
            harmless, instead = cls.foreign[name]
            if not is_harmless(value[name], harmless):
                raise InvalidRequestError(f"is not supported; {instead}", field=name, value=value[name])
        return {name: value[name] for name in value if name in known} if unknown else value

    def refuse_unsupported(self, inside: str = "") -> None:
        """Refuses fields that are known but not supported.

        Args:
            inside: the field whose value this is, with a trailing dot.

        Raises:
            InvalidRequestError: names the field and what to use instead.
        """
        for name, instead in self.refused.items():
            value = getattr(self, name)
            says_nothing = isinstance(value, Body) and not any(value.model_dump().values())
            if not (says_nothing or value is False or value == [] or is_harmless(value, self.neutral.get(name, ()))):
                raise InvalidRequestError(f"is not supported; {instead}", field=f"{inside}{name}", value=value)


Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]  # how long to reason


class StreamOptions(Body):
    """What a stream has beside the answer."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None  # vLLM's: usage so far in every chunk, with include_usage
    include_obfuscation: bool | None = None
    refused: ClassVar[dict[str, str]] = {"include_obfuscation": "leave it out"}


class StructuredOutputs(Body):
    """The format of the answer, in vLLM's fields."""

    json_schema: dict[str, Any] | str | None = Field(None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    choice: Texts | None = None
    grammar: str | None = None
    structural_tag: dict[str, Any] | str | None = None
    disable_any_whitespace: bool = False
    whitespace_pattern: str | None = None

    def to_params(self) -> StructuredOutputsParams:
        """Returns the engine's parameters."""
        given = self.model_dump(by_alias=True, exclude_unset=True)
        return StructuredOutputsParams(**given)


class JsonSchema(Body):
    """A named schema."""

    name: str = Field(max_length=64)
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None  # ignored: the answer always matches the schema


class ResponseFormat(Body):
    """The format of the answer, in OpenAI's fields; those of a structural tag are vLLM's."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchema | None = None
    format: dict[str, Any] | None = None
    structures: list[dict[str, Any]] | None = None
    triggers: Texts | None = None

    def to_params(self) -> StructuredOutputsParams | None:
        """Returns the engine's parameters; None for plain text."""
        tag = self.model_dump(exclude_none=True, exclude={"type", "json_schema"})
        if self.type != "json_schema" and self.json_schema is not None:
            message = f"needs type 'json_schema', got {self.type!r}"
            raise InvalidRequestError(message, field="response_format.json_schema", value=self.type)
        if self.type == "structural_tag":
            return StructuredOutputsParams(structural_tag=tag)
        for name in tag:
            message = f"needs type 'structural_tag', got {self.type!r}"
            raise InvalidRequestError(message, field=f"response_format.{name}", value=self.type)
        if self.type == "text":
            return None
        if self.type == "json_object":
            return StructuredOutputsParams(json_object=True)
        if self.json_schema is None or self.json_schema.schema_ is None:
            message = "needs json_schema with a schema when type is json_schema"
            raise InvalidRequestError(message, field="response_format", value=self.type)
        return StructuredOutputsParams(json=self.json_schema.schema_)


class EngineFields(Body):
    """Fields of every request that the engine runs."""

    model: str | None = None  # default: the served model
    user: str | None = Field(None, max_length=512)  # a label without effect: it counts within its API key
    priority: Integer | None = None  # smaller runs first within a tier; None: 0, or the best allowed if that is worse
    service_tier: Annotated[Literal["auto", "default", "flex", "priority"], BeforeValidator(_refuse_tier)] | None = None
    timeout: float | None = Field(None, gt=0)  # seconds until the request is ended; not OpenAI's
    cache_salt: str | None = Field(None, max_length=256)  # requests with different salts share no cached prefixes
    truncate_prompt_tokens: Integer | None = None


class SamplingFields(EngineFields):
    """Sampling parameters: OpenAI's fields and vLLM's, by their names in `SamplingParams`."""

    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: Annotated[dict[str, float], _at_most(MAX_LOGIT_BIAS)] | None = None
    n: Integer | None = None
    seed: Integer | None = None
    stop: str | Texts | None = None
    temperature: float | None = None
    top_p: float | None = None
    # vLLM's
    top_k: Integer | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: Integer | None = None
    ignore_eos: bool | None = None
    stop_token_ids: Ids | None = None
    allowed_token_ids: Ids | None = None
    bad_words: Texts | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    prompt_logprobs: Integer | None = None
    structured_outputs: StructuredOutputs | None = None
    extra_args: Annotated[dict[str, float], _at_most(64)] | None = None
    # Streaming and the answer's form
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    foreign: ClassVar[ForeignFields] = SAMPLING_FIELDS

    def list_params(self, **more: Any) -> dict[str, Any]:
        """Returns the sampling parameters that the body gives, and `more`, by their names in `SamplingParams`."""
        given = {name: value for name in _SAMPLING if (value := getattr(self, name)) is not None}
        if self.top_p == 0:  # the likeliest token alone, as OpenAI's clients mean it
            given |= {"top_p": 1.0, "temperature": 0.0}
        return {**given, "output_kind": OutputKind.DELTA if self.stream else OutputKind.FINAL_ONLY, **more}

    def check_stream(self) -> None:
        """Refuses stream options without a stream."""
        if self.stream_options is not None:
            self.stream_options.refuse_unsupported("stream_options.")
            if not self.stream:
                message = "is only allowed when stream is true"
                raise InvalidRequestError(message, field="stream_options", value=True)

    def drop_conversation(self) -> None:
        """Forgets what the body asks about, which a writer of the answer does not need."""
        for name in ("messages", "input"):
            if name in type(self).model_fields:
                setattr(self, name, [])

    @property
    def wants_usage(self) -> bool:
        """Whether the stream ends with its usage."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def wants_usage_so_far(self) -> bool:
        """Whether every chunk of the stream has the usage so far."""
        return self.wants_usage and bool(self.stream_options and self.stream_options.continuous_usage_stats)


_SAMPLING = [name for name in SamplingFields.model_fields if name in SamplingParams.__dataclass_fields__]
_SAMPLING.remove("structured_outputs")  # `read_form` reads it, with the field of OpenAI's


class PromptTokensDetails(BaseModel):
    cached_tokens: int = 0


class CompletionTokensDetails(BaseModel):
    reasoning_tokens: int = 0


class Usage(BaseModel):
    """Token counts of a request and its answers."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    total_tokens: int = 0
    prompt_tokens_details: PromptTokensDetails | None = None
    completion_tokens_details: CompletionTokensDetails | None = None

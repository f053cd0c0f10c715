"""`/tokenize`, `/detokenize`, `/v1/responses/input_tokens`, `/v1/embeddings`, `/v1/models` and errors."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, Field

from jaxserve.server.protocol.fields import Body, EngineFields, Ids, Integer, Objects, Prompts, Usage
from jaxserve.server.protocol.foreign import EMBEDDING_FIELDS, TOKENIZE_FIELDS, ForeignFields


class TokenizeRequest(Body):
    """A text or a conversation to tokenize."""

    model: str | None = None
    prompt: str | None = None
    messages: Objects | None = None
    tools: Objects | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    mm_processor_kwargs: dict[str, Any] | None = None  # options of the image processor
    return_token_strs: bool | None = None
    foreign: ClassVar[ForeignFields] = TOKENIZE_FIELDS


class TokenizeResponse(BaseModel):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class InputTokens(BaseModel):
    """How long the input of a response would be."""

    object: Literal["response.input_tokens"] = "response.input_tokens"
    input_tokens: int


class DetokenizeRequest(Body):
    """Token ids to decode."""

    model: str | None = None
    tokens: Ids


class DetokenizeResponse(BaseModel):
    prompt: str


class EmbeddingRequest(EngineFields):
    """Texts to embed."""

    input: Prompts
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[Integer, Field(ge=1)] | None = None
    prompt_name: str | None = None
    foreign: ClassVar[ForeignFields] = EMBEDDING_FIELDS


class Embedding(BaseModel):
    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str


class EmbeddingList(BaseModel):
    object: Literal["list"] = "list"
    data: list[Embedding]
    model: str
    usage: Usage
    service_tier: str | None = None


class ModelCard(BaseModel):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "jaxserve"
    root: str
    parent: str | None = None
    max_model_len: int
    tasks: list[str]


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[ModelCard]


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(BaseModel):
    """The body of every error."""

    error: ErrorDetail

"""Bodies and answers of `/rerank`, `/score`, `/classify`, `/pooling` and `/v2/embed`, in vLLM's and Cohere's fields."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, Field, WithJsonSchema

from jaxserve.server.protocol.fields import AtFirst, EngineFields, Integer, Prompts, Texts, Usage
from jaxserve.server.protocol.foreign import COHERE_FIELDS, POOLING_FIELDS, ForeignFields


class PairFields(EngineFields):
    """Fields of requests about pairs of texts."""

    max_tokens_per_doc: Integer | None = None
    use_activation: bool | None = None
    chat_template: str | None = None
    foreign: ClassVar[ForeignFields] = POOLING_FIELDS


def _read_document(value: Any) -> Any:
    """Returns the text of a document that is an object with nothing else."""
    return value["text"] if isinstance(value, dict) and value.keys() == {"text"} else value


_OBJECT = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}
TextDocument = Annotated[
    str,
    BeforeValidator(_read_document),
    WithJsonSchema({"anyOf": [{"type": "string"}, {**_OBJECT, "additionalProperties": False}]}),
]


class RerankRequest(PairFields):
    """Documents to be ordered by how well they answer a query."""

    query: str
    documents: Annotated[list[TextDocument], AtFirst()]
    top_n: Annotated[Integer, Field(ge=1)] | None = None  # of the answer
    return_documents: bool = True


class RankedDocument(BaseModel):
    index: int  # among the documents of the request
    relevance_score: float
    document: dict[str, str] | None = None


class RerankResponse(BaseModel):
    """The documents, best first."""

    id: str
    model: str
    usage: Usage
    results: list[RankedDocument]
    service_tier: str | None = None


class ListFields(BaseModel):
    """Fields of answers that are lists. Each has `data` of its own."""

    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    usage: Usage
    service_tier: str | None = None


class ScoreRequest(PairFields):
    """Pairs of texts: one with each of many, or each of many with its own."""

    text_1: str | Texts | None = None
    text_2: str | Texts | None = None
    queries: str | Texts | None = None
    documents: str | Texts | None = None


class Score(BaseModel):
    index: int
    object: Literal["score"] = "score"
    score: float


class ScoreList(ListFields):
    data: list[Score]


class ClassifyRequest(EngineFields):
    """Texts to classify."""

    input: Prompts
    use_activation: bool | None = None
    foreign: ClassVar[ForeignFields] = POOLING_FIELDS


class Classes(BaseModel):
    index: int
    label: str  # of the likeliest class
    probs: list[float]
    num_classes: int


class ClassesList(ListFields):
    data: list[Classes]


class PoolingRequest(ClassifyRequest):
    """Texts to embed, whole or token by token, or to classify."""

    task: Literal["embed", "classify", "token_embed", "token_classify"] | None = None  # None: the model's own
    dimensions: Annotated[Integer, Field(ge=1)] | None = None


class Pooled(BaseModel):
    index: int
    object: Literal["pooling"] = "pooling"
    data: list[float] | list[list[float]]  # of the text, or of each of its tokens


class PooledList(ListFields):
    data: list[Pooled]


class CohereEmbedRequest(EngineFields):
    """Texts to embed, in Cohere's fields."""

    texts: Texts
    input_type: Literal["search_document", "search_query", "classification", "clustering"] | None = None
    embedding_types: list[Literal["float", "base64"]] | None = None
    output_dimension: Annotated[Integer, Field(ge=1)] | None = None
    max_tokens: Annotated[Integer, Field(ge=1)] | None = None
    truncate: Literal["NONE", "START", "END"] | None = None
    foreign: ClassVar[ForeignFields] = COHERE_FIELDS


class CohereEmbeddings(BaseModel):
    """The vectors of the texts, in the order of these, in each of the forms that were asked for."""

    id: str
    embeddings: dict[str, list[Any]]
    texts: list[str]
    meta: dict[str, Any]
    response_type: Literal["embeddings_by_type"] = "embeddings_by_type"

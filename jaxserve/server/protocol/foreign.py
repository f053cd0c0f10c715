"""Fields that clients and routers made for other servers send, by endpoint.

Each has the values that change nothing here, beside null, and the end of the error for all others.
"""

from __future__ import annotations

from typing import Any

ForeignFields = dict[str, tuple[tuple[Any, ...], str]]
_IS_A_FORM = "send structured_outputs, an object with json, regex, choice, grammar or structural_tag"
_IS_TEXT = "models read text only"
_IS_READ = "images are read in one way; mm_processor_kwargs makes them smaller"
_IS_CUT_LEFT = "prompts are cut at their beginning"
SAMPLING_FIELDS: ForeignFields = {
    **dict.fromkeys(("guided_json", "guided_regex", "guided_choice", "guided_grammar"), ((), _IS_A_FORM)),
    **dict.fromkeys(("guided_decoding", "guided_json_object", "json_schema", "regex", "ebnf"), ((), _IS_A_FORM)),
    "structural_tag": ((), _IS_A_FORM),
    "guided_decoding_backend": (("auto", "guidance"), "grammars always use llguidance"),
    "guided_whitespace_pattern": ((), "send structured_outputs with json and whitespace_pattern"),
    "use_beam_search": ((False,), "beam search is in the Python API only"),
    "length_penalty": ((1.0,), "it belongs to beam search, which is in the Python API only"),
    "early_stopping": ((False,), "it belongs to beam search, which is in the Python API only"),
    "logits_processors": (([],), "the server's own logits_processor reads extra_args"),
    "vllm_xargs": (({},), "the server's own logits_processor reads extra_args"),
    "return_tokens_as_token_ids": ((False,), "send return_token_ids"),
    "lora_path": ((), "the name of an adapter is a model's; send it as model"),
    "no_stop_trim": ((False,), "send include_stop_str_in_output"),
    "return_hidden_states": ((False,), "use /v1/embeddings"),
    "separate_reasoning": ((True,), "the server's --reasoning-parser separates reasoning"),
    "stream_reasoning": ((True,), "reasoning is streamed as it comes"),
    "thinking_token_budget": ((), "max_tokens bounds reasoning and answer together"),
    "repetition_detection": ((), "send repetition_penalty"),
    "truncation_side": (("left",), _IS_CUT_LEFT),
    "documents": (([],), "send them in a message, or in chat_template_kwargs if the template reads them"),
    "prompt_embeds": ((), "send text or token ids"),
    "mm_processor_kwargs": (({},), "/v1/chat/completions and /v1/responses have it"),  # and a field of this name
    "media_io_kwargs": (({},), _IS_READ),
    "kv_transfer_params": (({},), "no request moves pages between servers"),
    "add_special_tokens": ((False,), "the chat template writes them"),  # completions have a field of this name
    "enable_response_messages": ((False,), "the output items are the answer"),
    "previous_input_messages": (([],), "send the whole conversation as input"),
    "request_id": ((), "send the header X-Request-Id"),  # chat and completions have a field of this name
}
EMBEDDING_FIELDS: ForeignFields = {
    "normalize": ((True,), "vectors have length 1"),
    "use_activation": ((True,), "vectors have length 1"),
    "embed_dtype": (("float32",), "vectors are float32"),
    "endianness": (("native", "little"), "vectors are little-endian"),
    "add_special_tokens": ((True,), "send token ids for a text without them"),
    "truncation_side": (("left",), _IS_CUT_LEFT),
    "messages": ((), "send their text as input"),
    "mm_processor_kwargs": (({},), _IS_TEXT),
    "request_id": ((), "send the header X-Request-Id"),
}
POOLING_FIELDS: ForeignFields = {
    **dict.fromkeys(("data_1", "data_2", "items"), ((), "send text_1 and text_2, or queries and documents")),
    "activation": ((True,), "send use_activation"),
    "softmax": ((True,), "send use_activation"),
    "instruction": ((), "put it into the query, or into the chat template"),
    "max_chunks_per_doc": ((1,), "a document is read as one text; send max_tokens_per_doc"),
    "rank_fields": ((["text"],), "a document is its text"),
    "encoding_format": (("float",), "answers are numbers; /v1/embeddings has base64"),
    "embed_dtype": (("float32",), "vectors are float32"),
    "add_special_tokens": ((True,), "send token ids for a text without them"),
    "messages": ((), "send their text"),
    "chat_template_kwargs": (({},), "send the whole chat_template"),
    "mm_processor_kwargs": (({},), _IS_TEXT),
    "request_id": ((), "send the header X-Request-Id"),
}
COHERE_FIELDS: ForeignFields = {
    "images": (([],), _IS_TEXT),
    "inputs": (([],), "send texts"),
}
TOKENIZE_FIELDS: ForeignFields = {
    "chat_template": ((), "the server's own template is used"),
    "media_io_kwargs": (({},), _IS_READ),
}


def is_harmless(value: Any, harmless: tuple[Any, ...]) -> bool:
    """Whether a value changes nothing. Numbers are no booleans here, though Python's 0 is equal to False."""
    same = (each for each in harmless if isinstance(each, bool) is isinstance(value, bool))
    return value is None or value in same

"""From prompts to requests: when they run and until when, and what a chat template is told."""

from __future__ import annotations

import math
from typing import Any

import pytest

from jaxserve.engine.prompts import RequestFactory
from jaxserve.errors import InvalidRequestError
from jaxserve.request import DEFAULT_TENANT, ServiceTier, Tenant
from jaxserve.sampling_params import SamplingParams
from jaxserve.tokenizers import chat

IDS = {"prompt_token_ids": [5, 6, 7]}
PARAMS = SamplingParams(temperature=0)


def make_factory(tokenizer: Any = None) -> RequestFactory:
    return RequestFactory(tokenizer, vocab_size=50, eos_token_ids=(), seed=0, max_model_len=64, max_logprobs=5)


def test_priority_deadline_and_salt_reach_the_request() -> None:
    request = make_factory().make(IDS, PARAMS, request_id="a", cache_salt="s", priority=-(2**31), deadline=12)
    assert (request.request_id, request.cache_salt, request.priority, request.deadline) == ("a", "s", -(2**31), 12)
    plain = make_factory().make(IDS, PARAMS)
    assert (plain.priority, plain.deadline, plain.cache_salt) == (0, None, "")
    assert (plain.service_tier, plain.tenant) == (ServiceTier.DEFAULT, DEFAULT_TENANT)


@pytest.mark.parametrize(("seed", "bits"), [(-2, 2**64 - 2), (-(2**63), 2**63), (2**63 - 1, 2**63 - 1), (0, 0)])
def test_a_seed_is_any_signed_number_of_64_bits(seed: int, bits: int) -> None:
    assert make_factory().make(IDS, SamplingParams(seed=seed)).seed == bits


@pytest.mark.parametrize(
    ("given", "tier"),
    [
        *((str(tier), tier) for tier in ServiceTier),
        *((tier, tier) for tier in ServiceTier),
        ("auto", ServiceTier.DEFAULT),
    ],
)
def test_tiers_have_openais_names(given: Any, tier: ServiceTier) -> None:
    tenant, factory = Tenant("a", 2.0), make_factory()
    for make in (lambda **options: factory.make(IDS, PARAMS, **options), lambda **o: factory.make_embedding(IDS, **o)):
        request = make(service_tier=given, tenant=tenant)
        assert request.service_tier is tier and request.tenant is tenant


@pytest.mark.parametrize("tier", ["fast", "Flex", "", None, 0, True, ["flex"]])
def test_other_tiers_are_refused_with_the_known_ones(tier: Any) -> None:
    with pytest.raises(InvalidRequestError, match=r"service_tier: .*auto, priority, default, flex, got "):
        make_factory().make(IDS, PARAMS, service_tier=tier)


@pytest.mark.parametrize("priority", [2**31, -(2**31) - 1, 1.0, True, None, "1", math.nan])
def test_bad_priorities_are_named(priority: Any) -> None:
    with pytest.raises(InvalidRequestError, match=r"priority: .*\[-2147483648, 2147483648\)"):
        make_factory().make(IDS, PARAMS, priority=priority)


@pytest.mark.parametrize("deadline", [math.nan, math.inf, -math.inf, "soon", True])
def test_bad_deadlines_are_named(deadline: Any) -> None:
    with pytest.raises(InvalidRequestError, match=r"^deadline: .*finite"):
        make_factory().make(IDS, PARAMS, deadline=deadline)


class Plain:
    eos_token_ids = ()

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Texts after a space are one token that the model, whose vocabulary is 50, has no logit for."""
        return [50] if text.startswith(" ") else [7, 8]


def test_everything_about_a_conversation_reaches_its_template(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}

    def encode(tokenizer: Any, messages: Any, **options: Any) -> tuple[str, list[int]]:
        seen.update(options)
        return "text", [1, 2]

    monkeypatch.setattr(chat, "encode_chat", encode)
    tool = {"type": "function", "function": {"name": "f"}}
    request = make_factory(Plain()).make_chat(
        [{"role": "user", "content": "hi"}],
        PARAMS,
        tools=[tool],
        chat_template="{{ 1 }}",
        add_generation_prompt=False,
        continue_final_message=True,
        variables={"enable_thinking": True},
        priority=3,
        deadline=4.5,
        cache_salt="s",
        service_tier="flex",
        tenant=Tenant("a"),
    )
    assert (request.prompt, request.prompt_token_ids) == ("text", (1, 2))
    assert (request.service_tier, request.tenant) == (ServiceTier.FLEX, Tenant("a"))
    assert (request.priority, request.deadline, request.cache_salt) == (3, 4.5, "s")
    assert seen == {
        "tools": [tool],
        "chat_template": "{{ 1 }}",
        "add_generation_prompt": False,
        "continue_final_message": True,
        "variables": {"enable_thinking": True},
    }


def test_bad_words_of_tokens_without_a_logit_cannot_come_anyway() -> None:
    request = make_factory(Plain()).make(IDS, SamplingParams(temperature=0, bad_words=["no"]))
    assert request.bad_words == ((7, 8),)


def test_bad_words_may_be_lists_of_ids_and_need_no_tokenizer_then() -> None:
    words = [[3], [4, 5], [6, 50]]  # the last has no logit
    assert make_factory().make(IDS, SamplingParams(bad_words=words)).bad_words == ((3,), (4, 5))
    with pytest.raises(InvalidRequestError, match=r"^bad_words: .*tokenizer.*token ids"):
        make_factory().make(IDS, SamplingParams(bad_words=[[3], "no"]))


def test_prompts_have_every_form_of_the_field() -> None:
    make = make_factory(Plain()).make
    both = make({"prompt": "hi", "prompt_token_ids": [5, 6], "cache_salt": "own"}, PARAMS, cache_salt="theirs")
    assert (both.prompt, both.prompt_token_ids, both.cache_salt) == ("hi", (5, 6), "own")
    assert make([5, 6], PARAMS).prompt_token_ids == (5, 6)
    assert make({"prompt": "hi", "cache_salt": "own"}, PARAMS).cache_salt == "own"
    with pytest.raises(InvalidRequestError, match="cache_salt"):
        make({"prompt": "hi", "cache_salt": 0}, PARAMS, cache_salt="theirs")


@pytest.mark.parametrize(
    ("prompt", "field"),
    [
        ({"cache_salt": "s"}, "prompt"),
        ({"prompt": "hi", "multi_modal_data": {"image": []}}, "multi_modal_data"),
        ({"prompt": "hi", "mm_processor_kwargs": {"max_pixels": 1}}, "mm_processor_kwargs"),
        ({"prompt": "hi", "multi_modal_uuids": {"image": ["a"]}}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": 5, "prompt_token_ids": [5]}, "prompt"),
        ({"prompt": "hi", "cache_salt": 5}, "cache_salt"),
        ([], "prompt"),
        ([5, "a"], "prompt_token_ids"),
        (5, "prompt"),
    ],
)
def test_malformed_prompts_are_named(prompt: Any, field: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        make_factory(Plain()).make(prompt, PARAMS)
    assert caught.value.field == field

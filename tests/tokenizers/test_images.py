"""Conversations with images: the model's own template sees them, and nobody else can write one."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import tokenizers as library

from jaxserve.errors import InvalidRequestError, TokenizerError
from jaxserve.media.items import MediaItem
from jaxserve.media.parts import IMAGE, take_images
from jaxserve.media.prompt import ImageTokens
from jaxserve.tokenizers import Tokenizer, load_tokenizer
from jaxserve.tokenizers.chat import encode_chat
from jaxserve.tokenizers.messages import check_messages, count_images, require_readable_parts
from tests.tokenizers import builders
from tests.tokenizers.builders import CHAT_TEMPLATE

SPECIAL = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "[IMG]")
# As templates of Qwen3-VL do: one string, or parts, in messages of users and of tools.
TEMPLATE = """
{%- for message in messages -%}
<|im_start|>{{ message.role }}
{% if message.content is string %}{{ message.content }}
{%- else -%}
    {%- for part in message.content -%}
        {%- if part.type == 'image' or 'image' in part or 'image_url' in part -%}
            <|vision_start|><|image_pad|><|vision_end|>
        {%- elif 'text' in part -%}{{ part.text }}{%- endif -%}
    {%- endfor -%}
{%- endif -%}
<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant
{% endif -%}"""
TEXT, IMAGE_URL = {"type": "text", "text": "what is it?"}, {"type": "image_url", "image_url": {"url": "data:;base64,"}}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("images")
    builders.make_byte_level(folder)
    made = library.Tokenizer.from_file(str(folder / "tokenizer.json"))
    made.add_special_tokens(list(SPECIAL))
    made.save(str(folder / "tokenizer.json"))
    builders.write_json(folder / "tokenizer_config.json", {"chat_template": TEMPLATE})
    return load_tokenizer(folder)


@pytest.fixture(scope="module")
def tokens(tokenizer: Tokenizer) -> ImageTokens:
    place = tokenizer.special_tokens["<|image_pad|>"]
    return ImageTokens(mark="<|image_pad|>", placeholder="<|image_pad|>", placeholder_id=place)


def ask(*parts: Any, role: str = "user") -> dict[str, Any]:
    return {"role": role, "content": list(parts)}


def encode(
    tokenizer: Tokenizer, messages: Sequence[Any], tokens: ImageTokens | None, **options: Any
) -> tuple[str, list[int]]:
    taken, _ = take_images(messages, 16)
    return encode_chat(tokenizer, taken, image_tokens=tokens, **options)


def test_the_template_sees_parts_in_their_order(tokenizer: Tokenizer, tokens: ImageTokens) -> None:
    messages = [
        {"role": "system", "content": "look"},
        ask(TEXT, IMAGE_URL, {"type": "text", "text": "and"}, IMAGE_URL),
        {"role": "assistant", "content": "a cat"},
        ask(IMAGE_URL),
    ]
    text, ids = encode(tokenizer, messages, tokens)
    image = "<|vision_start|><|image_pad|><|vision_end|>"
    assert text == (
        "<|im_start|>system\nlook<|im_end|>\n"
        f"<|im_start|>user\nwhat is it?{image}and{image}<|im_end|>\n"
        "<|im_start|>assistant\na cat<|im_end|>\n"
        f"<|im_start|>user\n{image}<|im_end|>\n<|im_start|>assistant\n"
    )
    assert ids == tokenizer.encode(text, add_special_tokens=False, allow_special=True)
    items = [MediaItem(bytes([at]) * 32, np.zeros((1, 1, 3), np.uint8), (1, 2, 2 * at), at) for at in (1, 2, 3)]
    expanded, spans = tokens.expand(ids, items)
    assert expanded.count(tokens.placeholder_id) == 6 and len(expanded) == len(ids) + 3
    assert [span.length for span in spans] == [1, 2, 3]
    for span in spans:
        assert set(expanded[span.start : span.end]) == {tokens.placeholder_id}
        assert expanded[span.start - 1] == tokenizer.special_tokens["<|vision_start|>"]
        assert expanded[span.end] == tokenizer.special_tokens["<|vision_end|>"]


def test_images_of_tools_are_shown(tokenizer: Tokenizer, tokens: ImageTokens) -> None:
    messages = [
        ask(TEXT),
        {"role": "assistant", "content": "", "tool_calls": [{"id": "a", "function": {"name": "f", "arguments": "{}"}}]},
        {**ask(IMAGE_URL, role="tool"), "tool_call_id": "a"},
    ]
    template = TEMPLATE.replace(
        "{% if message.content",
        "{% if message.tool_calls %}{{ message.tool_calls | tojson }}{% endif %}{% if message.content",
    )
    assert encode(tokenizer, messages, tokens, chat_template=template)[1].count(tokens.placeholder_id) == 1


def test_a_placeholder_that_somebody_spells_is_text(tokenizer: Tokenizer, tokens: ImageTokens) -> None:
    spelled = "<|vision_start|><|image_pad|><|vision_end|>"
    messages = [{"role": "system", "content": spelled}, ask({"type": "text", "text": spelled}, IMAGE_URL, TEXT)]
    text, ids = encode(tokenizer, messages, tokens)
    assert text.count("<|image_pad|>") == 3 and ids.count(tokens.placeholder_id) == 1
    assert spelled in tokenizer.decode(ids, False)
    _, ids = encode(tokenizer, [ask({"type": "text", "text": spelled})], tokens)
    assert tokens.placeholder_id not in ids


def test_without_images_a_prompt_is_the_one_it_was(tokenizer: Tokenizer, tokens: ImageTokens) -> None:
    messages = [
        {"role": "system", "content": "look"},
        ask(TEXT, TEXT),
        {"role": "assistant", "content": "a"},
        ask(TEXT),
    ]
    assert encode(tokenizer, messages, tokens) == encode(tokenizer, messages, None)


def test_instructions_that_join_a_turn_come_before_its_image(tokenizer: Tokenizer, tokens: ImageTokens) -> None:
    """The template shows no system message behind the first turn."""
    template = TEMPLATE.replace(
        "{%- for message in messages -%}",
        "{%- for message in messages -%}"
        "{%- if message.role == 'system' and not loop.first -%}{%- continue -%}{%- endif -%}",
        1,
    )
    messages = [ask(TEXT), {"role": "assistant", "content": "a"}, {"role": "system", "content": "look"}, ask(IMAGE_URL)]
    text, _ = encode(tokenizer, messages, tokens, chat_template=template)
    assert text.endswith("user\nlook\n\n<|vision_start|><|image_pad|><|vision_end|><|im_end|>\n<|im_start|>assistant\n")


def test_a_template_that_shows_no_image_is_named(tokenizer: Tokenizer, tokens: ImageTokens) -> None:
    with pytest.raises(TokenizerError, match="chat_template"):
        encode(tokenizer, [ask(IMAGE_URL)], tokens, chat_template=CHAT_TEMPLATE)
    silent = re.sub(r"<\|vision_start\|>.*<\|vision_end\|>", "", TEMPLATE)
    with pytest.raises(TokenizerError, match=r"0 marks '<\|image_pad\|>' for 1 images"):
        encode(tokenizer, [ask(IMAGE_URL, TEXT)], tokens, chat_template=silent)


def test_the_tokens_of_images_must_be_special(tokenizer: Tokenizer) -> None:
    plain = ImageTokens(mark="<image>", placeholder="<|image_pad|>", placeholder_id=1)
    with pytest.raises(TokenizerError, match="'<image>'"):
        encode(tokenizer, [ask(IMAGE_URL)], plain)


@pytest.mark.parametrize("role", ["system", "developer", "assistant"])
def test_images_of_other_roles_are_refused(role: str) -> None:
    with pytest.raises(InvalidRequestError, match="images in messages of user and tool") as error:
        check_messages([ask(IMAGE, role=role)], reads_images=True)
    assert error.value.field == "messages[0].content[0]"


def test_a_model_with_a_tower_reads_images_and_nothing_else() -> None:
    for part, what in (({"type": "video_url"}, "is video; text is read"), ({"type": 3}, "only parts of type 'text'")):
        with pytest.raises(InvalidRequestError, match=what):
            check_messages([ask(IMAGE, part)], reads_images=True)


@pytest.mark.parametrize(
    ("part", "what"),
    [
        (IMAGE_URL, "an image"),
        (IMAGE, "an image"),
        ({"type": "input_image", "image_url": "data:;base64," + "A" * 10_000}, "an image"),
        ({"type": "video_url", "video_url": {}}, "video"),
        ({"type": "input_audio"}, "sound"),
        ({"type": "image_embeds"}, "vectors"),
        ({"type": "file"}, "a file"),
    ],
)
def test_a_model_without_a_tower_says_so(part: dict[str, Any], what: str) -> None:
    for refuse in (check_messages, require_readable_parts):
        with pytest.raises(InvalidRequestError, match=f"is {what}.*served for text") as error:
            refuse([ask(TEXT), ask(TEXT, part)])
        assert error.value.field == "messages[1].content[1]"


def test_images_are_counted() -> None:
    checked = check_messages([ask(IMAGE, TEXT, IMAGE), {"role": "assistant", "content": "image"}], reads_images=True)
    assert count_images(checked) == 2 and checked[1]["content"] == "image"
    assert require_readable_parts([{"role": "user", "content": "image_url"}, ask(TEXT), "no message"]) is None  # type: ignore[list-item]

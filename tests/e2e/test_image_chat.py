"""Conversations and grammars with images, through a tiny model with a tokenizer."""

from __future__ import annotations

import base64
import io
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import tokenizers as library
from PIL import Image
from tokenizers import decoders, models, pre_tokenizers

from jaxserve import LLM, SamplingParams, StructuredOutputsParams
from jaxserve.errors import InvalidRequestError
from tests.e2e.helpers import greedy
from tests.e2e.image_prompts import IMAGE, PAGE, TOWERS, make_seeing, picture
from tests.engine.image_models import TEMPLATE

_CHARACTERS = [*"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.,?", *"ĠĊ"]
LETTERS: dict[str, Any] = {"allowed_token_ids": list(range(3, 29))}
_SPECIAL = {78: "<|vision_start|>", 79: "<|vision_end|>", 80: "<|image_pad|>", 81: "<|im_start|>", 82: "<|im_end|>"}


def write_tokenizer(folder: Path) -> None:
    """A byte-level one whose tokens are single characters, with the ids of the golden model."""
    vocab = {character: index for index, character in enumerate(["<none>", "<pad>", "<eos>", *_CHARACTERS])}
    vocab |= {f"<{index}>": index for index in range(len(vocab), 78)} | {
        text: index for index, text in _SPECIAL.items()
    }
    made = library.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<eos>", *_SPECIAL.values()])
    made.save(str(folder / "tokenizer.json"))
    settings = {"chat_template": TEMPLATE, "eos_token": "<eos>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    folder = tmp_path_factory.mktemp("seeing")
    shutil.copytree(TOWERS / "qwen3_vl", folder, dirs_exist_ok=True)
    write_tokenizer(folder)
    return make_seeing(str(folder), skip_tokenizer_init=False)


def write_url(image: Image.Image) -> str:
    file = io.BytesIO()
    image.save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def say(*parts: str | Image.Image, as_urls: bool = True) -> dict[str, Any]:
    """A user's message of texts and images."""
    content = []
    for part in parts:
        if isinstance(part, str):
            content.append({"type": "text", "text": part})
        elif as_urls:
            content.append({"type": "image_url", "image_url": {"url": write_url(part)}})
        else:
            content.append({"type": "image_pil", "image_pil": part})
    return {"role": "user", "content": content}


def chat(llm: LLM, messages: Any, params: Any) -> list[Any]:
    return llm.chat(messages, params, use_tqdm=False)


def test_a_conversation_is_the_prompt_that_its_template_writes(llm: LLM) -> None:
    """Images of data URLs and of Pillow are the same, and what was said is found in pages."""
    first, second = picture(40, 32), picture(16, 24)
    message = say("what is it?", first, "and what is that?", second)
    (output,) = chat(llm, [message], greedy(20))
    prompt = (
        "<|im_start|>user\nwhat is it?<|vision_start|><|image_pad|><|vision_end|>and what is that?"
        "<|vision_start|><|image_pad|><|vision_end|><|im_end|>\n<|im_start|>assistant\n"
    )
    given = {"prompt": prompt, "multi_modal_data": {"image": [first, second]}}
    (same,) = llm.generate(given, greedy(20), use_tqdm=False)
    assert same.prompt_token_ids == output.prompt_token_ids
    assert same.num_cached_tokens == (len(same.prompt_token_ids) - 1) // PAGE * PAGE == 64
    assert output.prompt_token_ids.count(IMAGE) == 20 + 6
    (pillow,) = chat(llm, [say("what is it?", first, "and what is that?", second, as_urls=False)], greedy(20))
    assert output.outputs[0].token_ids == same.outputs[0].token_ids == pillow.outputs[0].token_ids
    answer = {"role": "assistant", "content": output.outputs[0].text}
    turns = [message, answer, say("sure?", first)]
    before = llm.ready.runner.counts.tower_images
    (later,) = chat(llm, turns, greedy(20))
    assert later.num_cached_tokens >= 64 and llm.ready.runner.counts.tower_images == before
    llm.reset_prefix_cache()
    assert chat(llm, turns, greedy(20))[0].outputs[0].token_ids == later.outputs[0].token_ids


def test_a_placeholder_that_a_user_spells_is_text(llm: LLM) -> None:
    (output,) = chat(llm, [say("<|image_pad|> is", picture(16, 24))], greedy(1))
    assert output.prompt_token_ids.count(IMAGE) == 6
    (output,) = chat(llm, [say("<|vision_start|><|image_pad|><|vision_end|>")], greedy(1))
    assert output.prompt_token_ids.count(IMAGE) == 0
    (output,) = llm.generate({"prompt": "<|image_pad|>"}, greedy(1), use_tqdm=False)
    assert output.prompt_token_ids.count(IMAGE) == 0
    with pytest.raises(InvalidRequestError, match=r"has 0 marks '<\|image_pad\|>' for 1 images"):
        llm.generate({"prompt": "a", "multi_modal_data": {"image": picture(8, 8)}}, greedy(1), use_tqdm=False)


def test_grammars_beside_images_give_the_tokens_of_prompts_alone(llm: LLM) -> None:
    """With masks, with text that is forced, and without masks on the device."""
    patterns = ["[a-c]{4,9}[.] done", "yes|no", "[0-9]{1,6}[.]"]
    grammars = [StructuredOutputsParams(regex=pattern) for pattern in patterns]
    shown = [say("one?", picture(48, 48, 1), "x"), say(picture(24, 40, 2), "two?", picture(8, 8)), say("no image")]
    messages = [[each] for each in shown for _ in grammars]
    params = [
        SamplingParams(temperature=0.8, seed=index, max_tokens=60, structured_outputs=grammar)
        for index, grammar in enumerate(grammars * 3)
    ]
    alone = []
    for message, each in zip(messages, params, strict=True):
        llm.reset_prefix_cache()
        alone.append(chat(llm, message, each)[0].outputs[0].token_ids)
    outputs = chat(llm, messages, params)
    assert [output.outputs[0].token_ids for output in outputs] == alone
    texts = [output.outputs[0].text for output in outputs]
    assert all(re.fullmatch(pattern, text) for pattern, text in zip(patterns * 3, texts, strict=True)), texts


def test_stop_strings_and_prefixes_of_answers_beside_images(llm: LLM) -> None:
    """A text that continues the assistant's is computed behind the image, in a chunk of its own."""
    (whole,) = chat(llm, [say("and?", picture(48, 48, 3))], greedy(24, **LETTERS))
    text = whole.outputs[0].text
    turns = [say("and?", picture(48, 48, 3)), {"role": "assistant", "content": text[:9]}]
    template = TEMPLATE.replace("<|im_end|>\n{% endfor", "{% if not loop.last %}<|im_end|>\n{% endif %}{% endfor")
    (later,) = llm.chat(
        turns, greedy(15, **LETTERS), use_tqdm=False, continue_final_message=True, chat_template=template
    )
    assert text[:9] + later.outputs[0].text == text
    stop = text[5:7]
    (stopped,) = chat(llm, [say("and?", picture(48, 48, 3))], greedy(24, stop=[stop], **LETTERS))
    assert stopped.outputs[0].text == text[: text.index(stop)]

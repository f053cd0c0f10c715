"""Images of prompts: what the start decides, and the requests that come of text, ids and conversations."""

from __future__ import annotations

import asyncio
import base64
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jaxserve.config import EngineConfig
from jaxserve.engine.images import choose_images, describe_images
from jaxserve.engine.model_files import locate_model, resolve_model
from jaxserve.engine.prompts import RequestFactory
from jaxserve.engine.tower_files import locate_tower
from jaxserve.errors import ConfigError, InvalidRequestError, MissingPackageError
from jaxserve.media.positions import find_positions
from jaxserve.sampling_params import SamplingParams
from tests.engine import test_prompts
from tests.engine.image_models import (
    MARKED,
    draw,
    make_factory,
    make_files,
    make_folder,
    make_images,
    make_model,
    make_tower,
)
from tests.families.towers import FOLDER

PARAMS = SamplingParams(temperature=0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("seeing"))


@pytest.fixture(scope="module")
def factory(folder: Path) -> Iterator[RequestFactory]:
    made = make_factory(folder, limit_mm_per_prompt={"image": 3})
    yield made
    assert made.images is not None
    made.images.close()


def choose(folder: Path | None, model: Any = None, **options: Any) -> Any:
    config = EngineConfig.from_options(**options)
    return choose_images(config, make_files(folder), model or make_model(), {"seeing": make_tower(None)})


def to_url(image: Any, form: str = "PNG") -> str:
    file = io.BytesIO()
    image.save(file, form)
    return f"data:image/{form.lower()};base64,{base64.b64encode(file.getvalue()).decode()}"


def ask(*parts: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(parts)}]


TEXT, PART = {"type": "text", "text": "what is it?"}, {"type": "image_url", "image_url": {"url": to_url(draw())}}


def test_the_start_decides_the_largest_image(folder: Path) -> None:
    found = choose(folder)
    assert (found.max_patches, found.num_images, found.merge_size) == (256, 64, 2)
    assert describe_images(found).startswith("images: at most 64 tokens and 256 patches each, 256 patches a step, ")
    found = choose(folder, max_num_batched_patches=100)
    assert found.max_patches == 100 and found.processor.shape.max_pixels == 25 * 64
    found = choose(folder, max_num_batched_patches=1000, mm_processor_kwargs={"max_pixels": 1024})
    assert found.max_patches == 1000 and found.processor.shape.most_patches == 64
    found = choose(folder, make_model(40))
    assert found.max_patches == 120 and found.processor.shape.most_tokens == 30, "three quarters of the context"


def test_no_step_takes_more_patches_than_the_default(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, size={"shortest_edge": 4 * 64, "longest_edge": 10**7})
    assert choose(folder, make_model(10**6)).max_patches == 16_384


@pytest.mark.parametrize(
    ("options", "field", "message"),
    [
        ({"max_num_batched_patches": 15}, "max_num_batched_patches", r"at least 16, .*got 15"),
        ({"mm_processor_kwargs": {"max_pixels": 5000}}, "mm_processor_kwargs.max_pixels", "from 64 to 4096"),
        ({"mm_processor_kwargs": {"fps": 2}}, "mm_processor_kwargs.fps", "unknown"),
        ({"allowed_media_domains": ("a.example", "b.example/c")}, "allowed_media_domains", "must be hosts"),
        ({"allowed_local_media_path": "/no/such/folder"}, "allowed_local_media_path", "must be a folder"),
        ({"deterministic": True}, "deterministic", 'limit_mm_per_prompt={"image": 0}'),
    ],
)
def test_options_that_do_not_fit_are_named(folder: Path, options: dict[str, Any], field: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        choose(folder, **options)
    assert caught.value.field == field
    assert "deterministic" not in options or choose(folder, **options, limit_mm_per_prompt={"image": 0}) is None


def test_a_context_that_no_image_fits_is_named(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"at least 4 tokens, and 5 have room for 3") as caught:
        choose(folder, make_model(5))
    assert caught.value.field == "max_model_len"


def test_models_without_a_tower_are_served_for_text(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "orbax" / "params").mkdir(parents=True)
    assert choose(None) is None and choose(folder / "tokenizer.json") is None
    assert choose(folder, load_format="orbax") is None
    embedder = make_model()
    embedder.generates = False
    assert choose(folder, embedder) is None
    config = EngineConfig.from_options(limit_mm_per_prompt={"image": 2})
    for files, towers in ((make_files(folder, vision_config=None), {"seeing": None}), (make_files(folder), {})):
        with pytest.raises(ConfigError, match="this model reads no images; leave it out"):
            choose_images(config, files, make_model(), towers)  # type: ignore[arg-type]


def test_missing_pillow_is_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def miss() -> None:
        raise MissingPackageError("images need Pillow, which cannot be imported")

    monkeypatch.setattr("jaxserve.engine.images.require_pillow", miss)
    assert choose(folder) is None
    assert "served for text" in caplog.text and "need Pillow" in caplog.text
    with pytest.raises(ConfigError, match=r"^limit_mm_per_prompt: .*need Pillow"):
        choose(folder, limit_mm_per_prompt={"image": 2})


def test_without_settings_the_model_is_served_for_text(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert choose(tmp_path) is None
    assert "there is no preprocessor_config.json" in caplog.text
    with pytest.raises(ConfigError, match=r"^mm_processor_kwargs: there is no preprocessor_config.json"):
        choose(tmp_path, mm_processor_kwargs={"max_pixels": 4096})


def test_a_prompt_brings_its_images(factory: RequestFactory) -> None:
    first, second = draw(32, 48), draw(64, 16)
    prompt = f"<|im_start|>user\n{MARKED} and {MARKED}<|im_end|>\n"
    request = factory.make({"prompt": prompt, "multi_modal_data": {"image": [first, second]}}, PARAMS)
    images, ids = request.images, request.prompt_token_ids
    assert images is not None and request.prompt == prompt
    place = factory.images.options.tokens.placeholder_id  # type: ignore[union-attr]
    assert [item.grid for item in images.items] == [(1, 8, 12), (1, 16, 4)]
    assert [at for at, token_id in enumerate(ids) if token_id == place] == images.places.tolist()
    assert len(images.places) == 24 + 16
    positions, delta = find_positions(len(ids), images.spans, 2)
    assert images.rope_delta == delta < 0
    assert (positions[:, -1] == len(ids) - 1 + delta).all()
    one = factory.make({"prompt": MARKED, "multi_modal_data": {"image": first}}, PARAMS)
    assert one.images is not None and one.images.items[0] == images.items[0], "an equal image has an equal item"


def test_token_ids_have_one_placeholder_an_image(factory: RequestFactory) -> None:
    place = factory.images.options.tokens.placeholder_id  # type: ignore[union-attr]
    request = factory.make({"prompt_token_ids": [5, place, 6], "multi_modal_data": {"image": draw()}}, PARAMS)
    assert request.prompt_token_ids == (5, *[place] * 24, 6) and request.images is not None
    plain = factory.make({"prompt_token_ids": [5, 6], "multi_modal_data": {"image": []}}, PARAMS)
    assert plain.prompt_token_ids == (5, 6) and plain.images is None


def test_options_of_a_prompt_make_its_images_smaller(factory: RequestFactory) -> None:
    data = {"prompt": MARKED, "multi_modal_data": {"image": draw(64, 64)}}
    large = factory.make(data, PARAMS)
    small = factory.make({**data, "mm_processor_kwargs": {"max_pixels": 1024}}, PARAMS)
    assert large.images is not None and small.images is not None
    assert (large.images.items[0].num_patches, small.images.items[0].num_patches) == (256, 64)


@pytest.mark.parametrize(
    ("prompt", "field"),
    [
        ({"prompt": "no mark", "multi_modal_data": {"image": draw()}}, "prompt"),
        ({"prompt": MARKED * 2, "multi_modal_data": {"image": draw()}}, "prompt"),
        ({"prompt_token_ids": [5], "multi_modal_data": {"image": draw()}}, "prompt"),
        ({"prompt": MARKED * 4, "multi_modal_data": {"image": [draw()] * 4}}, "multi_modal_data.image"),
        ({"prompt": MARKED, "multi_modal_data": {"image": "a.png"}}, "multi_modal_data.image[0]"),
        ({"prompt": MARKED, "multi_modal_data": {"video": [1]}}, "multi_modal_data"),
        ({"prompt": MARKED, "multi_modal_data": [draw()]}, "multi_modal_data"),
        ({"prompt": MARKED, "multi_modal_data": {"image": draw(1, 900)}}, "multi_modal_data.image[0]"),
        ({"prompt": "a", "mm_processor_kwargs": {"max_pixels": 64}}, "mm_processor_kwargs"),
        (
            {"prompt": MARKED, "multi_modal_data": {"image": draw()}, "mm_processor_kwargs": {"fps": 1}},
            "mm_processor_kwargs.fps",
        ),
        ({"prompt": MARKED, "multi_modal_uuids": {"image": ["a"]}}, "prompt"),
    ],
)
def test_malformed_prompts_with_images_are_named(factory: RequestFactory, prompt: Any, field: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        factory.make(prompt, PARAMS)
    assert caught.value.field == field


def test_images_are_not_cut(factory: RequestFactory) -> None:
    params = SamplingParams(truncate_prompt_tokens=8)
    prompt = {"prompt": MARKED, "multi_modal_data": {"image": draw()}}
    for make, given in ((factory.make, prompt), (factory.make_chat, ask(PART))):
        with pytest.raises(InvalidRequestError, match="not supported with images") as caught:
            make(given, params)  # type: ignore[arg-type, operator]
        assert caught.value.field == "truncate_prompt_tokens"


def test_a_conversation_has_images_among_its_parts(factory: RequestFactory) -> None:
    pillow = {"type": "image_pil", "image_pil": draw()}
    request = factory.make_chat([{"role": "system", "content": "look"}, *ask(TEXT, PART, TEXT, pillow)], PARAMS)
    assert request.prompt == (
        f"<|im_start|>system\nlook<|im_end|>\n<|im_start|>user\nwhat is it?{MARKED}what is it?{MARKED}<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    images = request.images
    assert images is not None and len(images.places) == 48
    assert images.items[0].digest == images.items[1].digest, "a file and Pillow's image of the same pixels"
    low = factory.make_chat(ask(PART), PARAMS, mm_processor_kwargs={"max_pixels": 256})
    assert low.images is not None and len(low.images.places) == 2


def test_a_placeholder_that_somebody_spells_is_text(factory: RequestFactory) -> None:
    place = factory.images.options.tokens.placeholder_id  # type: ignore[union-attr]
    spelled = {"type": "text", "text": MARKED}
    request = factory.make_chat(ask(spelled, PART), PARAMS)
    assert request.images is not None and request.prompt_token_ids.count(place) == 24 == len(request.images.places)
    alone = factory.make_chat(ask(spelled), PARAMS)
    assert alone.images is None and place not in alone.prompt_token_ids
    assert place not in factory.make(MARKED, PARAMS).prompt_token_ids, "nor in a prompt without images"


@pytest.mark.parametrize(
    ("part", "field"),
    [
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}, "messages[0].content[1]"),
        ({"type": "image_url", "image_url": {"url": "https://a.example/a.png"}}, "messages[0].content[1]"),
        ({"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}, "messages[0].content[1]"),
        ({"type": "image_url", "image_url": {"url": to_url(draw())}, "uuid": "a"}, "messages[0].content[1]"),
        ({"type": "video_url", "video_url": {"url": "data:,"}}, "messages[0].content[1]"),
        ({"type": "input_audio", "input_audio": {}}, "messages[0].content[1]"),
        ({"type": "image_embeds", "image_embeds": "AAAA"}, "messages[0].content[1]"),
    ],
)
def test_parts_that_are_not_read_are_named(factory: RequestFactory, part: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        factory.make_chat(ask(TEXT, part), PARAMS)
    assert caught.value.field == field


def test_too_many_images_are_refused_before_they_are_read(factory: RequestFactory) -> None:
    broken = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    with pytest.raises(InvalidRequestError, match=r"image 4; a request may have 3 \(limit_mm_per_prompt\)"):
        factory.make_chat(ask(*[broken] * 4), PARAMS)


def test_images_that_fill_the_context_are_refused_while_they_are_read(folder: Path) -> None:
    images = make_images(folder, make_factory(folder)._tokenizer, 100)  # type: ignore[arg-type]
    admit = images.limit_tokens()
    (item,) = images.load(make_parts(1))
    for _ in range(4):
        admit(item)
    with pytest.raises(InvalidRequestError, match="maximum context length is 100 tokens, and the images have 120"):
        admit(item)
    with pytest.raises(InvalidRequestError, match="maximum context length"):
        images.load(make_parts(9))
    images.close()


def make_parts(count: int) -> list[Any]:
    from jaxserve.media.parts import ImagePart

    return [ImagePart(f"messages[0].content[{at}]", None, draw()) for at in range(count)]


def test_images_are_loaded_where_an_event_loop_runs_too(factory: RequestFactory) -> None:
    async def run() -> Any:
        return factory.make_chat(ask(PART), PARAMS).images

    assert asyncio.run(run()).items[0].num_tokens == 24


def test_a_model_without_a_tower_refuses_images() -> None:
    plain = test_prompts.make_factory(test_prompts.Plain())
    with pytest.raises(InvalidRequestError, match="served for text") as caught:
        plain.make({"prompt": "a", "multi_modal_data": {"image": draw()}}, PARAMS)
    assert caught.value.field == "multi_modal_data"
    with pytest.raises(InvalidRequestError, match="served for text"):
        plain.make_chat(ask(TEXT), PARAMS, mm_processor_kwargs={"max_pixels": 64})
    assert plain.make({"prompt": "a", "multi_modal_data": {}}, PARAMS).images is None


def test_files_that_are_allowed_are_read(folder: Path, tmp_path: Path) -> None:
    draw().save(tmp_path / "a.png")
    made = make_factory(folder, allowed_local_media_path=str(tmp_path))
    part = {"type": "image_url", "image_url": {"url": f"file://{tmp_path}/a.png"}}
    assert made.make_chat(ask(part), PARAMS).images.items[0].num_tokens == 24  # type: ignore[union-attr]
    made.images.close()  # type: ignore[union-attr]


def test_an_error_of_a_tower_says_that_text_can_be_served() -> None:
    config = EngineConfig.from_options(model=str(FOLDER / "qwen3_vl"), tensor_parallel_size=4, skip_tokenizer_init=True)
    files = locate_model(config.model)
    with pytest.raises(ConfigError, match=r"of the tower .*sizes that work: \[1, 2\]; limit_mm_per_prompt=.* for text"):
        locate_tower(config, files, resolve_model(config, files))

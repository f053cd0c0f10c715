"""What is computed of images, and what is not: rows and pages that are found again, programs, texts without images."""

from __future__ import annotations

import random
from typing import Any

import jax
import numpy as np
import pytest
from PIL import Image

from jaxserve import LLM, SamplingParams
from jaxserve.engine.stats import read_stats
from jaxserve.errors import InvalidRequestError
from tests.e2e.engines import Engines
from tests.e2e.helpers import LogitsRecorder, greedy, read_weights
from tests.e2e.image_prompts import IMAGE, PAGE, Prompt, answer, make_seeing, picture, run, show
from tests.e2e.test_images import PARAMS, PROMPTS

LARGE = 64  # tokens of the largest image; the device holds the vectors of two


@pytest.fixture(scope="module")
def llm(engines: Engines) -> LLM:
    return engines.get(make_seeing)


def count_computed(llm: LLM, prompts: list[Prompt], params: Any = None) -> tuple[int, int]:
    """Answers prompts; returns the images and the patches that the tower computed meanwhile."""
    counts = llm.ready.runner.counts
    before = counts.tower_images, counts.tower_patches
    answer(llm, prompts, params or greedy(3))
    return counts.tower_images - before[0], counts.tower_patches - before[1]


def forget_images(llm: LLM) -> None:
    """Fills all rows with images that no test has."""
    answer(llm, [show(1, picture(64, 64, seed), 1) for seed in (101, 102)], greedy(1))


def test_an_image_is_computed_once(llm: LLM) -> None:
    """Twice in a prompt, in two prompts at once, and in a later one with another text in front."""
    forget_images(llm)
    image = picture(40, 32)
    assert count_computed(llm, [show(5, image, 8, image, 4)]) == (1, 80)
    assert count_computed(llm, [show(9, image, 2)]) == (0, 0)
    other = picture(40, 32, 1)
    assert count_computed(llm, [show(2, other, 3, seed=seed) for seed in (1, 2)]) == (1, 80)
    llm.reset_prefix_cache()
    assert count_computed(llm, [show(3, other, 3, image)]) == (0, 0), "rows outlive pages"


def test_images_in_pages_that_are_found_need_no_rows(llm: LLM) -> None:
    prompt = show(10, picture(30, 50, 2), 40)
    (first,) = run(llm, [prompt], greedy(8))
    forget_images(llm)
    before = llm.ready.runner.counts.tower_images
    (second,) = run(llm, [prompt], greedy(8))
    assert llm.ready.runner.counts.tower_images == before
    assert second.num_cached_tokens == (len(second.prompt_token_ids) - 1) // PAGE * PAGE == 64
    assert second.outputs[0].token_ids == first.outputs[0].token_ids


def test_rows_are_those_of_the_images_that_came_last(llm: LLM) -> None:
    forget_images(llm)
    first, second, third = (show(2, picture(64, 64, seed), 2) for seed in (1, 2, 3))
    assert [count_computed(llm, [each]) for each in (first, second, first)] == [(1, 256), (1, 256), (0, 0)]
    llm.reset_prefix_cache()
    found = [count_computed(llm, [each])[0] for each in (third, first, second)]
    assert found == [1, 0, 1], "the second was used least recently, then the third"


def _resized(seed: int) -> Image.Image:
    return picture(45, 70, seed)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (show(40, picture(48, 48, 1), 30), show(40, picture(48, 48, 2), 30)),
        (show(40, picture(30, 150), 30), show(40, picture(150, 30), 30)),
        (show(40, _resized(1), 30), show(40, _resized(1), 30, mm_processor_kwargs={"max_pixels": 1024})),
        (show(40, picture(16, 24), 30), show(40, picture(16, 24), 30, mm_processor_kwargs={"max_pixels": 1024})),
        (show(40, picture(16, 24), 30), show(39, picture(16, 24), 30)),
        (
            show(40, picture(16, 16, 1), 4, picture(16, 16, 2), 30),
            show(40, picture(16, 16, 2), 4, picture(16, 16, 1), 30),
        ),
    ],
    ids=["other content", "transposed", "other size", "other settings", "another place", "another order"],
)
def test_images_that_are_not_the_same_share_no_page(one: Prompt, other: Prompt, llm: LLM) -> None:
    """Of a common beginning of 40 tokens, 32 are shared, and nothing behind."""
    cold = run(llm, [other], greedy(12))[0]
    llm.reset_prefix_cache()
    assert run(llm, [one], greedy(1))[0].num_cached_tokens == 0
    (found,) = run(llm, [other], greedy(12))
    assert found.num_cached_tokens == PAGE
    assert found.outputs[0].token_ids == cold.outputs[0].token_ids


def test_transposed_images_have_the_same_ids(llm: LLM) -> None:
    """So only the images' digests tell their pages apart."""
    one, other = (run(llm, [show(40, picture(*size), 3)], greedy(1))[0] for size in ((30, 150), (150, 30)))
    assert one.prompt_token_ids == other.prompt_token_ids
    assert one.prompt_token_ids.count(IMAGE) > PAGE


def test_salts_share_rows_and_no_pages(llm: LLM) -> None:
    forget_images(llm)
    image = picture(48, 48, 4)
    outputs = [run(llm, [show(40, image, 30, cache_salt=salt)], greedy(4))[0] for salt in ("a", "b", "a")]
    assert [output.num_cached_tokens for output in outputs] == [0, 0, 96]


def test_what_is_found_is_counted(llm: LLM) -> None:
    """A prompt's images count once: found in pages, with vectors on the device, or neither."""

    def count(prompt: Prompt, **params: Any) -> tuple[int, ...]:
        before = read_stats(llm.ready.engine).images
        answer(llm, [prompt], greedy(2, **params))
        now = read_stats(llm.ready.engine).images
        names = "num_admitted", "page_hits", "row_hits", "num_computed", "num_computed_patches"
        return tuple([getattr(now, name) - getattr(before, name) for name in names])

    forget_images(llm)
    first, second = picture(40, 32, 7), picture(16, 24, 7)
    prompt = show(5, first, 12, second, 3)
    assert count(prompt) == (2, 0, 0, 2, 80 + 24)
    assert count(prompt, n=2) == (2, 1, 1, 0, 0), "a page ends between the two"
    assert count(show(9, second, 4)) == (1, 0, 1, 0, 0)
    assert count(show(9)) == (0, 0, 0, 0, 0)


def make_texts() -> list[Prompt]:
    return [show(length, seed=length) for length in (1, 20, 36, 80, 110)]


def test_texts_have_the_bits_of_a_model_without_a_tower(llm: LLM, engines: Engines) -> None:
    found = []
    for each in (llm, engines.get(make_seeing, language_model_only=True)):
        with LogitsRecorder(each) as recorder:
            tokens = answer(each, make_texts(), greedy(30))
        found.append((tokens, recorder.logits))
    (tokens, logits), (wanted, bits) = found
    assert tokens == wanted and logits.keys() == bits.keys() and len(bits) > 150
    assert all(np.array_equal(logits[place], bits[place]) for place in bits)


def test_a_model_served_for_text_has_no_tower(engines: Engines) -> None:
    text = engines.get(make_seeing, language_model_only=True)
    programs = text.ready.runner.device.programs
    assert not programs.of_kind("tower") and len(text.ready.shapes.features) == 0
    with pytest.raises(InvalidRequestError, match="served for text") as raised:
        run(text, [show(3, picture(16, 16), 3)], greedy(1))
    assert raised.value.field == "multi_modal_data"


def make_random_load(count: int) -> tuple[list[Prompt], list[SamplingParams]]:
    """Requests of a few tokens with images of any sizes, from one pixel to more than the model takes."""
    rng, prompts = random.Random(5), []
    for index in range(count):
        images = [
            picture(rng.choice([1, 9, 30, 100]), rng.choice([1, 8, 41, 90]), rng.randrange(9))
            for _ in range(rng.choice([0, 1, 1, 2]))
        ]
        parts = [part for image in images for part in (image, rng.randint(1, 9))]
        prompts.append(show(rng.randint(1, 30), *parts, seed=index))
    params = [
        SamplingParams(
            temperature=rng.choice([0, 0.8]),
            seed=index,
            max_tokens=rng.choice([1, 2, 12]),
            repetition_penalty=rng.choice([1.0, 1.2]),
            logprobs=rng.choice([None, 2]),
        )
        for index in range(count)
    ]
    return prompts, params


def test_nothing_compiles_and_nothing_else_is_sent_while_images_of_any_size_come(engines: Engines) -> None:
    llm = make_seeing(compile="all", num_kv_pages_override=8)
    programs, compiled = llm.ready.runner.device.programs, []
    assert sorted(programs.of_kind("tower")) == [64, 128, 256]
    prompts, params = make_random_load(200)

    def listen(event: str, *_: object, **__: object) -> None:
        if "compil" in event or "trace" in event or "lower" in event:
            compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        with jax.transfer_guard("disallow"):
            outputs = run(llm, prompts, params)
        assert compiled == [] and llm.ready.runner.num_compiles == 0
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert all(output.error is None for output in outputs)
    counts = llm.ready.runner.counts
    assert counts.tower_images >= 100 and llm.ready.engine.scheduler.counts.num_preemptions > 0


def test_a_failed_step_leaves_no_vectors_behind(llm: LLM) -> None:
    """The rows are lost with all that the device keeps, so the next prompt computes its images again."""
    wanted, runner = answer(llm, PROMPTS, PARAMS), llm.ready.runner
    start, calls = runner.start, 0

    def fail(plan: Any) -> Any:
        nonlocal calls
        calls += bool(plan.image_writes)
        started = start(plan)
        if calls == 3:
            calls += 1
            raise RuntimeError("the device is lost")
        return started

    runner.start = fail  # type: ignore[method-assign]
    outputs = run(llm, PROMPTS, PARAMS)
    runner.start = start  # type: ignore[method-assign]
    found = [output.outputs[0].token_ids for output in outputs if output.error is None]
    assert 0 < len(found) < len(wanted), "those in the step fail, the others go on"
    assert all(ids in wanted for ids in found)
    assert answer(llm, PROMPTS, PARAMS) == wanted


def test_new_weights_are_those_of_the_text(llm: LLM) -> None:
    """A tower stays as it was loaded."""
    prompt, original = show(10, picture(48, 48, 6), 10), read_weights(llm)
    first = answer(llm, [prompt], greedy(12))
    llm.update_weights(jax.tree.map(lambda leaf: leaf * np.float32(1.5) if leaf.ndim > 1 else leaf, original))
    assert answer(llm, [prompt], greedy(12)) != first
    llm.update_weights(original)
    assert answer(llm, [prompt], greedy(12)) == first

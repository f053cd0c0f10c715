"""Encoders in engines: no neighbour changes a bit, old names of tensors, bytes of the plan."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxserve.config import EngineConfig
from jaxserve.core.runtime.startup import plan_pools
from jaxserve.engine.model_files import locate_model, resolve_model
from jaxserve.features.choose import make_shapes
from tests.families.encoders import FOLDER, LIMIT, PAGE, embed, read_golden, start

PUBLISHED = json.loads((Path(__file__).parent / "embedding_models.json").read_text())


@pytest.mark.parametrize("name", ["bert_mean", "modernbert_cls", "embedding_gemma"])
def test_neighbours_change_no_bit(name: str) -> None:
    rng, llm = np.random.default_rng(3), start(FOLDER / name)
    texts = [rng.integers(3, 90, length).tolist() for length in (1, PAGE, PAGE + 1, LIMIT, 40)]
    padded = [5, 0, 0, 7, *texts[1], 0]  # the padding token is a token like any other inside a text
    texts += [padded, texts[1], padded[:-1]]
    together = embed(llm, texts)
    assert np.array_equal(together[1], together[6]), "the same text twice"
    assert not np.allclose(together[5], together[7], atol=1e-4), "a padding token at the end is read"
    filler = rng.integers(3, 90, 30).tolist()  # so that a text of one token runs in the same program
    for text, expected in zip(texts, together, strict=True):
        assert np.array_equal(embed(llm, [filler, text])[1], expected)


OTHERS = ["nomic_bert_mean", "gte_new_cls", "eurobert_mean", "llama_bidirec_mean"]


@pytest.mark.parametrize(
    "name", ["modernbert_cls", "embedding_gemma", *(pytest.param(each, marks=pytest.mark.thorough) for each in OTHERS)]
)
def test_sixteen_bits_keep_the_direction(name: str, tmp_path: Path) -> None:
    """The goldens' matrices are so wide that transformers itself turns their vectors by more (cosines of 0.997).

    A third of them multiplies the length of a state by about 0.6, as matrices of 0.02 do in models of 768 numbers.
    EmbeddingGemma has norms behind its blocks, which undo that: transformers' cosine is 0.9986 there.
    """
    shutil.copytree(FOLDER / name, tmp_path, dirs_exist_ok=True)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file).items()
    save_file({key: each / 3 if each.ndim > 1 and "embed" not in key else each for key, each in tensors}, file)
    texts, _, _ = read_golden(name)
    exact, rounded = (embed(start(tmp_path, dtype=dtype), texts) for dtype in ("float32", "bfloat16"))
    for one, other in zip(exact, rounded, strict=True):
        assert one @ other >= (0.9985 if name == "embedding_gemma" else 0.9999)


def test_old_names_of_norms_are_read_and_a_pooler_is_no_cause_for_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.copytree(FOLDER / "bert_mean", tmp_path, dirs_exist_ok=True)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    assert any("pooler" in name for name in tensors)
    old = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    for new, name in old.items():
        tensors = {each.replace(new, name): tensor for each, tensor in tensors.items()}
    save_file(tensors, file)
    texts, _, expected = read_golden("bert_mean")
    with caplog.at_level(logging.WARNING):
        found = embed(start(tmp_path), texts[:3])
    for vector, reference in zip(found, expected, strict=False):
        np.testing.assert_allclose(vector, reference, rtol=0, atol=1e-5)
    assert "does not use" not in caplog.text


@pytest.mark.parametrize(("name", "layers"), [("bge-m3", 1), ("modernbert-embed-base", 2), ("embeddinggemma-300m", 2)])
def test_the_cache_is_that_of_one_layer_of_each_kind(name: str, layers: int, tmp_path: Path) -> None:
    for file, content in PUBLISHED[name].items():
        if file.endswith(".json"):
            (tmp_path / file).parent.mkdir(exist_ok=True)
            (tmp_path / file).write_text(json.dumps(content))
    options = {"dtype": "bfloat16", "max_num_batched_tokens": 8192}
    config = EngineConfig.from_options(model=str(tmp_path), load_format="dummy", **options)
    model = resolve_model(config, locate_model(config.model))
    shapes = make_shapes(config, model, "gpu", "NVIDIA H200")
    plan = plan_pools(shapes, budget=2**26)
    heads = model.attentions[0]
    page = 2 * heads.num_kv_heads * heads.head_dim * 2 * plan.page_size
    assert len(plan.num_pages) == layers and plan.bytes_per_device == sum(plan.num_pages) * page <= 2**26
    assert plan.count_sequences(model, 8192) >= 1, "64 MiB hold a text of the longest kind"

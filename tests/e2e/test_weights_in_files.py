"""Files that say one thing in config.json and another in their tensors, and numbers that are none."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import huggingface_hub
import numpy as np
import pytest

from jaxserve import LLM
from jaxserve.config import EngineConfig
from jaxserve.core.sharding import DEFAULT_RULES, make_mesh
from jaxserve.core.weights import load_safetensors
from jaxserve.core.weights.reader import open_checkpoint
from jaxserve.engine.model_files import locate_model, resolve_model
from jaxserve.errors import CapacityError, WeightsError
from jaxserve.families.registry import ignored_weights, param_specs, parse_config, weight_sources
from tests.core.weights.checkpoints import write_single
from tests.e2e.helpers import CACHE, SIZES, LogitsRecorder, generate_ids, greedy, make_llm
from tests.golden_cases import load_case

HEAD, EMBED = "lm_head.weight", "model.embed_tokens.weight"


def write_changed(folder: Path, tensors: dict[str, np.ndarray], **config: object) -> Path:
    source = load_case("llama_tied").path
    checkpoint = open_checkpoint(source)
    write_single(folder, {name: np.array(checkpoint.read(name)) for name in checkpoint.names} | tensors)
    (folder / "config.json").write_text(json.dumps(json.loads((source / "config.json").read_text()) | config))
    return folder


def test_a_tied_models_own_head_gives_the_logits_of_an_untied_one(tmp_path: Path) -> None:
    golden = load_case("llama_tied")
    embed = np.array(open_checkpoint(golden.path).read(EMBED))
    head = {HEAD: np.roll(embed, 1, axis=0)}
    logits = []
    for tied in (True, False):
        path = write_changed(tmp_path / str(tied), head, tie_word_embeddings=tied)
        llm = make_llm(dataclasses.replace(golden, path=path))
        with LogitsRecorder(llm) as recorder:
            generate_ids(llm, golden.prompts[:2], greedy(4))
        logits.append(recorder.logits)
    assert logits[0].keys() == logits[1].keys()
    for place, row in logits[0].items():
        np.testing.assert_array_equal(row, logits[1][place])


def test_a_tied_models_weights_are_fetched_when_it_fits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They may have a head; a plan does not need to know."""
    source = load_case("llama_tied").path
    (tmp_path / "config.json").write_bytes((source / "config.json").read_bytes())
    fetched = []

    def download(model: str, *, allow_patterns: list[str], **_: object) -> str:
        if "model.safetensors" in allow_patterns:
            fetched.append(model)
            embed = np.array(open_checkpoint(source).read(EMBED))
            write_changed(tmp_path, {HEAD: np.roll(embed, 1, axis=0)})
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    options = {"skip_tokenizer_init": True, "show_progress": False, "max_model_len": 64} | SIZES | CACHE
    with pytest.raises(CapacityError):
        LLM("owner/tied", kv_cache_memory_bytes=1000, **options)
    config = EngineConfig.from_options(model="owner/tied")
    assert resolve_model(config, locate_model(config.model)).embedding.tied and not fetched
    assert not LLM("owner/tied", **options).ready.shapes.model.embedding.tied and fetched


@pytest.mark.parametrize("kind", ["files", "arrays"])
def test_new_weights_that_are_no_numbers_leave_the_old(kind: str, tmp_path: Path) -> None:
    golden = load_case("llama_tied")
    llm = make_llm(golden)
    expected = generate_ids(llm, golden.prompts[:2], greedy(4))
    name = "model.layers.1.mlp.down_proj.weight"
    bad = np.array(open_checkpoint(golden.path).read(name))
    bad[2, 3] = np.nan
    path = write_changed(tmp_path, {name: bad})
    if kind == "files":
        with pytest.raises(WeightsError, match=r"NaN or infinite values in .*model\.safetensors") as caught:
            llm.update_weights(path)
        assert caught.value.field == name
    else:
        model = parse_config(golden.config)
        arguments = param_specs(model), weight_sources(model), ignored_weights(model)
        tree = load_safetensors(golden.path, *arguments, mesh=make_mesh(1), rules=DEFAULT_RULES)
        tree["layers"][1]["down"]["weight"] = bad.T
        with pytest.raises(WeightsError, match="NaN or infinite values"):
            llm.update_weights(tree)
    assert generate_ids(llm, golden.prompts[:2], greedy(4)) == expected
    if kind == "files":
        with pytest.raises(WeightsError, match="NaN or infinite values in"):
            make_llm(dataclasses.replace(golden, path=path))
        make_llm(dataclasses.replace(golden, path=path), allow_nonfinite=True)

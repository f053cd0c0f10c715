"""Adapters beside each other: a row's tokens are those that it gets alone, in every kind of step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from jaxserve import LLM, BeamSearchParams, LoRARequest, SamplingParams
from jaxserve.errors import CapacityError, ConfigError, InvalidRequestError, WeightsError
from jaxserve.tools.cli import main
from tests.e2e.helpers import greedy, make_llm
from tests.features.lora.adapter_files import AdapterSpec, write_adapter
from tests.golden_cases import load_case

CASE = load_case("llama_gqa")
RANKS = (1, 2, 3, 4, 6, 8, 12, 16)
PROMPTS = [[7, 9, 11, 13], list(range(3, 93))]  # the second one is computed in chunks


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> list[LoRARequest]:
    folder = tmp_path_factory.mktemp("adapters")
    found = []
    for number, rank in enumerate(RANKS, 1):
        spec = AdapterSpec(rank, seed=number, alpha=2.0 * rank, size=0.15)
        found.append(LoRARequest(f"a{number}", number, str(write_adapter(CASE.path, folder / str(number), spec))))
    return found


def run(llm: LLM, rows: list[tuple[list[int], LoRARequest | None]], **changes: Any) -> list[list[int]]:
    outputs = llm.generate(
        [{"prompt_token_ids": prompt} for prompt, _ in rows],
        greedy(16, **changes),
        lora_request=[adapter for _, adapter in rows],
        use_tqdm=False,
    )
    return [output.outputs[0].token_ids for output in outputs]


@pytest.fixture(scope="module")
def alone(adapters: list[LoRARequest]) -> dict[tuple[int, str], list[int]]:
    """What each prompt gets of each adapter in an engine with one row and one slot."""
    sizes = {"max_num_seqs": 1, "precompile_bs_paddings": [2], "precompile_token_paddings": [64]}
    llm = make_llm(CASE, enable_lora=True, enable_prefix_caching=False, **sizes)
    rows = [(at, adapter) for at in range(2) for adapter in (None, *adapters)]
    tokens = [run(llm, [(PROMPTS[at], adapter)])[0] for at, adapter in rows]
    found = {(at, adapter.lora_name if adapter else ""): ids for (at, adapter), ids in zip(rows, tokens, strict=True)}
    assert len(set(map(tuple, found.values()))) == len(found), "every adapter changes the answer"
    return found


KINDS: dict[str, dict[str, Any]] = {
    "eight slots": {"max_loras": 8},
    "few slots": {"max_loras": 2, "max_cpu_loras": 3},
    "first slots": {"max_loras": 12},  # 12 x 16 columns: programs of the first 8 slots, and of all
    "verify steps": {"max_loras": 8, "speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
    "one form": {"max_loras": 8, "deterministic": True},
    "loops": {"max_loras": 8, "max_decode_steps": 4, "max_num_seqs": 8, "precompile_bs_paddings": [8]},
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_of_base_and_adapters_gives_each_what_it_gets_alone(
    kind: str, adapters: list[LoRARequest], alone: dict[tuple[int, str], list[int]]
):
    sizes = {"max_num_seqs": 12, "precompile_bs_paddings": [12]} | KINDS[kind]
    llm = make_llm(CASE, enable_lora=True, **sizes)
    rows = [(at, adapter) for adapter in (*adapters, None) for at in range(2)]
    expected = [alone[at, adapter.lora_name if adapter else ""] for at, adapter in rows]
    assert run(llm, [(PROMPTS[at], adapter) for at, adapter in rows]) == expected
    assert run(llm, [(PROMPTS[at], adapter) for at, adapter in reversed(rows)]) == expected[::-1], "from cached pages"


def test_an_engine_that_is_ready_compiles_nothing_and_without_adapters_runs_what_others_run(
    adapters: list[LoRARequest], alone: dict[tuple[int, str], list[int]]
):
    llm = make_llm(CASE, enable_lora=True, max_loras=2, compile="all")
    runner, names = llm.ready.runner, [adapter.lora_name for adapter in adapters]
    before = runner.num_programs
    assert run(llm, [(prompt, None) for prompt in PROMPTS]) == [alone[0, ""], alone[1, ""]]
    assert {bucket.adapters for bucket in runner.counts.steps} == {0}
    for adapter in adapters:
        assert run(llm, [(PROMPTS[0], adapter)]) == [alone[0, adapter.lora_name]], names
    assert {bucket.adapters for bucket in runner.counts.steps} == {0, 2}
    assert (runner.num_programs, runner.num_compiles) == (before, 0)
    plain = make_llm(CASE, compile="all")
    num_forms = len(llm.ready.shapes.buckets.buckets) - len(plain.ready.shapes.buckets.buckets)
    assert before == plain.ready.runner.num_programs + num_forms + 1, "and one that writes a slot"


def test_answers_follow_the_last_load_and_running_ones_keep_theirs(
    adapters: list[LoRARequest], alone: dict[tuple[int, str], list[int]], tmp_path: Path
):
    llm = make_llm(CASE, enable_lora=True, max_loras=2)
    engine, store = llm.ready.engine, llm.ready.adapters
    assert store is not None
    prompt = {"prompt_token_ids": PROMPTS[0]}
    before = llm.ready.requests.make(prompt, greedy(16), lora_request=adapters[4])
    engine.add_request(before)
    for _ in range(3):
        engine.step()
    store.find(LoRARequest("a5", 5, adapters[6].lora_path), anew=True)
    again = LoRARequest("a5", 5, adapters[6].lora_path)
    engine.add_request(llm.ready.requests.make(prompt, greedy(16), lora_request=again))
    done = []
    while engine.has_unfinished:
        done += [output for output in engine.step() if output.finished]
    tokens = {output.request_id: output.outputs[0].token_ids for output in done}
    assert tokens.pop(before.request_id) == alone[0, "a5"]
    assert [*tokens.values()] == [alone[0, "a7"]]
    broken = write_adapter(CASE.path, tmp_path, AdapterSpec(4, 1))
    (broken / "adapter_model.safetensors").write_bytes(b"cut")
    with pytest.raises(WeightsError, match="truncated"):
        store.find(LoRARequest("a5", 5, str(broken)), anew=True)
    assert run(llm, [(PROMPTS[0], again)]) == [alone[0, "a7"]], "a load that fails harms nothing"


def test_an_adapter_changes_beams_and_embeddings(adapters: list[LoRARequest], alone: Any):
    llm = make_llm(CASE, enable_lora=True, max_loras=2)
    prompts = [{"prompt_token_ids": PROMPTS[0]}] * 3
    found = llm.beam_search(
        prompts, BeamSearchParams(1, 4, ignore_eos=True), lora_request=[adapters[6], None, adapters[7]]
    )
    first = [output.sequences[0].token_ids for output in found]
    assert first == [alone[0, name][:4] for name in ("a7", "", "a8")]
    vectors = [output.embedding for output in llm.embed(prompts, lora_request=[adapters[6], None, adapters[7]])]
    assert vectors[0] != vectors[1] != vectors[2] != vectors[0]
    assert vectors[2] == llm.embed(prompts[:1], lora_request=adapters[7])[0].embedding


def test_requests_and_options_without_adapters_are_refused_by_name(adapters: list[LoRARequest]):
    llm = make_llm(CASE)
    with pytest.raises(InvalidRequestError, match="lora_request: needs enable_lora"):
        llm.generate("x", SamplingParams(), lora_request=adapters[0])
    with pytest.raises(InvalidRequestError, match="lora_request: must be a LoRARequest, got 'a1'"):
        llm.generate("x", SamplingParams(), lora_request="a1")
    for options, message in (
        ({"max_loras": 2}, "max_loras: needs enable_lora"),
        ({"enable_lora": True, "max_lora_rank": 12}, "max_lora_rank: must be one of 1, 8, 16"),
        ({"enable_lora": True, "max_loras": 4, "max_cpu_loras": 2}, "max_cpu_loras: must be at least max_loras=4"),
        ({"enable_lora": True, "fully_sharded_loras": True}, "fully_sharded_loras: "),
    ):
        with pytest.raises(ConfigError, match=message):
            make_llm(CASE, **options)
    with pytest.raises(CapacityError, match=r"max_cpu_loras: 1000000000 copies of .* KiB are more .*; \d+ would fit"):
        make_llm(CASE, enable_lora=True, max_cpu_loras=10**9)


def test_the_memory_plan_has_a_line_for_the_bank(capsys: pytest.CaptureFixture[str]):
    flags = ["--skip-tokenizer-init", "--enable-lora", "--max-loras", "3", "--lora-target-modules", "q_proj"]
    assert main(["plan", str(CASE.path), *flags]) == 0
    lines = capsys.readouterr().out.splitlines()
    (line,) = (line for line in lines if "adapters " in line and "slots" in line)
    assert "3 slots of rank 16" in line and "on the host 3 copies of" in line
    assert main(["plan", str(CASE.path), "--skip-tokenizer-init"]) == 0
    assert "slots of rank" not in capsys.readouterr().out

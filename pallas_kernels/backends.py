"""The implementations: their names, and which one a device and a shape get, and why.

An implementation is a module with

- `choose_layout(spec: KVSpec) -> str`, the page layout that it wants (spec.LAYOUTS); one that runs on all platforms
  takes every layout;
- `find_obstacle(shape: AttnShape) -> str | None`, why it cannot do a shape, in words for users;
- where its page table has a limit, `find_table_obstacle(num_rows, table_width) -> str | None`, likewise;
- `plan_work(rows: StepRows, shape: AttnShape, *, config) -> pytree`, the step cut into units of work, by `config` (its
  own tuning dataclass), or if that is None by its table for the device, else by formula;
- where it can be tuned, `default_config(shape: AttnShape)`, the configuration by formula;
- where `fused`, `attend_with_update(q, k, v, kv_pages, batch, layer) -> (out, kv_pages)`; else
  `attend(q, kv_pages, batch, layer) -> out`, over pages that already hold the step's keys and values;
- where it writes otherwise than `layout.update_kv_pages`, `store(k, v, kv_pages, batch, layer) -> kv_pages`.

`*_interpret` runs the kernels on a CPU in their interpreter, with race detection: for tests.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib import import_module
from types import ModuleType

from pallas_kernels.ampere.device import BLACKWELL
from pallas_kernels.cpu.library import find_obstacle as find_library_obstacle
from pallas_kernels.layout import fill_lanes
from pallas_kernels.mosaic_gpu.toolkit import find_compiler_obstacle
from pallas_kernels.platform import name_platform, traced_device_kind, traced_platform
from pallas_kernels.spec import AttnShape, KVSpec

_HOPPER = ("H100", "H200", "H800", "H20", "GH200")  # compute capability 9.0, as device kinds name it
# Compute capability 8.0, 8.6 and 8.9, as device kinds name them. "RTX 40" alone would also match Turing's Quadro.
_AMPERE = (
    *("NVIDIA A10", "NVIDIA A16", "NVIDIA A2", "NVIDIA A30", "NVIDIA A40", "NVIDIA A800"),  # "A10" matches A100 too
    *("GeForce RTX 30", "NVIDIA RTX A"),
)
_ADA = ("NVIDIA L2", "NVIDIA L4", "GeForce RTX 40", "Ada Generation")  # 8.9; also L20 and L40
_VOLTA = ("V100", "TITAN V")  # 7.0
_TURING = ("Tesla T4", "NVIDIA T4", "TITAN RTX", "Quadro RTX", "Quadro T", "GeForce RTX 20", "GeForce GTX 16")  # 7.5
_TPUS = ("TPU v5 lite", "TPU v5e", "TPU v5p", "TPU v5", "TPU v6 lite", "TPU v6e", "TPU7x", "TPU v7", "TPU v7x")


@dataclass(frozen=True)
class Backend:
    """One implementation. It runs on `platform` (None: on all), and there on `devices`, in words for users."""

    path: str
    platform: str | None = None
    devices: str = ""
    interpret: bool = False
    fused: bool = False  # writes keys and values itself
    takes_last_keys: bool = False  # each token may see keys behind its own, up to one of its own
    splits_keys: bool = False  # a row's keys are cut and joined: by the step's load, or as AttnShape.fixed_splits says

    @property
    def module(self) -> ModuleType:
        return import_module(self.path)


_BACKENDS = {
    "xla": Backend("pallas_kernels.xla", takes_last_keys=True),
    "cpu": Backend("pallas_kernels.cpu.attention", "cpu", fused=True, takes_last_keys=True),
    "gpu": Backend("pallas_kernels.hopper.attention", "gpu", "Hopper (sm_90)", fused=True, splits_keys=True),
    "gpu_interpret": Backend("pallas_kernels.hopper.attention", "cpu", interpret=True, fused=True, splits_keys=True),
    "ampere": Backend(
        "pallas_kernels.ampere.attention",
        "gpu",
        "Ampere, Ada or Blackwell (sm_80, sm_86, sm_89, sm_100, sm_103 or sm_120)",
        fused=True,
        splits_keys=True,
    ),
    "ampere_interpret": Backend("pallas_kernels.ampere.attention", "cpu", interpret=True, fused=True, splits_keys=True),
    "tpu": Backend("pallas_kernels.tpu.attention", "tpu", "v5e and later", fused=True),
    "tpu_interpret": Backend("pallas_kernels.tpu.attention", "cpu", interpret=True, fused=True),
}


def find_backend(name: str) -> Backend:
    """The implementation with this name; ValueError lists all names."""
    if name not in _BACKENDS:
        raise ValueError(f"impl must be one of {', '.join(_BACKENDS)} or None, got {name!r}")
    return _BACKENDS[name]


def choose_impl(platform: str, device_kind: str = "") -> tuple[str, str]:
    """The implementation that `impl=None` means on a device, whatever the shape, and the reason for users.

    `platform` is "cpu", "gpu" (or "cuda", "rocm") or "tpu"; `device_kind` as JAX names it.
    """
    if platform == "cpu":
        obstacle = find_library_obstacle()
        if obstacle is None:
            return "cpu", "C++ kernel with fused KV update, compiled on this machine"
        return "xla", f"portable attention: the CPU kernel cannot run: {obstacle}"
    if platform == "tpu":
        if any(device_kind.startswith(kind) for kind in _TPUS):
            return "tpu", f"Pallas kernels with fused KV update, compiled for {device_kind}"
        return "xla", f"portable attention: the TPU kernels are for v5e and later, this is {device_kind or 'unknown'}"
    if name_platform(platform) == "gpu":
        return _choose_gpu_impl(device_kind)
    raise ValueError(f"platform must be cpu, gpu, cuda, rocm or tpu, got {platform!r}")


def _choose_gpu_impl(device_kind: str) -> tuple[str, str]:
    if any(kind in device_kind for kind in _HOPPER):
        return "gpu", f"Pallas kernels for Hopper, compiled for {device_kind}"
    if any(kind in device_kind for kind in (*_AMPERE, *_ADA)):
        return "ampere", f"Pallas kernels for Ampere and Ada, compiled for {device_kind}"
    if any(kind in device_kind for kind in BLACKWELL):
        return "ampere", f"Pallas kernels for Ampere, compiled for {device_kind}; there are none for Blackwell alone"
    needed = f"{_BACKENDS['gpu'].devices} or {_BACKENDS['ampere'].devices}"
    return "xla", f"portable attention: the GPU kernels need {needed}, this is {device_kind or 'unknown'}"


def multiplies_fp8(device_kind: str) -> bool:
    """Whether the tensor cores of a GPU multiply 8-bit floats."""
    return any(kind in device_kind for kind in (*_HOPPER, *_ADA, *BLACKWELL))


def emulates_bfloat16(device_kind: str) -> bool:
    """Whether a GPU multiplies float16 but not bfloat16, which XLA then computes in float32."""
    return any(kind in device_kind for kind in (*_VOLTA, *_TURING))


def resolve_impl(
    impl: str | None, shape: AttnShape, *, platform: str | None = None, device_kind: str | None = None
) -> tuple[str, str]:
    """The implementation for a shape, and the reason for users. Its pages should have `choose_layout`'s layout.

    The default device is the one being traced for.

    Raises:
        ValueError: `impl` was asked for by name, and cannot run on the device or do the shape.
    """
    platform = traced_platform() if platform is None else platform
    device_kind = traced_device_kind() if device_kind is None else device_kind
    name, reason = choose_impl(platform, device_kind)
    if impl is not None:
        backend = find_backend(impl)
        if impl == name or backend.platform is None:
            obstacle = None
        elif backend.platform != platform:
            obstacle = f"it runs on {backend.platform}, this is {platform}"
        else:
            anywhere = backend.interpret or not backend.devices
            obstacle = None if anywhere else f"it needs {backend.devices}, this is {device_kind or 'unknown'}"
        obstacle = obstacle or _find_obstacle(impl, shape, platform)
        if obstacle is not None:
            raise ValueError(f"impl {impl!r} cannot run: {obstacle}; use impl='xla' or None")
        return impl, "asked for by name"
    obstacle = _find_obstacle(name, shape, platform)
    return (name, reason) if obstacle is None else ("xla", f"portable attention: {obstacle}")


def _find_obstacle(impl: str, shape: AttnShape, platform: str) -> str | None:
    backend = find_backend(impl)
    spec = replace(shape.spec, layout=choose_layout(impl, shape.spec, platform=platform))
    obstacle = backend.module.find_obstacle(replace(shape, spec=spec))
    return find_compiler_obstacle() if obstacle is None and backend.platform == "gpu" else obstacle


def choose_layout(impl: str, spec: KVSpec, *, platform: str | None = None) -> str:
    """The page layout (spec.LAYOUTS) for an implementation, whatever the spec's own.

    It is the one that the implementation wants. One that runs on all platforms gets, on a TPU, one that XLA need not
    copy. The default platform is the one being traced for.
    """
    backend = find_backend(impl)
    if backend.platform is None and (platform or traced_platform()) == "tpu":
        return fill_lanes(spec)
    return backend.module.choose_layout(spec)


def find_table_obstacle(impl: str, num_rows: int, table_width: int) -> str | None:
    """Why an implementation cannot have a page table of this size, in words for users."""
    find = getattr(find_backend(impl).module, "find_table_obstacle", None)
    return None if find is None else find(num_rows, table_width)

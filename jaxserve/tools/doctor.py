"""The report behind `jaxserve doctor`: what would run here, and what is broken.

Each check imports the packages it looks at, so that the report works in a broken installation.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from jaxserve.devices import find_devices, find_version, first_line, load_jax
from jaxserve.errors import DeviceError, JaxServeError

if TYPE_CHECKING:
    from jaxserve.config import EngineConfig
    from jaxserve.core.models.base import DecoderConfig
    from jaxserve.engine.tower_files import TowerFiles
    from jaxserve.features.speculation.drafters import DrafterModel

_PACKAGES = (
    "jaxserve",
    "jax",
    "jaxlib",
    "jax-cuda12-plugin",
    "jax-cuda13-plugin",
    "libtpu",
    "numpy",
    "flax",
    "orbax-checkpoint",
    "tokenizers",
    "sentencepiece",
)
# (platform, the file by which the kernel shows it, its name, what of a checkout makes JAX use it)
_HARDWARE = (
    ("gpu", Path("/proc/driver/nvidia/version"), "an NVIDIA GPU", "'.[cuda13]' or '.[cuda12]'"),
    ("tpu", Path("/dev/accel0"), "a TPU", "'.[tpu]'"),
)
_LEAST_FREE = 2**30  # bytes on the compile cache's disk; a large model's programs take some hundred MiB
_MIB = 2**20
_PROBE_BYTES = 2**16

_STYLES = {"ok": "green", "note": "yellow", "broken": "bold red", "skipped": "dim"}


@dataclass(frozen=True)
class FindParts:
    """Functions that read the parts of the model that the options name."""

    model: Callable[[str], DecoderConfig]  # for a kind of device
    drafter: Callable[[DecoderConfig], DrafterModel | None]  # the one with weights
    tower: Callable[[DecoderConfig], TowerFiles | None]  # if it reads images


@dataclass(frozen=True)
class Seen:
    """The result of a check that passed: `value` is for later checks, `advice` says what could be better."""

    text: str
    value: Any = None
    advice: str = ""


@dataclass(frozen=True)
class Check:
    """One section of the report."""

    title: str
    look: Callable[[dict[str, Any]], Seen]  # takes earlier checks' values by title; raises if broken
    advice: str = ""  # for errors that carry none
    needs: tuple[str, ...] = ()  # titles of checks that must have passed


@dataclass(frozen=True)
class Finding:
    """The outcome of one check."""

    title: str
    status: str  # a key of _STYLES
    text: str
    advice: str = ""  # what to do, unless the text says it


def list_checks(config: EngineConfig, find: FindParts) -> tuple[Check, ...]:
    """Returns the sections of the report, in order."""
    again = "install jaxserve again, in a fresh environment"
    spared = "set JAX_PLATFORMS=cpu to do without the accelerator"
    cache_dir = config.compile.cache_dir
    return (
        Check("Versions", lambda _: Seen(_list_versions()), again),
        Check("JAX", lambda _: Seen("can be imported", load_jax()), again),
        Check("Devices", lambda _: _look_at_devices(), spared, needs=("JAX",)),
        Check("Accelerators", _look_for_accelerators, spared, needs=("Devices",)),
        Check("Model", lambda seen: _look_at_model(find, seen), again, needs=("JAX",)),
        Check("Drafts", lambda seen: _look_at_drafts(config, find, seen), again, needs=("Model",)),
        Check("Images", lambda seen: _look_at_images(find, seen), again, needs=("Model",)),
        Check("Attention", lambda seen: _look_at_attention(config, seen), again, needs=("Devices", "Drafts", "Images")),
        Check("Forward programs", _list_forward_programs, again, needs=("Attention",)),
        Check("Sample programs", _list_sample_programs, again, needs=("Attention",)),
        Check("Compile cache", lambda _: _look_at_cache(cache_dir), "set compilation_cache_dir to another directory"),
    )


def run_checks(checks: Iterable[Check]) -> list[Finding]:
    """Runs all checks and returns their findings, in order; a failed check does not stop the others."""
    values: dict[str, Any] = {}
    return [_run_check(check, values) for check in checks]


def print_report(config: EngineConfig, find: FindParts) -> bool:
    """Prints the report of `list_checks`; returns whether nothing is broken."""
    findings = run_checks(list_checks(config, find))
    table = Table.grid(padding=(0, 2))
    for finding in findings:
        style = _STYLES[finding.status]
        text = escape(finding.text) + (f"\n[bold]-> {escape(finding.advice)}[/]" if finding.advice else "")
        table.add_row(f"[{style}]{finding.status}[/]", f"[bold]{finding.title}[/]", text)
    console = Console(highlight=False)
    console.print(table)
    broken = [finding.title for finding in findings if finding.status == "broken"]
    console.print(f"[bold red]Broken: {', '.join(broken)}[/]" if broken else "[green]Nothing is broken.[/]")
    return not broken


def _run_check(check: Check, values: dict[str, Any]) -> Finding:
    missing = [title for title in check.needs if title not in values]
    if missing:
        return Finding(check.title, "skipped", f"needs {missing[0]}")
    try:
        seen = check.look(values)
    except DeviceError as error:
        return Finding(check.title, "broken", f"{error.field}: {error.reason}", error.advice)
    except JaxServeError as error:  # its text says what would work
        return Finding(check.title, "broken", str(error))
    except OSError as error:
        return Finding(check.title, "broken", f"{error.filename or ''}: {error.strerror or error}", check.advice)
    except Exception as error:
        return Finding(check.title, "broken", f"{type(error).__name__}: {first_line(error)}", check.advice)
    values[check.title] = seen.value
    return Finding(check.title, "note" if seen.advice else "ok", seen.text, seen.advice)


def _list_versions() -> str:
    versions = {name: find_version(name) for name in _PACKAGES}
    return ", ".join(f"{name} {version}" for name, version in versions.items() if version)


def _look_at_devices() -> Seen:
    from jaxserve.core.runtime.host_memory import host_memory_bytes
    from jaxserve.core.runtime.memory import device_memory_bytes, format_bytes

    devices = find_devices()
    kinds = Counter((device.platform, device.device_kind, device_memory_bytes(device)) for device in devices)
    lines = []
    for (platform, kind, size), count in kinds.items():
        name = kind if kind == platform else f"{kind} ({platform})"
        memory = f"{format_bytes(host_memory_bytes())} of the host" if size is None else format_bytes(size)
        lines.append(f"{count} x {name}, {memory}")
    return Seen("\n".join(lines), devices)


def _look_for_accelerators(seen: dict[str, Any]) -> Seen:
    """Finds an accelerator that JAX does not use, unless JAX_PLATFORMS is set."""
    platforms = {device.platform for device in seen["Devices"]}
    if seen["JAX"].config.jax_platforms:
        return Seen(f"JAX_PLATFORMS is {seen['JAX'].config.jax_platforms}")
    for platform, trace, name, packages in _HARDWARE:
        if trace.exists() and platform not in platforms:
            return Seen(f"there is {name}, which JAX does not use", advice=f"pip install {packages} in a checkout")
    return Seen("none is left unused")


def _look_at_model(find: FindParts, seen: dict[str, Any]) -> Seen:
    model = find.model(seen["Devices"][0].device_kind if "Devices" in seen else "")
    return Seen(f"{model.family}, {model.num_layers} layers, {model.max_model_len:,} tokens, {model.dtype}", model)


def _look_at_drafts(config: EngineConfig, find: FindParts, seen: dict[str, Any]) -> Seen:
    chosen = config.speculation.speculative_config
    if chosen is None:
        return Seen("none")
    drafter = find.drafter(seen["Model"])
    what = f"{chosen.method}, up to {chosen.num_speculative_tokens} tokens a step"
    if drafter is None:
        return Seen(f"{what}, looked up in what was said before")
    return Seen(f"{what}; layers of the drafter: {drafter.config.num_layers}, {drafter.config.dtype}", drafter)


def _look_at_images(find: FindParts, seen: dict[str, Any]) -> Seen:
    from jaxserve.engine.images import describe_images

    tower = find.tower(seen["Model"])
    if tower is None:
        return Seen("none are read")
    return Seen(f"{describe_images(tower.images)}; layers of the tower: {tower.config.blocks.num_layers}", tower.config)


def _look_at_attention(config: EngineConfig, seen: dict[str, Any]) -> Seen:
    from jaxserve.core.runtime.self_test import confirm_kernels
    from jaxserve.core.runtime.tower import choose_tower_impl
    from jaxserve.core.runtime.weight_report import describe_weights
    from jaxserve.features.choose import make_shapes
    from pallas_kernels.cpu.attention import uses_tiles
    from pallas_kernels.cpu.library import find_obstacle as find_library_obstacle

    device = seen["Devices"][0]
    parts = seen["Drafts"], seen["Images"]
    shapes = make_shapes(config, seen["Model"], device.platform, device.device_kind, *parts)
    shapes = confirm_kernels(shapes, device)
    lines, is_slow = [f"{shapes.impl}: {shapes.impl_reason}"], shapes.fell_back
    if shapes.prompt_impl is not None:
        lines.append("prompts, {}: {}".format(*shapes.prompt_impl))
    elif shapes.impl == "cpu" and any(uses_tiles(spec, shapes.model.dtype) for spec in shapes.specs):
        lines[0] += ", prompts in tiles (AMX)"
    if shapes.model.packed:
        unit = "tiles (AMX)" if shapes.model.dtype == "bfloat16" else "vectors"
        lines.append(f"products, cpu: C++ kernels, {shapes.model.dtype} weights packed when they are loaded, in {unit}")
    elif shapes.model.few_rows:
        lines.append(
            f"products, cpu: C++ kernel for {shapes.model.dtype} up to {shapes.model.few_rows} rows, then XLA's"
        )
    if shapes.experts is not None:
        lines.append(f"experts, {shapes.experts.impl}: {shapes.experts.reason}")
        is_slow |= shapes.experts.is_slow
    if shapes.recurrence is not None:
        lines.append(f"recurrent states, {shapes.recurrence.impl}: {shapes.recurrence.reason}")
        is_slow |= shapes.recurrence.is_slow
    if (tower := seen["Images"]) is not None:
        impl, reason = choose_tower_impl(tower, shapes.impl, shapes.num_devices, shapes.platform)
        lines.append(f"images, {impl}: {reason}")
    weights = describe_weights(shapes.model)
    if weights is not None:
        lines.append(f"weights, {weights}: products with {shapes.model.dtype}, which is more exact than fewer bits")
    advice = "steps will be slower than with kernels made for the device" if is_slow else ""
    if shapes.platform == "cpu" and shapes.impl == "xla" and find_library_obstacle() is not None:
        advice = "install a C++ compiler, such as g++: decoding is then up to twice as fast"
    return Seen("\n".join(lines), shapes, advice)


def _list_forward_programs(seen: dict[str, Any]) -> Seen:
    return Seen(", ".join(map(str, seen["Attention"].buckets.buckets)))


def _list_sample_programs(seen: dict[str, Any]) -> Seen:
    names = ", ".join(variant.name.lower() for variant in seen["Attention"].sample_programs)
    return Seen(f"{names} and log-probabilities for {', '.join(map(str, seen['Attention'].buckets.row_counts))} rows")


def _look_at_cache(directory: Path | None) -> Seen:
    """Checks that the compile cache can be read and written, as a start would."""
    if directory is None:
        return Seen("none", advice="programs are compiled at every start; compilation_cache_dir names a directory")
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=directory) as probe:
        probe.write(bytes(_PROBE_BYTES))
        probe.flush()
        os.fsync(probe.fileno())
    with os.scandir(directory) as entries:
        files = [entry for entry in entries if entry.is_file()]
    unreadable = [entry.path for entry in files if not os.access(entry.path, os.R_OK)]
    if unreadable:
        advice = f"make {directory} and its files your own, or give another directory"
        raise DeviceError(f"{len(unreadable)} of its files cannot be read", advice, field=str(directory))
    used, free = sum(entry.stat().st_size for entry in files), shutil.disk_usage(directory).free
    text = f"{directory}: {len(files):,} files, {used / _MIB:,.0f} MiB; {free / _MIB:,.0f} MiB are free"
    return Seen(text, advice="free some space: large models need more" if free < _LEAST_FREE else "")

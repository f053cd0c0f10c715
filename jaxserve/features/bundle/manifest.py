"""The manifest of a bundle: its files, and the engine that its programs are for.

A bundle is a directory: `manifest.json`, a file for each program, and the library of CPU kernels. It is code, like the
package itself: whoever can write it can run anything where it is loaded. So it must belong to the user or to root,
others must not be able to write it, and every file has its SHA-256 in the manifest.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jaxlib
from jax.sharding import Mesh

from jaxserve import __version__
from jaxserve.config import read_compiler_flags
from jaxserve.core.runtime.identity import describe_mesh, describe_model, list_chosen_options
from jaxserve.core.runtime.shapes import Shapes
from jaxserve.core.runtime.step_programs import ProgramKey
from jaxserve.devices import find_version
from jaxserve.errors import ConfigError, shorten
from jaxserve.files import find_other_writer, read_regular
from pallas_kernels.cpu.library import digest as digest_kernels

MANIFEST = "manifest.json"
FORMAT = 3
_MAX_MANIFEST = 16 * 2**20  # bytes
_COMPILERS = {"tpu": ("libtpu",), "gpu": ("jax-cuda13-plugin", "jax-cuda12-plugin")}
# Options that no program depends on: where weights come from, how programs are compiled, and who is planned when.
_OTHER_OPTIONS = frozenset({
    "model", "revision", "load_format", "seed", "skip_tokenizer_init", "compile", "compile_threads", "allow_nonfinite",
    "async_scheduling", "enable_prefix_caching", "long_prefill_token_threshold", "max_long_partial_prefills",
    "max_num_partial_prefills", "max_num_queued_reqs", "max_num_queued_tokens",
    "priority_itl_ms", "priority_scheduling_preemption_threshold", "scheduling_policy",
})  # fmt: skip


@dataclass(frozen=True)
class BundleFile:
    """A file of a bundle: its name in the directory, its digest, and its bytes."""

    file: str
    sha256: str
    size: int


@dataclass(frozen=True)
class Manifest:
    """The content of `manifest.json`."""

    facts: Mapping[str, Any]  # what must be the same where the bundle is loaded
    num_pages: tuple[int, ...]  # of each KV group
    num_snapshots: int  # of recurrent states
    use: Mapping[str, int] | None  # the fields of `DeviceUse`; None on CPU
    programs: Mapping[str, BundleFile]  # by `identify`
    library: BundleFile | None  # the CPU kernels that programs call
    tested: bool  # the kernels passed their self-test where the bundle was built

    def to_json(self) -> str:
        """Returns the text of the file."""
        value = {"bundle": FORMAT, **dataclasses.asdict(self)}
        return json.dumps(value, indent=1, default=list)


def identify(key: ProgramKey) -> str:
    """Returns the name under which a manifest has a program."""
    return f"{key[0]} {key[1]!r}"


def read_manifest(folder: Path) -> Manifest:
    """Returns the manifest of a bundle; ConfigError if there is none, or others may have written it."""
    refuse_foreign(folder)
    try:
        value = json.loads(read_regular(folder / MANIFEST, _MAX_MANIFEST))
        if value["bundle"] != FORMAT:
            message = f"has format {shorten(value['bundle'])}, and this version reads {FORMAT}; build it again"
            raise ConfigError(message, field="bundle", value=str(folder))
        programs = {name: BundleFile(**file) for name, file in value["programs"].items()}
        library = None if value["library"] is None else BundleFile(**value["library"])
        return Manifest(
            dict(value["facts"]),
            tuple(map(int, value["num_pages"])),
            int(value["num_snapshots"]),
            value["use"],
            programs,
            library,
            value["tested"] is True,
        )
    except FileNotFoundError as error:
        message = f"{folder} is not a bundle: it has no {MANIFEST}; jaxserve build makes one"
        raise ConfigError(message, field="bundle", value=str(folder)) from error
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        if isinstance(error, ConfigError):
            raise
        message = f"{folder / MANIFEST} cannot be read ({error!r}); build it again"
        raise ConfigError(message, field="bundle", value=str(folder)) from error


def refuse_foreign(folder: Path) -> None:
    """Raises ConfigError if somebody else owns the directory or a file in it, or may write there."""
    if not folder.is_dir():
        raise ConfigError(f"{folder} is not a directory", field="bundle", value=str(folder))
    for path in sorted(folder.iterdir()):
        if not stat.S_ISREG(path.lstat().st_mode):
            raise ConfigError(f"{path} is not a regular file", field="bundle", value=str(folder))
    reason = find_other_writer(folder)
    if reason is not None:
        message = f"{reason}, and a bundle is code; it must belong to you or to root: chmod -R go-w {folder}"
        raise ConfigError(message, field="bundle", value=str(folder))


def read_file(folder: Path, file: BundleFile) -> bytes:
    """Returns the bytes of a file; ConfigError, with its name, if they are not those of the manifest."""
    path = folder / file.file
    try:
        data = read_regular(path, file.size)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}", field="bundle", value=str(folder)) from error
    if hashlib.sha256(data).hexdigest() != file.sha256:
        message = f"{path} was cut short or altered: its SHA-256 is not the manifest's; build it again"
        raise ConfigError(message, field="bundle", value=str(folder))
    return data


def describe_target(shapes: Shapes, mesh: Mesh) -> dict[str, Any]:
    """Returns what an engine's programs depend on: versions, devices, flags of compilers, options and the model."""
    device = mesh.devices.flat[0]
    compiler = next((f"{name} {v}" for name in _COMPILERS.get(shapes.platform, ()) if (v := find_version(name))), None)
    options = list_chosen_options(shapes.config)
    facts = {
        "jaxserve": __version__,
        "jax": jax.__version__,
        "jaxlib": jaxlib.__version__,
        "compiler": compiler,
        "platform": shapes.platform,
        "device": device.device_kind,
        **describe_mesh(mesh),
        "cpu": digest_kernels() if shapes.platform == "cpu" else None,  # and of its instructions
        "flags": read_compiler_flags(),
        "attention": shapes.impl,
        "options": {name: value for name, value in options.items() if name not in _OTHER_OPTIONS},
        "buckets": [str(bucket) for bucket in shapes.buckets.buckets],
        **describe_model(shapes.model),
        "state copies": shapes.state.max_state_copies,
        "features": [dict(feature.describe(shapes)) for feature in shapes.features],
    }
    return dict(json.loads(json.dumps(facts)))

"""What a compiler says of a program, and what of that fails the gate."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace

from pallas_kernels.testing.targets import Target

_ENTRY = re.compile(r"Compiling entry function '([^']+)'")
# ptxas calls some losses warnings and others notes: 'setmaxnreg' ignored, wgmma serialized.
_COMPLAINT = re.compile(r"ptxas (?:warning|error)\b|Potential Performance Loss")
_REGISTERS = re.compile(r"Used (\d+) registers")
_SPILLS = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")
_TPU_CALL = re.compile(r'%([\w-]+?)(?:\.\d+)* = .*custom_call_target="tpu_custom_call"')
_VMEM = re.compile(r'"used_scoped_memory_configs":\[([^\]]*)\]')
_COPIED_PARAM = re.compile(r' copy\(.*op_name="(params\[[^"]*)"')
_VMEM_SIZE = re.compile(r'"memory_space":"1"[^}]*"size":"(\d+)"')


@dataclass(frozen=True)
class KernelUse:
    """One kernel of a program. None: this compiler, or this way of compiling, does not say."""

    name: str
    digest: str = ""  # of its code, where that can be had
    registers: int | None = None  # per thread
    spill_bytes: int | None = None  # stores and loads
    threads: int | None = None  # per block
    shared_memory_bytes: int | None = None  # per block
    vmem_bytes: int | None = None


@dataclass(frozen=True)
class ProgramReport:
    """One program of the gate. Bytes are of one device."""

    name: str
    target: str
    seconds: float = 0.0
    is_compiled: bool = False  # else lowered only
    argument_bytes: int = 0
    alias_bytes: int = 0
    temp_bytes: int = 0
    donated_bytes: int = 0  # the KV pool, which must be among the aliases
    impl: str = ""  # that was asked for
    compiler: str = ""  # and its version, where it is known
    reason: str = ""  # why it is the portable one, where a target's kernels are known not to do a shape
    kernels: tuple[KernelUse, ...] = ()
    complaints: tuple[str, ...] = ()  # of ptxas, in its words
    copied_params: tuple[str, ...] = ()  # that the program brings into another layout, once or in every layer
    error: str = ""

    def to_json(self) -> str:
        """One line."""
        return json.dumps(asdict(self))


def read_report(line: str) -> ProgramReport:
    """The report of a line of `to_json`."""
    values = json.loads(line)
    values["kernels"] = tuple(KernelUse(**kernel) for kernel in values["kernels"])
    values["complaints"] = tuple(values["complaints"])
    values["copied_params"] = tuple(values["copied_params"])
    return ProgramReport(**values)


def parse_ptxas(text: str) -> list[KernelUse]:
    """What ptxas prints when it is verbose, in the order of its entry functions."""
    kernels: list[KernelUse] = []
    for line in text.splitlines():
        if found := _ENTRY.search(line):
            kernels.append(KernelUse(found[1]))
        elif kernels and (found := _SPILLS.search(line)):
            kernels[-1] = replace(kernels[-1], spill_bytes=sum(map(int, found.groups())))
        elif kernels and (found := _REGISTERS.search(line)):
            kernels[-1] = replace(kernels[-1], registers=int(found[1]))
    return kernels


def list_complaints(text: str) -> list[str]:
    """The lines in which ptxas says that it did not do what it was asked for, or not as fast as it could be."""
    return list(dict.fromkeys(line.strip() for line in text.splitlines() if _COMPLAINT.search(line)))


def parse_tpu_kernels(hlo: str) -> list[KernelUse]:
    """The Pallas calls of a compiled TPU program: names, and bytes of VMEM for scratch, blocks and spilled registers.

    Calls of one name, as all layers have, count as the one that needs most.
    """
    sizes: dict[str, int] = {}
    for line in hlo.splitlines():
        if found := _TPU_CALL.search(line):
            used = _VMEM.search(line)
            size = sum(int(size) for size in _VMEM_SIZE.findall(used[1])) if used else 0
            sizes[found[1]] = max(size, sizes.get(found[1], 0))
    return [KernelUse(name, vmem_bytes=size) for name, size in sizes.items()]


def list_copied_params(hlo: str) -> list[str]:
    """The parameters of a compiled program of which it makes copies, by the names they are traced with."""
    return sorted({found[1].replace("\\'", "'") for line in hlo.splitlines() if (found := _COPIED_PARAM.search(line))})


def merge_uses(
    launches: Iterable[KernelUse], compiled: Sequence[KernelUse], seen: dict[str, KernelUse]
) -> list[KernelUse]:
    """Joins what the lowered program says (shared memory, threads) with what ptxas says of the same kernels.

    ptxas names a function after its kernel's module; of several of one name the worst figures count for each. `seen`
    has, by digest, the kernels of earlier programs, which are not compiled again, and takes the new ones. A kernel that
    ptxas says nothing about keeps its gaps, which `find_faults` does not let pass.
    """
    merged = []
    for launch in launches:
        if launch.digest not in seen:
            matches = [use for use in compiled if use.name.startswith(f"{launch.name}_mosaic")]
            worst = max(matches, key=lambda use: (use.spill_bytes or 0, use.registers or 0), default=KernelUse(""))
            seen[launch.digest] = replace(launch, registers=worst.registers, spill_bytes=worst.spill_bytes)
        merged.append(seen[launch.digest])
    return merged


def find_faults(report: ProgramReport, target: Target) -> list[str]:
    """Why a program does not pass; empty if it does."""
    if report.error:
        return [report.error]
    faults = []
    if report.impl == target.impl and not report.kernels:
        faults.append("there is no Pallas kernel in the program")
    for kernel in report.kernels:
        faults += _find_kernel_faults(kernel, target, is_compiled=report.is_compiled)
    if not report.is_compiled:
        return faults
    faults += report.complaints
    if report.alias_bytes < report.donated_bytes:
        faults.append(
            f"the donated pool is copied: {report.donated_bytes:,} bytes, of which at most {report.alias_bytes:,} alias"
        )
    if report.copied_params:
        faults.append(f"weights are copied in every step: {', '.join(report.copied_params)}")
    needed = report.argument_bytes + report.temp_bytes
    if needed > target.memory_bytes:
        faults.append(f"{needed:,} bytes of arguments and temporaries, the {target.name} has {target.memory_bytes:,}")
    if report.donated_bytes and report.temp_bytes >= report.donated_bytes:
        faults.append(f"temporaries of {report.temp_bytes:,} bytes: room for a second pool")
    return faults


def _find_kernel_faults(kernel: KernelUse, target: Target, *, is_compiled: bool) -> list[str]:
    """Of one kernel: limits of the target, and figures that are missing although the compiler prints them."""
    faults = []
    if target.platform == "gpu":
        if is_compiled and (kernel.registers is None or kernel.spill_bytes is None):
            faults.append(f"{kernel.name}: ptxas said nothing of it (is MOSAIC_GPU_DUMP_PTXAS=1 set?)")
        if kernel.spill_bytes:
            faults.append(f"{kernel.name}: {kernel.spill_bytes} bytes of registers spill")
        if kernel.shared_memory_bytes is None:
            faults.append(f"{kernel.name}: its shared memory is unknown")
    elif is_compiled and not kernel.vmem_bytes:
        faults.append(f"{kernel.name}: its VMEM is unknown")
    limits = (
        ("shared memory", kernel.shared_memory_bytes, target.shared_memory_bytes),
        ("VMEM", kernel.vmem_bytes, target.vmem_bytes),
    )
    for what, used, limit in limits:
        if used is not None and limit is not None and used > limit:
            faults.append(f"{kernel.name}: {used:,} bytes of {what}, the {target.name} has {limit:,}")
    return faults

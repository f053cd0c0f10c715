"""What a compiler says about a program, and what fails the gate."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace

from pallas_kernels.targets import Target
from pallas_kernels.testing.gate_fences import list_unfenced

BLOCK_RESERVE = 1024  # bytes of shared memory that a multiprocessor keeps for each block
_ENTRY = re.compile(r"Compiling entry function '([^']+)'")
# ptxas reports some losses as warnings and others as notes: 'setmaxnreg' ignored, wgmma serialized.
_COMPLAINT = re.compile(r"ptxas (?:warning|error)\b|Potential Performance Loss")
_SPILL_WARNING = "Registers are spilled"
_REGISTERS = re.compile(r"Used (\d+) registers")
_SPILLS = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")
_TPU_CALL = re.compile(r'%([\w-]+?)(?:\.\d+)* = .*custom_call_target="tpu_custom_call"')
_VMEM = re.compile(r'"used_scoped_memory_configs":\[([^\]]*)\]')
# A copy into a TPU's VMEM, S(1), reads the parameter once, as its product would.
_COPIED_PARAM = re.compile(r'(?<!S\(1\)\}) copy\(.*op_name="((?:feature_)?params\[[^"]*)"')
# A product that a TPU computes as a convolution over heads, for which its weight is laid out anew in each layer.
_HEADED_PRODUCT = re.compile(r" convolution\(.*window=\{size=\d+ [^}]*rhs_reversal")
# What XLA launches on a GPU, in the program's main computation. Bitcasts and the members of tuples cost nothing.
_LAUNCH = re.compile(r" (?:fusion|custom-call|copy|sort|while|conditional|all-reduce(?:-start)?)\(")
_WHOLE_NUMBERS = re.compile(r"^ *(?:ROOT )?%\S+ = [su]\d+\[")
_MOSAIC_CALL = re.compile(r'custom_call_target="mosaic_gpu.*op_name="[^"]*?([^/"]+)/[^/"]+"')
# XLA names what it computes again to save memory after the first.
_REPEATED = re.compile(r"^ *(?:ROOT )?%[\w.-]+\.remat(?!erialized)[\w.]* = ", re.MULTILINE)
# A product by Triton: the shape of its result, and the tile of it that a block computes.
_PRODUCT = re.compile(
    r"^ *(?:ROOT )?%(\S+) = \w+\[([\d,]+)\].*"
    r'"kind":"__triton_(?:nested_)?gemm[^{]*\{[^}]*?"output_tiles":\[\{"sizes":\[([^\]]+)\]',
    re.MULTILINE,
)
_SHORT, _LONG = 16, 64  # the least sides of such a tile, where the product has as much
_COLLECTIVE = re.compile(r" (?:all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(?:-start)?\(")
_SPLIT = re.compile(r"^ *%async-collective-start\S* = ", re.MULTILINE)  # a fusion, whose end is another
_STARTED = re.compile(r" (?:all-reduce|all-gather|collective-permute)-start\(")
_COMPUTATION = re.compile(r"^%([\w.-]+) .*\{\n((?:  .*\n)+)\}", re.MULTILINE)
_CONDITION = re.compile(r" while\(.*?condition=%([\w.-]+)")
_CALLED = re.compile(r" fusion\(.*?calls=%([\w.-]+)")
_LIMIT = re.compile(r" = [su](?:32|64)\[\]\S* constant\((\d+)\)")
_VMEM_SIZE = re.compile(r'"memory_space":"1"[^}]*"size":"(\d+)"')
_WARP = 32


@dataclass(frozen=True)
class KernelUse:
    """One kernel of a program. None means that the compiler does not say, or did not run."""

    name: str
    digest: str = ""  # hash of a GPU kernel's code
    registers: int | None = None  # per thread
    spill_bytes: int | None = None  # stores and loads
    threads: int | None = None  # per block
    shared_memory_bytes: int | None = None  # per block
    vmem_bytes: int | None = None
    faults: tuple[str, ...] = ()  # in its code, which its compiler does not see

    def count_blocks(self, target: Target) -> int | None:
        """How many blocks of a GPU's kernel a multiprocessor can hold at once; None if a figure is missing."""
        if None in (self.registers, self.threads, self.shared_memory_bytes, target.sm_memory_bytes):
            return None
        # Registers are given to the warps of a block four by four, to each warp in units of 256.
        warps = _round_up(-(-self.threads // _WARP), 4)
        registers = _round_up(self.registers * _WARP, 256) * warps
        memory = _round_up(self.shared_memory_bytes + 1, 128) + BLOCK_RESERVE  # ptxas counts a byte of its own
        return min(
            target.sm_registers // registers, target.sm_threads // self.threads, target.sm_memory_bytes // memory
        )


@dataclass(frozen=True)
class ProgramReport:
    """One program of the gate. Bytes are per device."""

    name: str
    target: str
    seconds: float = 0.0
    is_compiled: bool = False  # else lowered only
    argument_bytes: int = 0
    alias_bytes: int = 0
    temp_bytes: int = 0
    donated_bytes: int = 0  # the KV pool, which must be among the aliases
    most_temp_bytes: int | None = None  # that may be temporaries, if the program has a limit of its own
    loops_follow_batch: bool = False  # no loop may have a fixed length: it would be that of the longest context
    layer_turns: tuple[int, ...] = ()  # of loops over layers, which are fixed
    impl: str = ""  # the implementation that was compiled
    compiler: str = ""  # name and version, if known
    reason: str = ""  # why `impl` is the portable one, if the target's kernels do not do the shape
    launches: int | None = None  # of the whole program; None if it is not a GPU's
    planned_blocks: int | None = None  # per multiprocessor: the plan of its work counts on so many at once
    judges_tiles: bool = False  # whether products in small tiles are a fault
    small_tiles: tuple[str, ...] = ()  # a GPU's products in small tiles
    collectives: int = 0  # of a TPU's program, in its main computation
    async_pairs: int = 0  # of these, split into a start and an end between which others run
    layer_launches: int | None = None  # of a layer, if there are several
    most_layer_launches: int | None = None  # that a layer may have, if the program has a limit
    repeated: int = 0  # instructions of a GPU's program that are computed again to save memory
    kernels: tuple[KernelUse, ...] = ()
    complaints: tuple[str, ...] = ()  # ptxas' own words
    copied_params: tuple[str, ...] = ()  # parameters that the program copies into another layout
    headed_products: int = 0  # products of a TPU's program that have heads as an axis
    fixed_turns: tuple[int, ...] = ()  # of its loops of a fixed length
    short_indices: tuple[str, ...] = ()  # of 32 bits, into longer axes
    unread_operands: tuple[str, ...] = ()  # of a TPU's kernels
    error: str = ""

    def to_json(self) -> str:
        """One line of JSON."""
        return json.dumps(asdict(self))


def read_report(line: str) -> ProgramReport:
    """The report of a line of `to_json`."""
    values = json.loads(line)
    kernels = (KernelUse(**kernel) for kernel in values["kernels"])
    values["kernels"] = tuple(replace(kernel, faults=tuple(kernel.faults)) for kernel in kernels)
    values["complaints"] = tuple(values["complaints"])
    for name in ("copied_params", "fixed_turns", "layer_turns", "short_indices", "small_tiles", "unread_operands"):
        values[name] = tuple(values[name])
    return ProgramReport(**values)


def parse_ptxas(text: str) -> list[KernelUse]:
    """The kernels in the output of a verbose ptxas, in the order of its entry functions, with the faults of their PTX,
    which is printed before."""
    kernels: list[KernelUse] = []
    unfenced = list_unfenced(text)
    for line in text.splitlines():
        if found := _ENTRY.search(line):
            reads = unfenced.get(found[1])
            faults = ["its PTX is unknown"] if reads is None else [f"{read} behind a store, no fence" for read in reads]
            kernels.append(KernelUse(found[1], faults=tuple(faults)))
        elif kernels and (found := _SPILLS.search(line)):
            kernels[-1] = replace(kernels[-1], spill_bytes=sum(map(int, found.groups())))
        elif kernels and (found := _REGISTERS.search(line)):
            kernels[-1] = replace(kernels[-1], registers=int(found[1]))
    return kernels


def list_complaints(text: str) -> list[str]:
    """The lines in which ptxas warns, fails, or reports a loss of performance."""
    return list(dict.fromkeys(line.strip() for line in text.splitlines() if _COMPLAINT.search(line)))


def parse_tpu_kernels(hlo: str) -> list[KernelUse]:
    """The Pallas calls of a compiled TPU program: names, and bytes of VMEM for scratch, blocks and spilled registers.

    Calls of the same name, as in all layers, count as the one that needs most.
    """
    sizes: dict[str, int] = {}
    for line in hlo.splitlines():
        if found := _TPU_CALL.search(line):
            used = _VMEM.search(line)
            size = sum(int(size) for size in _VMEM_SIZE.findall(used[1])) if used else 0
            sizes[found[1]] = max(size, sizes.get(found[1], 0))
    return [KernelUse(name, vmem_bytes=size) for name, size in sizes.items()]


def list_copied_params(hlo: str) -> list[str]:
    """The parameters that a compiled program copies in HBM, by the names that they were traced with."""
    return sorted({found[1].replace("\\'", "'") for line in hlo.splitlines() if (found := _COPIED_PARAM.search(line))})


def count_headed_products(hlo: str) -> int:
    """How many products of a compiled program a TPU computes over an axis of heads."""
    return len(_HEADED_PRODUCT.findall(hlo))


def list_fixed_turns(hlo: str) -> list[int]:
    """The turns of the loops of a compiled program whose condition, or a fusion in it, has a constant to compare with.

    XLA folds a bound that it knows into the condition, on GPUs and TPUs alike.
    """
    computations = dict(_COMPUTATION.findall(hlo))
    turns = []
    for name in _CONDITION.findall(hlo):
        condition = computations[name]
        called = (computations[fusion] for fusion in _CALLED.findall(condition))
        limits = _LIMIT.findall("".join((condition, *called)))
        turns += [max(map(int, limits))] if limits else []
    return turns


def count_launches(hlo: str) -> int:
    """The kernels that a compiled GPU program launches, its own and XLA's; a loop counts as one."""
    main = hlo[hlo.index("\nENTRY ") :]
    return len(_LAUNCH.findall(main))


def count_collectives(hlo: str) -> tuple[int, int]:
    """The collectives of a compiled TPU program's main computation, and how many of them run beside other work."""
    main = hlo[hlo.index("\nENTRY ") :]
    split = len(_SPLIT.findall(main))
    return split + len(_COLLECTIVE.findall(main)), split + len(_STARTED.findall(main))


def count_layer_launches(hlo: str) -> int | None:
    """The kernels of a layer: those from one call of the first Pallas kernel to its next. None if there is no next.

    Kernels whose result is whole numbers are the step's own, which the compiler may place anywhere.
    """
    main = hlo[hlo.index("\nENTRY ") :]
    launches = [line for line in main.splitlines() if _LAUNCH.search(line) and not _WHOLE_NUMBERS.search(line)]
    calls = {index: found[1] for index, line in enumerate(launches) if (found := _MOSAIC_CALL.search(line))}
    places = [index for index, name in calls.items() if name == next(iter(calls.values()))]
    return places[1] - places[0] if len(places) > 1 else None


def count_repeated(hlo: str) -> int:
    """The instructions that a compiled program computes again to save memory."""
    return len(_REPEATED.findall(hlo))


def list_small_tiles(hlo: str) -> list[str]:
    """The products that a compiled program computes in tiles so small that they wait for memory."""
    found = []
    for name, shape, tile in _PRODUCT.findall(hlo):
        rows, columns = (int(size.strip('"')) for size in tile.split(",")[-2:])
        most_rows, most_columns = (int(size) for size in shape.split(",")[-2:])
        is_wide = _is_wide(rows, most_rows, columns, most_columns)
        if not is_wide and not _is_wide(columns, most_columns, rows, most_rows):
            found.append(f"{name} [{shape}] in tiles of {rows} x {columns}")
    return found


def _is_wide(short: int, most_short: int, long: int, most_long: int) -> bool:
    """Whether the sides of a tile are long enough, one of them in a direction in which the product is not narrow."""
    return most_long >= _SHORT and short >= min(_SHORT, most_short) and long >= min(_LONG, most_long)


def merge_uses(
    launches: Iterable[KernelUse], compiled: Sequence[KernelUse], seen: dict[str, KernelUse]
) -> list[KernelUse]:
    """Joins what the lowered program says (shared memory, threads) with what ptxas says about the same kernels.

    ptxas names a function after its kernel's module. Among several of one name the worst figures count for each. `seen`
    holds, by digest, the kernels of earlier programs, which are not compiled again; new ones are added. A kernel that
    ptxas does not mention keeps its gaps, which `find_faults` reports.
    """
    merged = []
    for launch in launches:
        if launch.digest not in seen:
            matches = [use for use in compiled if use.name.startswith(f"{launch.name}_mosaic")]
            worst = max(matches, key=lambda use: (use.spill_bytes or 0, use.registers or 0), default=KernelUse(""))
            faults = (*launch.faults, *(fault for use in matches for fault in use.faults))
            figures = {"registers": worst.registers, "spill_bytes": worst.spill_bytes}
            seen[launch.digest] = replace(launch, **figures, faults=tuple(dict.fromkeys(faults)))
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
        fitting = kernel.count_blocks(target)
        if report.planned_blocks is not None and fitting is not None and fitting < report.planned_blocks:
            faults.append(f"{kernel.name}: {fitting} blocks per multiprocessor, its plan has {report.planned_blocks}")
    faults += report.short_indices
    faults += [f"a kernel never reads {operand}: others may read zeros" for operand in report.unread_operands]
    if report.is_compiled:
        faults += [line for line in report.complaints if not (target.spill_bytes and _SPILL_WARNING in line)]
        faults += [*_find_program_faults(report), *_find_memory_faults(report, target)]
    return faults


def _find_program_faults(report: ProgramReport) -> list[str]:
    """The faults of what XLA made of a program.

    Products over heads are none beside portable attention: by v5e's estimate a barrier against them makes a step of
    Gemma 3 slower, by 4 %, and a tower of Pixtral by 2 %.
    """
    most = report.most_layer_launches
    faults = {
        f"weights are copied in every step: {', '.join(report.copied_params)}": report.copied_params,
        f"{report.headed_products} products have an axis of heads: their weights are laid out anew in every step": (
            report.impl != "xla" and report.headed_products
        ),
        f"{len(report.small_tiles)} products have small tiles: {report.small_tiles[:1]}": report.judges_tiles
        and report.small_tiles,
        f"{report.layer_launches} kernels a layer, at most {most} are expected": (
            most is not None and (report.layer_launches is None or report.layer_launches > most)
        ),
        f"{report.repeated} instructions are computed again to save memory": report.repeated,
        f"loops have {report.fixed_turns} turns, however short the contexts are": report.loops_follow_batch
        and not set(report.fixed_turns) <= set(report.layer_turns),
    }
    return [text for text, is_so in faults.items() if is_so]


def _find_memory_faults(report: ProgramReport, target: Target) -> list[str]:
    """The faults of a program's arguments and temporaries."""
    needed, temp, most = report.argument_bytes + report.temp_bytes, report.temp_bytes, report.most_temp_bytes
    faults = {
        f"the donated pool is copied: {report.donated_bytes:,} bytes, of which at most {report.alias_bytes:,} alias": (
            report.alias_bytes < report.donated_bytes
        ),
        f"{needed:,} bytes of arguments and temporaries, the {target.name} has {target.memory_bytes:,}": (
            needed > target.memory_bytes
        ),
        f"temporaries of {temp:,} bytes, at most {most or 0:,} are expected": most is not None and temp > most,
        f"temporaries of {temp:,} bytes: room for a second pool": most is None and 0 < report.donated_bytes <= temp,
    }
    return [text for text, is_so in faults.items() if is_so]


def _find_kernel_faults(kernel: KernelUse, target: Target, *, is_compiled: bool) -> list[str]:
    """The faults of one kernel: exceeded limits of the target, figures that the compiler should have printed, and what
    its code has."""
    faults = [f"{kernel.name}: {fault}" for fault in kernel.faults]
    if target.platform == "gpu":
        if is_compiled and (kernel.registers is None or kernel.spill_bytes is None):
            faults.append(f"{kernel.name}: ptxas said nothing of it (is MOSAIC_GPU_DUMP_PTXAS=1 set?)")
        if kernel.spill_bytes and kernel.spill_bytes > target.spill_bytes:
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


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit

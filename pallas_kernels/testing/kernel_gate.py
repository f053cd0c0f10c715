"""Compiles a target's kernels, attention, grouped products and recurrent rules, and prints a JSON line per program.

    python -m pallas_kernels.testing.kernel_gate h200 --json

A child process of `scripts/test_kernels.py`: see `compile_gate.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from pallas_kernels.targets import Target, find_target, open_devices
from pallas_kernels.testing import gate_shapes, grouped_gate, recurrent_gate
from pallas_kernels.testing.compile_gate import Gate, choose_names, make_parser, measure_attention, print_report
from pallas_kernels.testing.gate_report import ProgramReport


def list_programs(target: Target, *, full: bool) -> dict[str, Callable[..., ProgramReport]]:
    """The target's programs by name: functions that take a `Gate` and `impl` and compile them."""
    attention = gate_shapes.list_programs(target, full=full)
    attention += gate_shapes.list_tuned_programs(target) if full else []
    found = {program.name: partial(measure_attention, program=program) for program in attention}
    for name, shape, num_tokens in grouped_gate.list_programs(target, full=full):
        found[name] = partial(grouped_gate.measure_grouped, name=name, shape=shape, num_tokens=num_tokens)
    for program in recurrent_gate.list_programs(target, full=full):
        found[program.name] = partial(recurrent_gate.measure_recurrent, program=program)
    return found


def main() -> None:
    args = make_parser(__doc__ or "").parse_args()
    target = find_target(args.target)
    programs = list_programs(target, full=args.full)
    chosen = choose_names(args, programs)
    gate = Gate(target, [] if args.lower_only else open_devices(target))
    for name in chosen:
        print_report(programs[name](gate, impl=args.impl or target.impl), as_json=args.json)


if __name__ == "__main__":
    main()

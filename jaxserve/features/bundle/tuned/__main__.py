"""Keeps what XLA has dumped on a device of this machine, for programs that are compiled elsewhere:

python -m jaxserve.features.bundle.tuned FILE "NVIDIA H200"
"""

from __future__ import annotations

import argparse
from pathlib import Path

from jaxserve.features.bundle.tuned.options import DATA
from jaxserve.features.bundle.tuned.results import read_results, take_products, write_results


def keep_results(dump: Path, device_kind: str, directory: Path = DATA) -> Path:
    """Writes the results for products to the kind's file, and returns it; those that it has are kept where there is no
    newer one. ValueError if the dump is no text of XLA's results."""
    directory.mkdir(exist_ok=True)
    path = directory / f"{device_kind}.txtpb"
    earlier = read_results(path.read_text()) if path.exists() else []
    path.write_text(write_results(take_products([*read_results(dump.read_text()), *earlier])))
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dump", type=Path, help="text that XLA has written (its name ends in .txtpb)")
    parser.add_argument("device_kind", help="JAX's name for the device")
    args = parser.parse_args()
    print(keep_results(args.dump, args.device_kind))


if __name__ == "__main__":
    main()

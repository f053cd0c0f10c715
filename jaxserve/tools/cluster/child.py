"""Starts a command that ends with its parent: `python -m jaxserve.tools.cluster.child PARENT SIGNAL COMMAND...`."""

from __future__ import annotations

import ctypes
import os
import sys

_SET_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of prctl(2)


def wrap(command: tuple[str, ...], end_signal: int) -> list[str]:
    """Returns a command that runs `command` until this process ends, however it ends. Only Linux can do that.

    Args:
        end_signal: what `command` gets then.
    """
    if not sys.platform.startswith("linux"):
        return list(command)
    return [sys.executable, "-m", __name__, str(os.getpid()), str(int(end_signal)), *command]


def main() -> None:
    """Sets the signal and becomes the command, which keeps it."""
    parent, end_signal, command = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
    ctypes.CDLL(None).prctl(_SET_DEATH_SIGNAL, end_signal, 0, 0, 0)
    if os.getppid() != parent:  # it ended before
        sys.exit(1)
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()

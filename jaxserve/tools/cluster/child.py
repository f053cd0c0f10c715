"""Starts a command that does not outlive its parent: `python -m jaxserve.tools.cluster.child PARENT COMMAND...`."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_SET_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of prctl(2)


def wrap(command: tuple[str, ...]) -> list[str]:
    """Returns a command that runs `command` until this process ends, however it ends. Only Linux can do that."""
    if not sys.platform.startswith("linux"):
        return list(command)
    return [sys.executable, "-m", __name__, str(os.getpid()), *command]


def main() -> None:
    """Sets the signal and becomes the command, which keeps it."""
    parent, command = int(sys.argv[1]), sys.argv[2:]
    ctypes.CDLL(None).prctl(_SET_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it ended before
        sys.exit(1)
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()

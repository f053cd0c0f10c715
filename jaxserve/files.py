"""Untrusted files: only regular ones are opened, reads are bounded, and others must not write where code lies."""

from __future__ import annotations

import errno
import os
import stat
from functools import cache
from pathlib import Path
from typing import BinaryIO

# A FIFO that takes the file's place between the check and the opening must not block. Windows has neither.
_FLAGS = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
_KINDS = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a character device",
    stat.S_IFBLK: "a block device",
    stat.S_IFDIR: "a directory",
}
_UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))


def open_regular(path: Path) -> BinaryIO:
    """Opens a regular file for reading; symbolic links are followed, as Hugging Face's cache is made of them.

    Raises:
        OSError: the file is missing, cannot be opened, or is a FIFO, socket, device or directory. Those are never
            opened: that could block, or act on the device. `strerror` says which, in plain words.
    """
    require_regular(path)
    descriptor = os.open(path, _FLAGS)
    try:
        _check_kind(os.fstat(descriptor), path)
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_regular(path: Path, max_bytes: int) -> bytes:
    """Returns the content of a regular file of at most `max_bytes` bytes.

    Raises:
        OSError: as `open_regular` does, and for a larger file, which is not read.
    """
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size <= max_bytes:
            return file.read(size)  # not `max_bytes`, which would be allocated; a file that grows now is not whole
    reason = f"it has {size:,} bytes, and at most {_format_bound(max_bytes)} are read"
    raise OSError(errno.EFBIG, reason, str(path))


def require_regular(path: Path) -> None:
    """Raises OSError where `open_regular` would, without opening anything."""
    _check_kind(os.stat(path), path)


def find_other_writer(folder: Path) -> str | None:
    """Returns why somebody else may have put code into a directory, in words; None: only this user and root could.

    What is loaded from there as code runs with this user's rights.
    """
    if not hasattr(os, "geteuid"):  # Windows
        return None
    names = (Path(parent) / name for parent, folders, files in os.walk(folder) for name in (*folders, *files))
    for path in (folder, *names):
        try:
            status = path.lstat()
        except FileNotFoundError:  # another process has just removed it
            continue
        if status.st_uid not in (os.geteuid(), 0):
            return f"{path} belongs to another user"
        by_group = status.st_mode & stat.S_IWGRP and not _is_own_group(status.st_gid)
        if not stat.S_ISLNK(status.st_mode) and (status.st_mode & stat.S_IWOTH or by_group):
            return f"{path} can be written by others"
    return None


@cache
def _is_own_group(group_id: int) -> bool:
    """Whether a group has no member but this user: many systems give each user one, and let it write."""
    import grp
    import pwd

    try:
        group, user = grp.getgrgid(group_id), pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return False
    return group.gr_name == user and set(group.gr_mem) <= {user}


def _check_kind(status: os.stat_result, path: Path) -> None:
    if not stat.S_ISREG(status.st_mode):
        kind = _KINDS.get(stat.S_IFMT(status.st_mode), "not a regular file")
        raise OSError(errno.EINVAL, f"it is {kind}, and only regular files are read", str(path))


def _format_bound(count: int) -> str:
    unit, size = next(((unit, size) for unit, size in _UNITS if count >= size), ("bytes", 1))
    return f"{count / size:g} {unit}"

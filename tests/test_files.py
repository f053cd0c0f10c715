"""What stands in place of a file is refused before it is opened, and no more is read than asked."""

from __future__ import annotations

import grp
import os
import pwd
import socket
import tracemalloc
from pathlib import Path
from types import SimpleNamespace

import pytest

from jaxserve import files
from jaxserve.files import find_other_writer, open_regular, read_regular


def make(kind: str, path: Path) -> None:
    match kind:
        case "FIFO":
            os.mkfifo(path)
        case "socket":
            with socket.socket(socket.AF_UNIX) as unix:
                home = os.open(path.parent, os.O_RDONLY)
                unix.bind(f"/proc/self/fd/{home}/{path.name}")  # a socket's path is short
                os.close(home)
        case "character device":
            path.symlink_to("/dev/zero")
        case "directory":
            path.mkdir()


@pytest.mark.parametrize("linked", [False, True])
@pytest.mark.parametrize("kind", ["FIFO", "socket", "character device", "directory"])
def test_what_is_no_regular_file_is_never_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, linked: bool
) -> None:
    path = tmp_path / "there"
    make(kind, path)
    if linked:
        (tmp_path / "link").symlink_to("there")
        path = tmp_path / "link"
    with monkeypatch.context() as patched:
        patched.setattr(os, "open", lambda *args: pytest.fail("opened"))
        with pytest.raises(OSError, match=kind) as caught:
            open_regular(path)
    assert caught.value.filename == str(path)


def test_what_takes_a_files_place_in_between_does_not_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxserve.files.require_regular", lambda path: None)
    os.mkfifo(tmp_path / "fifo")
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match="FIFO"):
        open_regular(tmp_path / "fifo")
    assert len(os.listdir("/proc/self/fd")) == before


def test_reads_up_to_its_bound_also_through_links(tmp_path: Path) -> None:
    (tmp_path / "blob").write_bytes(b"12345678")
    (tmp_path / "small").write_bytes(b"1")
    (tmp_path / "link").symlink_to("blob")
    (tmp_path / "name").symlink_to(tmp_path / "link")  # as in Hugging Face's cache
    assert read_regular(tmp_path / "name", 8) == b"12345678"
    with pytest.raises(OSError, match=r"8 bytes.*at most 7 bytes"):
        read_regular(tmp_path / "name", 7)
    os.truncate(tmp_path / "blob", 2**30 + 1)
    with pytest.raises(OSError, match=r"1,073,741,825 bytes.*at most 1\.5 MiB"):
        read_regular(tmp_path / "name", 3 * 2**19)
    tracemalloc.start()
    assert read_regular(tmp_path / "small", 2**30) == b"1"
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**20, "memory is for the file, not for the bound"
    with pytest.raises(FileNotFoundError):
        read_regular(tmp_path / "nothing", 8)


def test_code_lies_where_nobody_else_writes(tmp_path: Path) -> None:
    folder, inner = tmp_path / "programs", tmp_path / "programs" / "tuned"
    inner.mkdir(parents=True)
    for path in (folder, inner):
        path.chmod(0o755)
    program = inner / "program.bin"
    program.write_bytes(b"code")
    program.chmod(0o644)
    (folder / "link").symlink_to(program)
    assert find_other_writer(folder) is None
    for path, mode in ((program, 0o646), (inner, 0o757), (folder, 0o777)):
        usual = path.stat().st_mode
        path.chmod(mode)
        assert find_other_writer(folder) == f"{path} can be written by others"
        path.chmod(usual)
    assert find_other_writer(folder) is None


@pytest.mark.skipif(os.name == "nt" or os.geteuid() != 0, reason="only root can give files away")
def test_code_of_another_user_is_found(tmp_path: Path) -> None:
    (tmp_path / "cpu-kernels-1-2.so").write_bytes(b"planted")
    tmp_path.chmod(0o755)
    os.chown(tmp_path / "cpu-kernels-1-2.so", 12345, 12345)
    assert find_other_writer(tmp_path) == f"{tmp_path / 'cpu-kernels-1-2.so'} belongs to another user"


@pytest.mark.skipif(os.name == "nt", reason="has no groups")
def test_a_group_of_one_is_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many systems give each user a group, and let it write by default."""
    user = pwd.getpwuid(os.geteuid()).pw_name
    tmp_path.chmod(0o775)
    for name, members, is_own in (
        (user, [], True),
        (user, [user], True),
        (user, ["else"], False),
        ("staff", [], False),
    ):
        files._is_own_group.cache_clear()
        group = SimpleNamespace(gr_name=name, gr_mem=members)
        monkeypatch.setattr(grp, "getgrgid", lambda _, group=group: group)
        assert (find_other_writer(tmp_path) is None) == is_own, (name, members)
    files._is_own_group.cache_clear()

"""Files of others are opened only if they are regular, and new ones never through a link."""

import errno
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from collectives.files import OddFileError, open_new, open_regular, partial_of, write_new


def a_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(path))


ODD: dict[str, Callable[[Path], object]] = {
    "a pipe": os.mkfifo,
    "a folder": Path.mkdir,
    "a device": lambda path: path.symlink_to("/dev/zero"),
    "a socket": a_socket,
}


@pytest.mark.parametrize("what", ODD)
@pytest.mark.parametrize("flags", [os.O_RDONLY, os.O_WRONLY | os.O_CREAT | os.O_APPEND])
def test_what_is_no_regular_file_is_refused_at_once(tmp_path: Path, what: str, flags: int) -> None:
    ODD[what](tmp_path / "x")
    num_open = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OddFileError, match=f"^{tmp_path}/x: it is {what}; expected a regular file$"):
        open_regular(tmp_path / "x", flags, links=True)
    (tmp_path / "link").symlink_to("x")
    with pytest.raises(OddFileError, match="link: it is a link; expected a regular file") as caught:
        open_regular(tmp_path / "link", flags)
    assert caught.value.errno == errno.ELOOP and len(os.listdir("/proc/self/fd")) == num_open


def test_regular_files_are_opened(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"abc")
    (tmp_path / "link").symlink_to("x")
    folder = os.open(tmp_path, os.O_RDONLY)
    for fd in (open_regular("x", folder=folder), open_regular(tmp_path / "link", links=True, most_bytes=3)):
        assert os.read(fd, 10) == b"abc"
        os.close(fd)
    with pytest.raises(OddFileError, match="it has 3 bytes; expected at most 2"):
        open_regular("x", folder=folder, most_bytes=2)
    with pytest.raises(FileNotFoundError):
        open_regular("y", folder=folder)
    os.close(open_regular("y", os.O_WRONLY | os.O_CREAT, 0o600, folder=folder))
    os.close(folder)
    assert (tmp_path / "y").stat().st_mode & 0o777 == 0o600


def test_new_files_are_not_made_through_a_link(tmp_path: Path) -> None:
    precious, link = tmp_path / "precious", tmp_path / "link"
    for target in (precious, tmp_path / "missing"):
        link.unlink(missing_ok=True)
        link.symlink_to(target)
        precious.write_text("mine")
        with pytest.raises(FileExistsError):
            open_new(link)
        write_new(link, b"new")
        assert precious.read_text() == "mine" and link.read_bytes() == b"new" and not (tmp_path / "missing").exists()


def test_partial_files_of_processes_that_have_ended_are_removed(tmp_path: Path) -> None:
    path = tmp_path / "mark.json"
    begin = partial_of(path).name.removesuffix(f"{os.getpid()}.tmp")
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    stay = [
        f"{begin}{os.getppid()}.tmp",
        f".mark.json.0123abcd-{ended.pid}.tmp",
        f"{begin}x.tmp",
        f".other{begin}{ended.pid}.tmp",
    ]
    for name in [*stay, f"{begin}{ended.pid}.tmp"]:
        (tmp_path / name).write_text("")
    (tmp_path / "link").symlink_to(tmp_path)
    partial = partial_of(tmp_path / "link" / path.name)  # the first call for this path
    partial.write_text("ours")
    assert {each.name for each in tmp_path.iterdir()} == {*stay, partial.name, "link"}
    assert partial_of(path) == tmp_path / partial.name and not partial.exists()

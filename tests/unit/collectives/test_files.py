"""Files of others are opened only if they are regular, and new ones never through a link."""

import copy
import errno
import os
import pickle
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from collectives import files
from collectives.diagnosis import dump, failure
from collectives.diagnosis.together import joined
from collectives.files import OddFileError, open_new, open_regular, partial_of, read_named, read_regular, write_new

ROOT = Path(__file__).parents[3]


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


def test_reports_of_each_rank_list_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten thousand ranks may write theirs at once."""
    monkeypatch.setattr(os, "listdir", lambda *_: pytest.fail("lists the folder"))
    monkeypatch.setattr(dump.RecordOutput, "folder", tmp_path)
    monkeypatch.setattr(failure._Output, "file", tmp_path / "failure.txt")
    monkeypatch.delenv("MPITRAIN_FAILURE_FILE", raising=False)
    assert not dump.write_file("a hang")
    failure.write_failure("one")
    assert {each.name for each in os.scandir(tmp_path)} == {f"rank-{dump.RecordOutput.rank}.txt", "failure.txt"}


def test_reports_may_name_files_whose_names_are_no_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failure._Output, "file", tmp_path / "failure.txt")
    monkeypatch.setattr(failure._Output, "tell", None)
    monkeypatch.delenv("MPITRAIN_FAILURE_FILE", raising=False)
    for number in range(3):
        failure.write_failure(f"{number}: no such file: '\udc80\u5b57'")
    text = (tmp_path / "failure.txt").read_text()
    assert text.splitlines()[1::2] == [f"{number}: no such file: '\\udc80\u5b57'" for number in range(3)]


def test_files_that_change_while_they_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x"
    for before, after, most, result in (
        (b"abc", b"ab", 3, b"ab"),
        (b"abc", b"", 3, b""),
        (b"abc", b"abcde", 5, b"abcde"),
        (b"abc", b"abcde", 4, None),
    ):
        path.write_bytes(before)

        def changing(*args: object, after: bytes = after, **more: object) -> int:
            fd = open_regular(*args, **more)  # type: ignore[arg-type]
            path.write_bytes(after)
            return fd

        for piece_bytes in (1, 100):
            monkeypatch.setattr(files, "open_regular", changing)
            monkeypatch.setattr(files, "_PIECE_BYTES", piece_bytes)
            path.write_bytes(before)
            if result is not None:
                assert read_regular(path, most) == result
            else:
                with pytest.raises(OddFileError, match="x: it has more than 4 bytes"):
                    read_regular(path, most)


def test_a_file_that_the_words_name_is_bounded_and_a_pipe_is_one_of_the_shell(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"abc")
    (tmp_path / "link").symlink_to(path)
    for name in (path, tmp_path / "link"):
        assert read_named(name, 3)[0] == b"abc"
        with pytest.raises(OddFileError, match=f"^{name}: it has 3 bytes; expected at most 2$"):
            read_named(name, 2)
    for number, (what, make) in enumerate(ODD.items()):
        odd = tmp_path / f"odd{number}"
        make(odd)
        with pytest.raises(OddFileError, match=f"it is {what}; expected a regular file$"):
            read_named(odd, 3)
    for most_bytes in (3, 2):
        read, write = os.pipe()
        with open(read, "rb"), open(write, "wb", buffering=0) as writer:
            later = threading.Timer(0.05, lambda writer=writer: (writer.write(b"abc"), writer.close()))
            later.start()
            if most_bytes == 3:
                assert read_named(f"/dev/fd/{read}", 3) == (b"abc", "")
            else:
                with pytest.raises(OddFileError, match=f"^/dev/fd/{read}: it has more than 2 bytes$"):
                    read_named(f"/dev/fd/{read}", 2)
            later.join()


def test_an_odd_file_is_told_by_other_ranks_and_processes(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "x")
    with pytest.raises(OddFileError) as caught:
        open_regular(tmp_path / "x")
    error = caught.value
    assert error.what == "is a pipe; expected a regular file" and error.errno == errno.EINVAL
    for other in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert (type(other), other.args, other.filename, str(other)) == (
            OddFileError,
            error.args,
            error.filename,
            str(error),
        )
    with (
        pytest.raises(
            OddFileError, match=rf"^opening the run: {tmp_path}/x: it is a pipe; .* \[rank 1 of 3\]$"
        ) as told,
        joined(lambda report: [None, report, None], "opening the run"),
    ):
        open_regular(tmp_path / "x")
    assert str(pickle.loads(pickle.dumps(told.value))) == str(told.value) == told.value.what


def test_a_module_that_was_loaded_without_the_package_is_that_of_the_package() -> None:
    """In each order, also for what a package has as names of its modules."""
    same = (
        "import pickle, sys, collectives.files, collectives.texts\n"
        "from collectives import files, texts\n"
        "import mpitrain.files, mpitrain.job.elastic.supervisor.texts as of_supervisor\n"
        "assert files is collectives.files is sys.modules['collectives.files'] and texts is collectives.texts\n"
        "assert mpitrain.files.OddFileError is files.OddFileError and mpitrain.files.partial_of is files.partial_of\n"
        "assert of_supervisor.shown is texts.shown\n"
        "assert pickle.loads(pickle.dumps(files.OddFileError)) is mpitrain.files.OddFileError\n"
    )
    alone = (
        "import sys, mpitrain.files, mpitrain.job.elastic.supervisor.texts\nassert 'collectives' not in sys.modules\n"
    )
    from_file = (
        f"{alone}from collectives.files import OddFileError\nassert OddFileError is mpitrain.files.OddFileError\n"
    )
    for first in ("import collectives\n", from_file):
        done = subprocess.run(
            [sys.executable, "-c", first + same], cwd=ROOT, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stderr

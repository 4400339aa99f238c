"""The files of copies in node memory: when a copy counts, which files are passed over, and when node memory is full."""

import fcntl
import os
import struct
import subprocess
import sys
import threading
from pathlib import Path

import msgspec
import numpy as np
import pytest

import ckpt
from benchmarks.chaos.disk import small_disk
from ckpt.tensors import inspect
from mpitrain.job.elastic.copies.files import (
    CopyFile,
    Header,
    complete_copies,
    newest_epoch,
    open_data,
    parts_of,
    path_of,
    prefix,
    remove_copies,
)
from mpitrain.job.elastic.copies.folders import own_folder, own_folders
from mpitrain.job.elastic.copies.holding import file_of, hold, is_unheld, remove_all, unheld
from mpitrain.job.elastic.copies.orphans import orphans, remove_orphans
from mpitrain.job.elastic.copies.partners import Partners, partner_of

RUN = "abc123"


@pytest.fixture(autouse=True)
def room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that stands for the node's shared memory."""
    monkeypatch.setenv("MPITRAIN_SHM_DIR", str(tmp_path))
    return tmp_path


def header_of(step: int, *, epoch: int = 1, rank: int = 0, note: str = "") -> bytes:
    return msgspec.json.encode(Header(step, epoch, rank, 1, 16, (), {"note": note}))


def write(
    step: int, *, run: str = RUN, epoch: int = 1, rank: int = 0, generation: int = 0, note: str = "", **more: bool
) -> CopyFile:
    header = header_of(step, epoch=epoch, rank=rank, note=note)
    file = CopyFile(path_of(run, epoch, rank, generation, **more), 16, len(header))
    file.begin()
    file.data(16)[...] = step
    file.finish(header, 16)
    return file


def steps() -> list[int]:
    return [msgspec.json.decode(found.header, type=Header).step for found in complete_copies(RUN)]


def test_a_copy_counts_only_while_it_is_complete(room: Path) -> None:
    header = header_of(7)
    file = CopyFile(path_of(RUN, 1, 0, 0), 16, len(header))
    assert steps() == []
    file.begin()
    assert steps() == []
    file.data(16)[...] = 7
    assert steps() == []
    file.finish(header, 16)
    assert steps() == [7]
    (found,) = complete_copies(RUN)
    assert found.header == header and (open_data(found.path)[:16] == 7).all()
    assert os.stat(found.path).st_mode & 0o777 == 0o600
    file.begin()
    assert steps() == [], "the next copy overwrites it"


def test_a_later_header_may_be_longer_than_the_first() -> None:
    file = write(7)
    for note in ("x" * 5000, "", "y" * 60000):
        header = header_of(8, note=note)
        assert file.fits(16, len(header))
        file.begin()
        file.finish(header, 16)
        assert [found.header for found in complete_copies(RUN)] == [header]
    assert not file.fits(16, 1 << 20)
    assert not file.fits(1 << 20, 100)


def test_generations_epochs_ranks_and_partners_have_files_of_their_own(room: Path) -> None:
    for epoch, generation, more in ((1, 0, {}), (1, 1, {}), (2, 0, {}), (2, 0, {"for_partner": True})):
        write(10 * epoch + generation, epoch=epoch, generation=generation, **more)
    write(20, epoch=2, rank=1)
    other = write(1, run="other", epoch=9).path
    assert sorted(steps()) == [10, 11, 20, 20, 20] and newest_epoch(RUN) == 2
    remove_copies(RUN, before_epoch=2)
    assert sorted(steps()) == [20, 20, 20] and newest_epoch(RUN) == 2
    CopyFile(path_of(RUN, 5, 0, 0), 16, 16)
    assert newest_epoch(RUN) == 5, "an incomplete copy takes its epoch's number too"
    remove_copies(RUN)
    assert (steps(), newest_epoch(RUN)) == ([], 0)
    assert list(own_folder().iterdir()) == [other]
    remove_copies("other")
    assert list(room.iterdir()) == [], "the empty folder too"


def test_what_is_no_copy_is_passed_over(room: Path) -> None:
    write(7)
    room = own_folder()
    names = iter(f"{prefix(RUN)}local-00000001-{rank:05d}.0" for rank in range(90, 99))
    (room / next(names)).write_bytes(b"")
    (room / next(names)).write_bytes(b"complete")
    (room / next(names)).write_bytes(b"complete" + struct.pack("<QQ", 4096, 1 << 62))
    (room / next(names)).write_bytes(b"complete" + struct.pack("<QQ", 24, 5) + b"{bad}")
    (room / next(names)).write_bytes(b"complete" + struct.pack("<QQ", 24, 12) + b'{"step": "a"}')
    (room / next(names)).mkdir()
    os.mkfifo(room / next(names))
    (room / next(names)).symlink_to(path_of(RUN, 1, 0, 0))
    (room / f"{prefix(RUN)}notes").write_text("no copy")
    assert steps() == [7] and newest_epoch(RUN) == 1
    remove_copies(RUN)
    assert steps() == []
    assert (room / f"{prefix(RUN)}notes").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a file of another user")
def test_a_file_of_another_user_is_passed_over() -> None:
    path = write(7).path
    os.chown(path, 12345, -1)
    assert steps() == []
    with pytest.raises(PermissionError):
        open_data(path)


def test_copies_lie_in_a_folder_that_only_their_user_may_enter(room: Path) -> None:
    old = os.umask(0)
    try:
        path = write(7).path
    finally:
        os.umask(old)
    assert path.parent == room / f"mpitrain-{os.getuid()}"
    assert os.stat(path.parent).st_mode & 0o777 == 0o700 and os.stat(path).st_mode & 0o777 == 0o600


@pytest.mark.parametrize("what", ["file", "link", "dangling", "open", "foreign"])
def test_a_name_that_another_user_has_taken_is_passed_over(what: str, room: Path) -> None:
    if what == "foreign" and os.geteuid() != 0:
        pytest.skip("only root can make a folder of another user")
    name = room / f"mpitrain-{os.getuid()}"
    (room / "own").mkdir(0o700)
    makers = {
        "file": name.touch,
        "link": lambda: name.symlink_to(room / "own"),
        "dangling": lambda: name.symlink_to(room / "nothing"),
        "open": lambda: (name.mkdir(), name.chmod(0o750)),
        "foreign": lambda: (name.mkdir(0o700), os.chown(name, 12345, -1)),
    }
    makers[what]()
    first = write(7)
    assert first.path.parent == name.with_name(f"{name.name}.1") and steps() == [7]
    hold(RUN)
    name.rmdir() if name.is_dir() and not name.is_symlink() else name.unlink()
    second = write(8, rank=1)
    assert second.path.parent == name and steps() == [8, 7], "the copies of both folders"
    remove_all(RUN)
    assert sorted(each.name for each in room.iterdir()) == ["own"]


def test_a_run_is_held_also_in_the_folder_that_it_has_no_longer(room: Path) -> None:
    """A process of it has got another name for the folder than a later one, as a stranger has removed the first name meanwhile."""
    name = room / f"mpitrain-{os.getuid()}"
    name.touch()
    command = [sys.executable, "-c", HOLDER, RUN]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == "holds\n"
            name.unlink()
            copy, other = write(7), write(7, run="other")
            copy.close()
            other.close()
            assert copy.path.parent == name and own_folders() == [name, name.with_name(f"{name.name}.1")]
            assert not is_unheld(RUN) and is_unheld("other")
            assert orphans(0.0) == remove_orphans(0.0) == [other.path]
        finally:
            process.kill()
    assert is_unheld(RUN)
    assert orphans(0.0) == remove_orphans(0.0) == [copy.path]
    assert list(room.iterdir()) == []


@pytest.mark.parametrize("puts", ["a folder", "a file", "a link", "a dangling link"])
def test_a_file_is_made_in_no_folder_that_a_stranger_has_put_there(room: Path, tmp_path: Path, puts: str) -> None:
    path, theirs = path_of(RUN, 1, 0, 0), tmp_path / "theirs"
    path.parent.rmdir()
    if puts == "a folder":
        path.parent.mkdir()
        path.parent.chmod(0o777)
    elif puts == "a file":
        path.parent.touch()
    else:
        if puts == "a link":
            theirs.mkdir(0o700)
        path.parent.symlink_to(theirs)
    file = CopyFile(path, 16, 16)
    assert file.path == path.parent.with_name(f"{path.parent.name}.1") / path.name and file.path.exists()
    file.remove()
    hold(RUN)
    assert not is_unheld(RUN)
    remove_all(RUN)
    assert [each for each in room.iterdir() if each.name.startswith("mpitrain")] == [path.parent]
    if puts in ("a folder", "a link"):
        assert list(path.parent.iterdir()) == []


def test_a_partner_without_a_folder_for_copies_reports_that_and_takes_the_copy(room: Path) -> None:
    """Else the rank that sends the copy would report a lost connection."""
    partners = Partners.__new__(Partners)
    partners._run, partners._epoch, partners._files, partners._error = RUN, 1, {}, None
    for path in (room / f"mpitrain-{os.getuid()}{end}" for end in ("", *(f".{number}" for number in range(1, 8)))):
        path.touch()
    assert partners._file(1, 0, 10, 16) is None
    assert "MPITRAIN_SHM_DIR" in str(partners._error)


def test_without_a_name_that_is_free_the_error_says_what_to_do(room: Path) -> None:
    for path in (room / f"mpitrain-{os.getuid()}{end}" for end in ("", *(f".{number}" for number in range(1, 8)))):
        path.touch()
    assert own_folders() == []
    with pytest.raises(PermissionError, match=r"expected folders of this user with mode 0700: .* MPITRAIN_SHM_DIR"):
        path_of(RUN, 1, 0, 0)
    hold(RUN)
    assert steps() == [] and orphans(0.0) == []
    remove_all(RUN)


@pytest.mark.parametrize(
    ("variable", "said", "word"),
    [
        ("SLURM_JOB_ID", "4711", "job4711"),
        ("PBS_JOBID", "12[3].pbs-server.site", "job12[3].pbs_server.site"),
        ("PBS_JOBID", "../../etc/x y", "job.._.._etc_x_y"),
        ("", "", "local"),
    ],
)
def test_a_name_has_the_job_and_any_job_finds_it(
    variable: str, said: str, word: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for each in ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID"):
        monkeypatch.delenv(each, raising=False)
    if variable:
        monkeypatch.setenv(variable, said)
    path = write(7, epoch=3).path
    assert path.name == f"copy-{RUN}-{word}-00000003-00000.0" and path.parent == own_folder()
    monkeypatch.setenv("SLURM_JOB_ID", "4712")
    assert steps() == [7] and newest_epoch(RUN) == 3 and orphans(0.0) == [path]
    write(8, epoch=4)
    remove_copies(RUN, before_epoch=4)
    assert steps() == [8]


def test_an_empty_folder_that_another_process_removes_is_made_again() -> None:
    path = path_of(RUN, 1, 0, 0)
    own_folder().rmdir()
    CopyFile(path, 16, 16).remove()


def test_copies_of_an_earlier_version_are_found_as_orphans(room: Path) -> None:
    begin = f"mpitrain-copy-{os.getuid()}-{RUN}-"
    (room / f"{begin}00000001-00000.0").touch()
    held = os.open(room / f"{begin}held", os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(held, fcntl.LOCK_SH)
    assert remove_orphans(0.0) == []
    os.close(held)
    assert remove_orphans(0.0) == [room / f"{begin}00000001-00000.0"] and list(room.iterdir()) == []


def test_a_copy_is_locked_until_it_is_closed(room: Path) -> None:
    """A command that cleans up finds by the lock whether a rank still has the copy. No descriptor stays open."""
    before = len(os.listdir("/proc/self/fd"))
    file = write(7)

    def is_locked() -> bool:
        with file.path.open("rb") as other:
            try:
                fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
            return False

    assert is_locked()
    file.close()
    assert not is_locked() and steps() == [7]
    file.close()
    write(8).remove()
    write(9)  # dropped without a close, as after a loss
    assert not is_locked()
    assert len(os.listdir("/proc/self/fd")) == before


HOLDER = """
import sys, time
from mpitrain.job.elastic.copies.folders import own_folder, own_folders
from mpitrain.job.elastic.copies.holding import hold
hold(sys.argv[1])
print("holds", flush=True)
sys.stdin.read()
"""


def test_a_command_that_cleans_up_leaves_the_copies_of_a_run_between_two_copies(room: Path) -> None:
    """After a loss no rank has a copy mapped, and the rank of one of them is dead. A process of the run still holds all of them."""
    paths = [write(7, rank=rank).path for rank in (0, 1)]  # dropped: no lock stays
    other = write(7, run="other").path
    command = [sys.executable, "-c", HOLDER, RUN]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == "holds\n"
            assert orphans(0.0) == [other]
            assert remove_orphans(0.0) == [other]
            assert not other.exists() and steps() == [7, 7]
        finally:
            process.kill()
    assert orphans(0.0) == paths, "its process has died"
    hold(RUN)
    hold(RUN)
    assert remove_orphans(0.0) == []
    write(8, rank=2)
    remove_all(RUN)
    assert list(room.iterdir()) == []
    write(9)
    assert len(remove_orphans(0.0)) == 1 and list(room.iterdir()) == [], "held no longer"


def test_a_run_that_begins_to_hold_waits_for_a_command_that_cleans_up(room: Path) -> None:
    """Then it sees that the copies are gone, and its hold is on a file that others see."""
    write(7)
    held = threading.Event()

    def begin() -> None:
        hold(RUN)
        held.set()

    thread = threading.Thread(target=begin)
    with unheld(file_of(RUN), make=True) as free:
        assert free
        thread.start()
        assert not held.wait(0.2)
        file_of(RUN).unlink()
    thread.join(10)
    assert held.is_set()
    with unheld(file_of(RUN), make=False) as free:
        assert not free
    remove_all(RUN)


def test_a_full_node_memory_raises_and_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = tmp_path / "small"
    try:
        with small_disk(small, 1 << 20):
            monkeypatch.setenv("MPITRAIN_SHM_DIR", str(small))
            with pytest.raises(OSError, match="No space left"):
                CopyFile(path_of(RUN, 1, 0, 0), 1 << 21, 100)
            assert list(own_folder().iterdir()) == []
            CopyFile(path_of(RUN, 1, 0, 0), 1 << 18, 100).remove()
    except PermissionError as error:
        pytest.skip(f"no file system can be mounted here: {error}")


def test_parts_are_aligned_and_only_one_rank_copies_what_all_have() -> None:
    tensors = {
        "rows": ckpt.Shard(np.arange(10, dtype=np.int8).reshape(5, 2), (9, 2), (4, 0)),
        "all": np.float64(3.5) * np.ones(3),
        "none": ckpt.Shard(np.empty((0, 2), np.int8), (9, 2), (0, 0)),
    }
    parts, arrays, nbytes = parts_of(inspect(tensors), whole=True)
    assert [(part.name, part.full, part.offset, part.shape, part.at) for part in parts if part.box.size] == [
        ("all", (3,), (0,), (3,), 0),
        ("rows", (9, 2), (4, 0), (5, 2), 64),
    ]
    assert nbytes == 128 and sum(array.nbytes for array in arrays) == 34
    parts, _, nbytes = parts_of(inspect(tensors), whole=False)
    assert {part.name for part in parts if part.box.size} == {"rows"} and nbytes == 64


@pytest.mark.parametrize(
    "nodes", [[[0, 1], [2, 3]], [[0, 2], [1, 3]], [[0, 1, 2], [3]], [[0], [1, 2, 3]], [[0], [1], [2]]]
)
def test_partners_are_on_another_node(nodes: list[list[int]]) -> None:
    node_of = {rank: index for index, ranks in enumerate(nodes) for rank in ranks}
    for rank, node in node_of.items():
        assert node_of[partner_of(rank, nodes)] == (node + 1) % len(nodes)

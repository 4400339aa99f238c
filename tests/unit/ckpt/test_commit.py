"""All or nothing: names, replacement, retention, what dead jobs leave, and a crash at every step of a save."""

import errno
import os
import re
import resource
import stat
import subprocess
import sys
import warnings
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from checkpoints import names, owner, printed, save, value_of

import ckpt
from ckpt.commit import atomic, leftovers, retention
from ckpt.commit.atomic import mend_latest
from ckpt.commit.owner import signature, start_time
from ckpt.storage.catalog import LATEST_NAME
from ckpt.storage.local_path import LocalPath


def test_a_save_leaves_the_checkpoint_and_the_hint(tmp_path):
    path = save(tmp_path / "runs" / "step-00000007")
    assert names(path) == ["index.h5", "manifest.jsonl", "rank-00000.h5"]
    assert names(path.parent) == [LATEST_NAME, "step-00000007"]
    assert (path.parent / LATEST_NAME).read_text() == "step-00000007\n"
    (found,) = ckpt.list_checkpoints(path.parent)
    assert (found.name, found.step, found.complete, found.num_tensors) == ("step-00000007", 7, True, 1)
    assert found.nbytes == sum(file.stat().st_size for file in path.iterdir())


def test_latest_is_the_last_one_saved_that_is_complete(tmp_path):
    assert ckpt.latest(tmp_path) is None
    assert ckpt.latest(tmp_path / "nowhere") is None
    save(tmp_path / "step-100", 1)
    save(tmp_path / "step-50", 2)  # a run that went back to an earlier step and on from there
    assert ckpt.latest(tmp_path) == tmp_path / "step-50"
    for hint in ("step-7\n", "x" * 300):  # no more than a hint
        (tmp_path / LATEST_NAME).write_text(hint)
        assert ckpt.latest(tmp_path) == tmp_path / "step-50"
        mend_latest(tmp_path)
        assert (tmp_path / LATEST_NAME).read_text() == "step-50\n"
    (tmp_path / "step-50" / "rank-00000.h5").unlink()
    (tmp_path / "notes").mkdir()
    assert ckpt.latest(tmp_path) == tmp_path / "step-100"
    found = {c.name: c for c in ckpt.list_checkpoints(tmp_path)}
    assert set(found) == {"step-50", "step-100"}
    assert found["step-100"].complete and not found["step-50"].complete
    assert "rank-00000.h5 is missing" in found["step-50"].problem
    (tmp_path / "step-100" / "manifest.jsonl").write_bytes(b"{}")
    assert ckpt.latest(tmp_path) is None
    assert "format" in {c.name: c for c in ckpt.list_checkpoints(tmp_path)}["step-100"].problem


def test_an_existing_name_is_refused_or_replaced(tmp_path):
    path = save(tmp_path / "a", 1)
    with pytest.raises(FileExistsError, match="pass overwrite=True"):
        save(path, 2)
    assert value_of(path) == 1
    save(path, 2, overwrite=True)
    assert value_of(path) == 2
    assert names(tmp_path) == ["a", LATEST_NAME]


def test_replacement_where_the_kernel_cannot_exchange(tmp_path, monkeypatch):
    monkeypatch.setattr(atomic, "_exchange", lambda a, b: False)
    monkeypatch.setattr(leftovers, "QUIET_S", 0.0)
    path = save(tmp_path / "a", 1)
    save(path, 2, overwrite=True)
    assert value_of(path) == 2
    assert names(tmp_path) == ["a", LATEST_NAME]
    # a job that died between the two renames: the old one is found, and gets its name back at the next save
    path.rename(tmp_path / ".a.replaced")
    assert value_of(ckpt.latest(tmp_path)) == 2
    assert [c.name for c in ckpt.list_checkpoints(tmp_path)] == ["a"]
    save(tmp_path / "b", 3)
    assert names(tmp_path) == ["a", "b", LATEST_NAME]
    assert value_of(path) == 2


@pytest.mark.parametrize("name", [".hidden", "latest", "/", "step\n7", "step-7\n", "a\x1b[31m", "a\udcff"])
def test_names_a_checkpoint_cannot_have(tmp_path, name):
    with pytest.raises(ValueError, match="cannot be a checkpoint's name"):
        save(tmp_path / name)
    with pytest.raises(ValueError, match="cannot be a checkpoint's name"):
        ckpt.reshard(tmp_path / "any", tmp_path / name, files=1)
    assert names(tmp_path) == []


def test_keep_removes_the_oldest_complete_ones(tmp_path):
    for step in range(5):
        save(tmp_path / f"step-{step}", step, keep=3)
    assert names(tmp_path) == [LATEST_NAME, "step-2", "step-3", "step-4"]
    # a damaged one does not count among the kept
    (tmp_path / "step-4" / "rank-00000.h5").unlink()
    save(tmp_path / "step-5", 5, keep=2)
    assert names(tmp_path) == [LATEST_NAME, "step-3", "step-4", "step-5"]
    # the one just saved stays, whatever its step
    save(tmp_path / "step-1", 1, keep=1)
    assert names(tmp_path) == [LATEST_NAME, "step-1"]
    with pytest.raises(ValueError, match="keep is 0"):
        save(tmp_path / "step-6", keep=0)
    for number in ("3", 2.5, True):
        with pytest.raises(
            TypeError, match=f"keep_every is {number!r}; expected a whole number of at least 1, or None"
        ):
            save(tmp_path / "step-6", keep=1, keep_every=number)
    save(tmp_path / "step-6", 6, keep=np.int64(1))
    assert names(tmp_path) == [LATEST_NAME, "step-6"]


def test_keep_counts_names_with_a_step_alone(tmp_path, capsys):
    for name in ("best", "step-1", "final", "step-2", "step-3"):
        save(tmp_path / name)
    save(tmp_path / "step-4", keep=2)
    assert names(tmp_path) == ["best", "final", LATEST_NAME, "step-3", "step-4"]
    with pytest.warns(
        RuntimeWarning, match=r"^keep=1 neither counts nor removes 'best', whose name ends with no step; exp"
    ) as w:
        ckpt.save(tmp_path / "best", {}, comm=None, overwrite=True, keep=1)
    assert [warning.filename for warning in w] == [__file__]
    assert names(tmp_path) == ["best", "final", LATEST_NAME, "step-4"]
    save(tmp_path / "step-5")
    save(tmp_path / "last")
    assert ckpt.latest(tmp_path).name == "last"  # the newest of all
    assert "older than the newest one" in printed(capsys, "gc", tmp_path, "--keep", "1")
    assert names(tmp_path) == ["best", "final", "last", LATEST_NAME, "step-5"]


def test_a_process_alone_needs_no_communicator(tmp_path):
    path = ckpt.save(tmp_path / "a", {"x": np.arange(3)})
    ckpt.load(path, {"x": np.empty(3, int)})


def test_an_old_checkpoint_that_cannot_be_removed_is_a_warning(tmp_path, monkeypatch):
    save(tmp_path / "step-1", 1)

    def refuse(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(retention, "remove", refuse)
    with pytest.warns(RuntimeWarning, match="could not be removed"):
        save(tmp_path / "step-2", 2, keep=1)
    assert ckpt.latest(tmp_path) == tmp_path / "step-2"


def test_meta_and_tensors_are_checked_before_anything_is_written(tmp_path):
    with pytest.raises(TypeError, match=r"meta\['x'\].*convert a number of NumPy or torch by \.item\(\)"):
        save(tmp_path / "a", meta={"x": object()})
    assert names(tmp_path) == []


@pytest.mark.parametrize("mask", [0o022, 0o007, 0o077])
def test_the_umask_is_kept(tmp_path, mask):
    before = os.umask(mask)
    try:
        path = save(tmp_path / "a")
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o777 & ~mask
    for file in [*path.iterdir(), tmp_path / LATEST_NAME]:
        assert stat.S_IMODE(file.stat().st_mode) == 0o666 & ~mask, file


# Failures


@pytest.mark.parametrize("code", [errno.EINVAL, errno.ENOTSUP, errno.EIO])
def test_a_file_system_that_cannot_flush_folders(tmp_path, monkeypatch, code):
    """Every kind of save works there; an error of the disk stays one."""
    flushed, flush = [], os.fsync

    def fsync(fd):
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            raise OSError(code, os.strerror(code))
        flushed.append(flush(fd))

    monkeypatch.setattr(os, "fsync", fsync)
    path = tmp_path / "runs" / "step-1"
    if code == errno.EIO:
        with pytest.raises(OSError, match="Input/output error"):
            save(path)
        return
    save(path, 1, copies=[tmp_path / "copy"])
    save(path, 2, overwrite=True)
    save(path.with_name("step-2"), 3, keep=1, background=True)
    ckpt.wait()
    (made,) = ckpt.export(path.with_name("step-2"), tmp_path / "x.safetensors")
    ckpt.import_file(made, tmp_path / "imported")
    assert value_of(ckpt.reshard(tmp_path / "imported", tmp_path / "again", files=2)) == 3
    assert value_of(tmp_path / "copy" / "step-1") == 1 and names(path.parent) == [LATEST_NAME, "step-2"]
    assert len(flushed) > 20


def test_a_file_that_cannot_be_flushed_is_not_saved(tmp_path, monkeypatch):
    def fsync(fd):
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(OSError, match="Invalid argument"):
        save(tmp_path / "a")
    assert names(tmp_path) == []


def test_a_failed_write_names_the_file_and_leaves_the_previous_one(tmp_path):
    """A file-size limit stands for a full disk: it takes no superuser to set."""
    save(tmp_path / "a", 1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(OSError, match=r"\.b\.staging/rank-00000\.h5"):
            ckpt.save(tmp_path / "b", {"x": np.zeros(1 << 20)}, comm=None)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert names(tmp_path) == ["a", LATEST_NAME]
    assert value_of(ckpt.latest(tmp_path)) == 1


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=str(tmp_path / "file")):
        save(tmp_path / "file" / "a")


@pytest.mark.parametrize("overwrite", [False, True])
def test_two_processes_begin_one_checkpoint_in_one_moment(tmp_path, monkeypatch, overwrite):
    stage = tmp_path / ".a.staging"
    other = owner(os.getppid(), start=start_time(os.getppid()))

    def meanwhile(token):
        stage.mkdir()
        (stage / ".owner").write_text(other)
        return plain(token)

    plain = atomic.signature
    monkeypatch.setattr(atomic, "signature", meanwhile)
    with pytest.raises(
        FileExistsError, match=f"process {os.getppid()} is writing this checkpoint; ranks that save one"
    ):
        ckpt.save(tmp_path / "a", {"x": np.ones(3)}, overwrite=overwrite)
    assert names(tmp_path) == [".a.staging"] and (stage / ".owner").read_text() == other


def test_stages_of_the_dead_are_removed_those_of_the_living_are_not(tmp_path):
    living = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        start = start_time(living.pid)
        assert start is not None
        stages = {
            ".dead.staging": owner(2**30, start="1"),
            ".reused.staging": owner(living.pid, start="1"),
            ".living.staging": owner(living.pid, start=start),
            ".elsewhere.staging": owner(1, host="another-host", start="1"),
            ".forgotten.staging": owner(1, host="another-host", start="1"),
            ".a.removed": owner(1),
        }
        for name, text in stages.items():
            (tmp_path / name).mkdir()
            (tmp_path / name / ".owner").write_text(text)
        for path in [tmp_path / ".forgotten.staging" / ".owner", tmp_path / ".forgotten.staging"]:
            os.utime(path, (0, 0))
        save(tmp_path / "b")
        assert names(tmp_path) == [".elsewhere.staging", ".living.staging", "b", LATEST_NAME]
        # its own name: another host's stage is taken over, since a requeued job may run anywhere; a living process's is not
        save(tmp_path / "elsewhere")
        with pytest.raises(FileExistsError, match=f"process {living.pid} is writing"):
            save(tmp_path / "living")
    finally:
        living.communicate(b"\n")


def test_what_nobody_signed_may_be_a_living_job_s_for_a_minute(tmp_path, monkeypatch):
    """One that has made its stage and not signed it yet, one that is between two renames."""
    path = save(tmp_path / "a", 1)
    path.rename(tmp_path / ".a.replaced")
    for name in (".c.staging", ".d.board"):
        (tmp_path / name).mkdir()
    save(tmp_path / "b", 2)
    assert names(tmp_path) == [".a.replaced", ".c.staging", ".d.board", "b", LATEST_NAME]
    monkeypatch.setattr(leftovers, "QUIET_S", 0.0)  # a minute later
    save(tmp_path / "e", 3)
    assert names(tmp_path) == ["a", "b", "e", LATEST_NAME] and value_of(path) == 1


@pytest.mark.parametrize("exchanges", [True, False])
@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("kind", ["staging", "removed", "board", "replaced"])
@pytest.mark.parametrize("name", ["step-1", "step-2", "site"])
def test_a_hidden_folder_with_somebody_s_file_is_not_ours_to_remove(
    tmp_path, monkeypatch, name, kind, signed, exchanges
):
    """Be it called like one of the checkpoint that is saved ("step-2"), of the one that is removed for it ("step-1"), or of none."""
    monkeypatch.setattr(leftovers, "QUIET_S", 0.0)
    if not exchanges:
        monkeypatch.setattr(atomic, "_exchange", lambda a, b: False)
    save(tmp_path / "step-1")
    save(tmp_path / "step-2")
    theirs = tmp_path / f".{name}.{kind}"
    theirs.mkdir()
    (theirs / "notes.txt").write_text("mine")
    if signed:
        (theirs / ".owner").write_bytes(signature(""))
    (left,) = leftovers.leftovers(tmp_path)
    assert (left.action, left.why) == ("keep", "holds 'notes.txt', which no save made")
    stands_in_the_way = name == "step-2" and kind in ("staging", "replaced")
    said = f"[Errno 17] it holds 'notes.txt', which no save made; move it away: '{theirs}'"
    with warnings.catch_warnings(record=True) as warned, ExitStack() as raised:
        warnings.simplefilter("always")
        if stands_in_the_way:
            raised.enter_context(pytest.raises(FileExistsError, match=re.escape(said)))
        save(tmp_path / "step-2", 2, overwrite=True, keep=1, background=True)
        ckpt.wait()
    assert value_of(tmp_path / "step-2") == (1 if stands_in_the_way else 2)
    kept = [f"the old checkpoint {tmp_path / 'step-1'} could not be removed: {said}"]
    assert [str(w.message) for w in warned] == (kept if name == "step-1" and kind == "removed" else [])
    assert (theirs / "notes.txt").read_text() == "mine"


def test_what_is_left_of_its_own_name_stands_in_no_save_s_way(tmp_path, monkeypatch):
    monkeypatch.setattr(atomic, "_exchange", lambda a, b: False)
    path = save(tmp_path / "a", 1)
    for value in (2, 3):
        path.rename(tmp_path / ".a.replaced")
        save(path, value, overwrite=True)
        save(path, value, overwrite=True)
        assert names(tmp_path) == ["a", LATEST_NAME] and value_of(path) == value


def test_a_stage_that_was_taken_over_is_not_published(tmp_path):
    stage = atomic.Stage(LocalPath(tmp_path / "a")).open(overwrite=False)
    (stage.path / ".owner").write_text(owner(1, host="another-host", start="1"))
    with pytest.raises(FileExistsError, match="took this checkpoint over"):
        stage.publish(overwrite=False)
    stage.discard()
    assert names(tmp_path) == [".a.staging"], "it is the other job's now"


CRASH = """
import os, sys
import numpy as np
import ckpt
from ckpt.commit import atomic
from ckpt.commit import leftovers

folder, scenario = sys.argv[1:]
leftovers.QUIET_S = 0.0  # each next job comes a minute later
if scenario == "renames":
    atomic._exchange = lambda a, b: False

def save(name, value, **options):
    ckpt.save(f"{folder}/{name}", {"x": np.full(5, float(value)), "s": np.array(value)}, comm=None, **options)

def load(path):
    x, s = np.empty(5), np.array(0)
    ckpt.load(path, {"x": x, "s": s})
    assert (x == s).all(), (x, s)
    return int(s)

def crash_at(k, action):
    # the child dies without a word just before its k-th call that changes the disk
    if (child := os.fork()) == 0:
        calls, plain_open = 0, os.open
        def counted(function):
            def call(*args, **kwargs):
                nonlocal calls
                calls += not (function is plain_open and args[1] & os.O_ACCMODE == os.O_RDONLY)
                if calls == k:
                    os._exit(9)
                return function(*args, **kwargs)
            return call
        for name in ("mkdir", "open", "pwrite", "write", "fsync", "rename", "unlink", "rmdir"):
            setattr(os, name, counted(getattr(os, name)))
        atomic._exchange = counted(atomic._exchange)
        action()
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9

save("step-0", 1)
value, k, crashes = 1, 0, 0
crashed = True
while crashed:
    k += 1
    name = "step-0" if scenario != "new" else f"step-{k}"
    crashed = crash_at(k, lambda: save(name, value + 1, keep=2, overwrite=scenario != "new"))
    crashes += crashed
    newest = ckpt.latest(folder)
    assert newest is not None, (k, os.listdir(folder))
    found = load(newest)
    assert found in (value, value + 1), (k, found, value)
    assert found == value + 1 or crashed
    assert all(c.complete for c in ckpt.list_checkpoints(folder))
    # the next job goes on from there, and clears up
    value = found + 1
    save(f"next-{k}", value, keep=2)
    left = [name for name in os.listdir(folder) if name.startswith(".")]
    assert not left, (k, left)
    assert load(ckpt.latest(folder)) == value
print(crashes)
"""


@pytest.mark.parametrize("scenario", ["new", "exchange", "renames"])
def test_a_crash_at_any_step_loses_no_checkpoint(tmp_path, scenario):
    root = Path(ckpt.__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-c", CRASH, str(tmp_path), scenario],
        capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(root)}, timeout=100,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 20


class LostFolderError(RuntimeError):
    pass


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("exists", [False, True])
def test_a_save_that_has_lost_its_folder_commits_nothing(tmp_path, exists, background):
    save(tmp_path / "step-1", 1)
    if exists:
        save(tmp_path / "step-2", 2)
    before = {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}

    def refuse():
        assert (tmp_path / ".step-2.staging").is_dir(), "all is written, nothing has its name"
        raise LostFolderError("another job has the folder")

    def attempt():
        save(tmp_path / "step-2", 3, overwrite=exists, background=background, before_commit=refuse)
        ckpt.wait()

    with pytest.raises(RuntimeError, match="another job has the folder"):
        attempt()
    assert {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()} == before
    assert names(tmp_path) == [LATEST_NAME, "step-1", *(["step-2"] if exists else [])]
    save(tmp_path / "step-2", 4, overwrite=exists, before_commit=lambda: None)
    assert value_of(tmp_path / "step-2") == 4


def test_a_folder_that_is_lost_after_the_rename_keeps_its_hint(tmp_path):
    """The checkpoint exists then, but `latest` is the other job's."""
    save(tmp_path / "step-1", 1)
    calls = []

    def refuse_the_second():
        calls.append(names(tmp_path))
        if len(calls) == 2:
            raise LostFolderError("lost")

    with pytest.raises(LostFolderError, match="lost"):
        save(tmp_path / "step-2", 2, before_commit=refuse_the_second)
    assert calls == [[".step-2.staging", LATEST_NAME, "step-1"], [LATEST_NAME, "step-1", "step-2"]]
    assert (tmp_path / LATEST_NAME).read_text() == "step-1\n"
    assert value_of(tmp_path / "step-2") == 2


def test_a_folder_that_is_lost_before_the_removal_of_old_checkpoints_keeps_them(tmp_path):
    """Nor does a copy of the checkpoint get its name."""
    save(tmp_path / "home/step-1", 1)
    num_left = 2  # the name of the checkpoint, and `latest`

    def refuse_the_third():
        nonlocal num_left
        if num_left == 0:
            raise LostFolderError("lost")
        num_left -= 1

    with pytest.raises(LostFolderError, match="lost"):
        save(tmp_path / "home/step-2", 2, before_commit=refuse_the_third, keep=1)
    assert names(tmp_path / "home") == [LATEST_NAME, "step-1", "step-2"]
    num_left = 2
    with pytest.warns(RuntimeWarning, match="step-3 was not made: lost"):
        save(tmp_path / "home/step-3", 3, before_commit=refuse_the_third, copies=[str(tmp_path / "copy")])
    assert not (tmp_path / "copy/step-3").exists()

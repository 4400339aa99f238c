"""How a checkpoint comes to be all at once, or not at all. Only rank 0 does what is here.

    .NAME.staging    being written; a dead job's is removed at a later save
    NAME             complete: it got its name by one rename, after everything in it was flushed to disk
    .NAME.replaced   the old one, while a new one takes its name
    .NAME.removed    on its way out: hidden first, so that nobody finds half of it
    .NAME.board      what the ranks tell each other while it is saved in the background (board.py)

After Orbax's `path/atomicity.py`: the rename is the commit.
"""

import contextlib
import ctypes
import errno
import os
import re
import shutil
import socket
import time
import uuid
import warnings
from pathlib import Path
from typing import NamedTuple

from ckpt.files import flush, write_file
from ckpt.folder import LATEST_NAME, OWNER_NAME, check_outside, info, newest_first, reason_to_keep, step_of, strangers
from ckpt.manifest import FILE_NAME
from ckpt.owner import is_alive, owner_in, signature
from ckpt.places import Place
from ckpt.remote import Url

QUIET_S = 60.0  # what bears no owner's name and changed since then may be a living job's, between two of its steps
_ABANDONED_S = 3600.0
"""Without a change, after which a stage of another host, whose process cannot be asked, counts as dead."""
_MESSAGES = r"\.board|[0-9]+(\.[0-9]+)?(\.part)?|(left|reserve)\.[0-9]+"
"""What lies on a board (board.py), and the name of one in the making."""


class Stage:
    """The folder in which one checkpoint is being made: `open`, fill, then `publish` or `discard`."""

    def __init__(self, final: Path) -> None:
        self.final = final
        self.path = final.parent / f".{final.name}.staging"
        self._board = final.parent / f".{final.name}.board"
        self._token = uuid.uuid4().hex

    @classmethod
    def open(cls, final: Path, *, overwrite: bool) -> "Stage":
        """Make the stage of checkpoint `final`, after removing what dead jobs left in its folder.

        ValueError if `final` would lie in another checkpoint. FileExistsError if it exists (and `overwrite` is not given, or it is more
        than a checkpoint), or if a live process of this host is writing it.
        """
        stage = cls(final)
        check_outside(final.parent)
        stage._refuse_existing(overwrite)
        final.parent.mkdir(parents=True, exist_ok=True)
        stage._clean()
        if os.path.lexists(stage.path):
            if (owner := owner_in(stage.path)) and owner["pid"] != os.getpid() and is_alive(owner):
                raise FileExistsError(
                    errno.EEXIST, f"process {owner['pid']} is writing this checkpoint", str(stage.path)
                )
            _clear(stage.path)
        if overwrite:  # where folders cannot be exchanged, the old one is put there
            _refuse_strangers(final.parent / f".{final.name}.replaced")
        stage.path.mkdir()
        try:
            write_file(stage.path / OWNER_NAME, signature(stage._token), durable=False)
        except BaseException:
            stage.discard()
            raise
        return stage

    def make_board(self) -> Path:
        """A folder for what the ranks have to say to each other."""
        _clear(self._board)
        # Made in the stage, which is signed: whatever happens, nobody meets it without an owner's name.
        unsigned = self.path / ".board"
        unsigned.mkdir()
        write_file(unsigned / OWNER_NAME, signature(self._token), durable=False)
        os.rename(unsigned, self._board)
        return self._board

    def publish(self, *, overwrite: bool, newest: bool = True) -> None:
        """Give the finished stage its final name: this is the moment from which the checkpoint exists.

        `newest`: of its folder, so that `latest` names it.
        """
        owner = owner_in(self.path)
        if owner is None or owner["token"] != self._token:
            raise FileExistsError(errno.EEXIST, "another job took this checkpoint over", str(self.path))
        self._refuse_existing(overwrite)
        flush(self.path)
        parent = self.final.parent
        if self.final.exists():
            replaced = self.path
            if not _exchange(self.path, self.final):
                replaced = parent / f".{self.final.name}.replaced"
                os.rename(self.final, replaced)
                os.rename(self.path, self.final)
            flush(parent)
            take_away(replaced)  # the new one stands; a later save tries again
        else:
            os.rename(self.path, self.final)
            flush(parent)
        # Not before the rename: a stage without an owner counts as a dead one's.
        with contextlib.suppress(OSError):
            os.unlink(self.final / OWNER_NAME)
        if newest:
            write_latest(self.final)

    def discard(self, *, board: bool = False) -> None:
        """Remove the stage, if it still is one, and its `board`. Never raises: there is an error on its way already."""
        shutil.rmtree(self.path, ignore_errors=True)
        if board:
            take_away(self._board)

    def _clean(self) -> None:
        """Finish what dead jobs began beside it."""
        for leftover in leftovers(self.final.parent, own=self.final):
            if leftover.path != self.path:
                settle(leftover)

    def _refuse_existing(self, overwrite: bool) -> None:
        if os.path.lexists(self.final):
            refuse_existing(self.final, overwrite=overwrite)


def refuse_existing(final: Place, *, overwrite: bool) -> None:
    """FileExistsError unless what lies at `final` is to be replaced, and may be."""
    if reason := reason_to_keep(final):
        problem = f"what lies there {reason}; a checkpoint replaces none but a checkpoint, with nothing else in it"
        raise FileExistsError(errno.EEXIST, problem, str(final))
    if not overwrite:
        raise FileExistsError(errno.EEXIST, "this checkpoint exists; pass overwrite=True to replace it", str(final))


def next_sequence(folder: Place) -> int:
    """One more than the newest checkpoint's number in `folder`."""
    return max((header.sequence for _, header in newest_first(folder)), default=0) + 1


def retain(final: Place, keep: int | None, keep_every: int | None = None) -> None:
    """Remove the oldest checkpoints beside `final` beyond the newest `keep` complete ones, but not `final` itself.

    Nor one whose name ends with a multiple of `keep_every`.
    """
    for path in [] if keep is None else outdated(final, keep, keep_every):
        try:
            remove(path)
        except OSError as error:
            # The new checkpoint stands: no reason to end a run.
            warnings.warn(f"the old checkpoint {path} could not be removed: {error}", RuntimeWarning, stacklevel=2)


def outdated(final: Place, keep: int, keep_every: int | None = None) -> list[Place]:
    """What `retain` removes, newest first."""
    complete = 0
    found = []
    for path, _ in newest_first(final.parent):
        step = step_of(path.name)
        if keep_every is not None and step is not None and step % keep_every == 0 and path != final:
            continue
        if complete >= keep and path != final:
            found.append(path)
        elif info(path, path.name).complete:
            complete += 1
    return found


def remove(path: Place) -> None:
    """Remove a checkpoint: under its name it is gone at once. OSError if not even that can be done, or may not be."""
    if reason := reason_to_keep(path):
        raise PermissionError(errno.EPERM, f"it {reason}", str(path))
    if isinstance(path, Url):
        (path / OWNER_NAME).write(signature(""))  # should this job die on the way, the next one goes on
        path.remove_folder(FILE_NAME, OWNER_NAME)
        return
    _take_away(path)


def take_away(path: Path) -> None:
    """Remove a folder of a save, which nobody finds half of. Never raises: what stays is for a later save to clear."""
    with contextlib.suppress(OSError):
        _refuse_strangers(path)
        _take_away(path)


def _take_away(path: Path) -> None:
    hidden = path.parent / f".{path.name.strip('.')}.removed"
    _clear(hidden)
    os.rename(path, hidden)
    with contextlib.suppress(OSError):
        _delete(hidden)


def _clear(path: Path) -> None:
    """Remove a hidden folder of a save; nothing happens if there is none. FileExistsError if it holds what no save made."""
    _refuse_strangers(path)
    _delete(path)


def _refuse_strangers(path: Path) -> None:
    if os.path.lexists(path) and (strange := _strangers(path)):
        raise FileExistsError(errno.EEXIST, f"it holds {strange[0]!r:.80}, which no save made; move it away", str(path))


def _delete(path: Path) -> None:
    """Remove a folder or, as such, a link to one; nothing happens if there is none. OSError that names it, if it does not all go."""
    try:
        if path.is_symlink() or not path.is_dir():
            path.unlink(missing_ok=True)
        else:
            shutil.rmtree(path)
    except OSError as error:
        if os.path.lexists(path):  # unless somebody else cleared up as well
            problem = f"it cannot be removed: {error.strerror}, {os.path.basename(str(error.filename))}"
            raise OSError(error.errno, problem, str(path)) from error


class Leftover(NamedTuple):
    """A hidden folder of a save. `action`: "remove" or "restore" (to `original`) what a dead job left, "keep" a living one's.

    "keep" is also for what somebody put something into.
    """

    path: Path
    action: str
    why: str

    @property
    def original(self) -> Path:
        """The checkpoint it belongs to."""
        return self.path.with_name(self.path.name[1:].rpartition(".")[0])


def leftovers(folder: Path, *, own: Path | None = None) -> list[Leftover]:
    """What saves that go on, or ended too early, have in `folder`, by name.

    What bears no owner's name counts as a dead job's, unless it changed in the last minute and does
    not belong to the checkpoint `own`, which is this job's to write, or holds what no save made.
    """
    kinds = (".staging", ".replaced", ".removed", ".board")
    # A checkpoint may have been a link to one.
    names = sorted(entry.name for entry in os.scandir(folder) if entry.is_dir() or entry.is_symlink())
    ours = (name for name in names if name.startswith(".") and Path(name).suffix in kinds)
    return [_judged(folder / name, own) for name in ours]


def settle(leftover: Leftover) -> None:
    """Do what is to be done with it. What cannot be removed stays; OSError if it cannot be restored."""
    if leftover.action == "restore":
        os.rename(leftover.path, leftover.original)
    elif leftover.action == "remove":
        with contextlib.suppress(OSError):
            _delete(leftover.path)


def _judged(path: Path, own: Path | None) -> Leftover:
    if strange := _strangers(path):
        return Leftover(path, "keep", f"holds {strange[0]!r:.80}, which no save made")
    kind = path.suffix
    stage = path.with_suffix(".staging")
    if kind == ".removed":
        return Leftover(path, "remove", "half removed")
    if kind in (".staging", ".board") and (owner := owner_in(path)) is not None:
        whose = f"of process {owner['pid']!r:.20} on {owner['host']!r:.80}"
        if _is_abandoned(path, owner):
            return Leftover(path, "remove", f"a save {whose}, which is gone")
        return Leftover(path, "keep", f"a save {whose}, which may go on")
    if kind == ".board" and stage.exists():
        return _judged(stage, own)._replace(path=path)
    # Not the time of writing alone: a rename is what may have happened last.
    with contextlib.suppress(FileNotFoundError):
        changed = max(path.lstat().st_mtime, path.lstat().st_ctime)
        recent = Leftover(path, "keep", f"changed in the last {QUIET_S:.0f} s: a save may go on")
        if time.time() - changed < QUIET_S and recent.original != own:
            return recent
    if kind == ".board":  # left by a job that died, or its ranks have heard all
        return Leftover(path, "remove", "its save ended")
    if kind == ".replaced":
        restore = Leftover(path, "restore", "its replacement never came")
        return restore._replace(action="remove", why="it was replaced") if restore.original.exists() else restore
    return Leftover(path, "remove", "a save that died before it could sign")


def _strangers(path: Path) -> list[str]:
    """What is in a hidden folder and was not put there by a save. Nothing is in a link."""
    try:
        names = [] if path.is_symlink() else sorted(os.listdir(path))
    except OSError:  # a job that clears up as well
        return []
    return [name for name in strangers(names) if not re.fullmatch(_MESSAGES, name)]


def _is_abandoned(stage: Path, owner: dict) -> bool:
    if owner["host"] == socket.gethostname():
        return owner["pid"] == os.getpid() or not is_alive(owner)
    try:
        changed = max(entry.stat().st_mtime for entry in [*os.scandir(stage), stage])
    except OSError:
        return False
    return time.time() - changed > _ABANDONED_S


def _exchange(a: Path, b: Path) -> bool:
    """Exchange two folders in one step, so that neither name is ever missing. False where kernel or file system cannot (NFS)."""
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    at_fdcwd, rename_exchange = -100, 2
    return (
        renameat2 is not None
        and renameat2(at_fdcwd, os.fsencode(a), at_fdcwd, os.fsencode(b), ctypes.c_uint(rename_exchange)) == 0
    )


def write_latest(final: Path) -> None:
    """Let the hint beside the checkpoint name it."""
    temporary = final / f".{LATEST_NAME}"  # where no other job is at work
    temporary.unlink(missing_ok=True)
    write_file(temporary, f"{final.name}\n".encode())
    os.rename(temporary, final.parent / LATEST_NAME)
    flush(final.parent)

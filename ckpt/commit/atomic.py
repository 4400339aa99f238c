"""Atomic commits: a checkpoint exists completely or not at all. Only rank 0 calls this module.

    .NAME.staging       being written; a dead job's is removed at a later save
    NAME                complete: it got its name by one rename, after everything in it was flushed to disk
    .NAME.replaced      the old one, while a new one takes its name
    .NAME.removed       on its way out (removal.py): hidden first, so that no reader finds half of it
    .NAME.TOKEN.board   what the ranks tell each other while it is saved in the background (board.py)

A checkpoint has one stage at a time: a second thread or process that would write it is refused. What dead jobs leave is found and
judged in leftovers.py. After Orbax's `path/atomicity.py`: the rename is the commit.
"""

import contextlib
import ctypes
import errno
import os
import shutil
import threading
from collections.abc import Iterable
from itertools import takewhile
from pathlib import Path

from ckpt.commit.leftovers import leftovers, settle
from ckpt.commit.owner import forget_token, is_alive, new_token, owner_in, refusal, signature
from ckpt.commit.removal import clear, hide_and_delete, refuse_strangers, take_away
from ckpt.format.manifest import FILE_NAME
from ckpt.storage.catalog import LATEST_NAME, OWNER_NAME, check_outside, latest, newest_sequence, reason_to_keep
from ckpt.storage.local import flush, write_file
from ckpt.storage.local_path import LocalPath
from ckpt.storage.places import Place, write_and_read_back

_making = threading.Lock()  # what one thread has made and not signed yet, no other takes for a dead job's
_open: dict[LocalPath, int] = {}  # the stages of this process; a forked child has them with its parent's number

_around: dict[Path, list[LocalPath]] = {}  # by board: the folders around it that its save has made, inner ones first


class Stage:
    """The folder in which one checkpoint is being made: `open`, fill, then `publish` or `discard`."""

    def __init__(self, final: LocalPath) -> None:
        self.final = final
        self.path = final.parent / f".{final.name}.staging"
        self._token = ""  # none: not begun, or ended
        self._board: LocalPath | None = None
        self._made: list[LocalPath] = []  # the folders around it that were not there before

    def open(self, *, overwrite: bool) -> "Stage":
        """Make the stage of checkpoint `final`, after removing what dead jobs left in its folder; returns it.

        ValueError if `final` would lie in another checkpoint. FileExistsError if it exists (and `overwrite` is not given, or it is more
        than a checkpoint), or if a live process of this host, or another thread of this one, is writing it.
        """
        check_outside(self.final.parent)
        self._refuse_existing(overwrite)
        with _making:
            if self.final.parent.is_dir():
                for leftover in leftovers(self.final.parent, own=self.final):
                    if leftover.path != self.path:
                        settle(leftover)
            if _open.get(self.path) == os.getpid():
                # Perhaps it has its name already, and the old one is on its way out.
                raise FileExistsError(errno.EEXIST, refusal(os.getpid()), str(self.path))
            # Asked first: what comes afterwards is a living process's, and signed.
            is_left = os.path.lexists(self.path)
            if (owner := owner_in(self.path)) and is_alive(owner):
                raise FileExistsError(errno.EEXIST, refusal(owner.pid), str(self.path))
            if is_left and owner_in(self.path) == owner:
                clear(self.path)
            if overwrite:  # where folders cannot be exchanged, the old one is put there
                refuse_strangers(self.final.parent / f".{self.final.name}.replaced")
            self._token = new_token()
            _open[self.path] = os.getpid()
            try:
                self._make()
            except BaseException:
                self._remove()
                raise
        return self

    def make_board(self) -> LocalPath:
        """A folder for what the ranks have to say to each other, which outlives the stage: `end_board`."""
        token = new_token()
        self._board = self.final.parent / f".{self.final.name}.{token[:8]}.board"
        # Made in the stage, which is signed: so no process meets it without an owner's name.
        unsigned = self.path / ".board"
        unsigned.mkdir()
        write_file(unsigned / OWNER_NAME, signature(token), durable=False)
        os.rename(unsigned, self._board)
        _around[self._board] = self._made
        return self._board

    def publish(self, manifest: bytes | None = None, *, overwrite: bool, newest: bool = True) -> None:
        """Give the finished stage its final name: this is the moment from which the checkpoint exists.

        `manifest`: to be written first; None if the stage holds it already.
        `newest`: of its folder, so that `latest` names it.
        """
        if not self._is_ours():
            raise FileExistsError(errno.EEXIST, "another job took this checkpoint over", str(self.path))
        self._refuse_existing(overwrite)
        if manifest is not None:
            write_and_read_back(self.path / FILE_NAME, manifest)
        flush(self.path)
        parent = self.final.parent
        if self.final.exists():
            replaced = self.path
            if not _exchange(self.path, self.final):
                replaced = parent / f".{self.final.name}.replaced"
                with contextlib.suppress(FileNotFoundError):  # another save may remove it as an old one
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
        self._end()
        if newest:
            write_latest(self.final)

    def discard(self, *, board: bool = False) -> None:
        """Remove the stage, if it still is one, its `board`, and the folders around it that it made, if nothing else is in them.

        Never raises: there is an error on its way already.
        """
        if board and self._board is not None:
            end_board(self._board)
        if self._token:
            with _making:
                self._remove()

    def withdraw(self) -> None:
        """Remove the checkpoint `final`: it is hidden first, so that no reader finds half of it."""
        hide_and_delete(self.final)

    def newest_sequence(self) -> int:
        """The number of the newest checkpoint beside `final`, 0 if there is none."""
        return newest_sequence(self.final.parent)

    def _make(self) -> None:
        parent = self.final.parent
        self._made = list(takewhile(lambda folder: not folder.is_dir(), (parent, *parent.parents)))
        parent.mkdir(parents=True, exist_ok=True)
        # The stage gets its name when it is signed: of several processes that begin this checkpoint one is the first, and the others
        # know which one.
        unsigned = parent / f".{self.final.name}.{self._token[:8]}.staging"
        try:
            unsigned.mkdir()
            write_file(unsigned / OWNER_NAME, signature(self._token), durable=False)
            os.rename(unsigned, self.path)
        except BaseException as error:
            shutil.rmtree(unsigned, ignore_errors=True)
            is_taken = isinstance(error, OSError) and error.errno in (errno.EEXIST, errno.ENOTEMPTY)
            if is_taken and (owner := owner_in(self.path)):
                raise FileExistsError(errno.EEXIST, refusal(owner.pid), str(self.path)) from None
            raise

    def _remove(self) -> None:
        if owner_in(self.path) is None or self._is_ours():  # unsigned, if the disk was full
            shutil.rmtree(self.path, ignore_errors=True)
        _remove_empty(self._made)
        self._end()

    def _end(self) -> None:
        _open.pop(self.path, None)
        forget_token(self._token)
        self._token = ""

    def _is_ours(self) -> bool:
        owner = owner_in(self.path)
        return owner is not None and owner.token == self._token

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


def end_board(board: Path) -> None:
    """Remove a board (`Stage.make_board`): all ranks have heard what there was to hear. Never raises."""
    owner = owner_in(board)
    take_away(board)
    if owner is not None:
        forget_token(owner.token)
    _remove_empty(_around.pop(board, []))  # of a save that failed: the board alone was left in them


def _remove_empty(folders: Iterable[Path]) -> None:
    for folder in folders:
        with contextlib.suppress(OSError):
            folder.rmdir()


def _exchange(a: Path, b: Path) -> bool:
    """Exchange two folders in one step, so that neither name is ever missing. False where kernel or file system cannot (NFS)."""
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    at_fdcwd, rename_exchange = -100, 2
    return (
        renameat2 is not None
        and renameat2(at_fdcwd, os.fsencode(a), at_fdcwd, os.fsencode(b), ctypes.c_uint(rename_exchange)) == 0
    )


def write_latest(final: Path) -> None:
    """Let the hint beside the checkpoint name it, unless another save has removed it by now."""
    temporary = final / f".{LATEST_NAME}"
    with contextlib.suppress(FileNotFoundError, FileExistsError):  # another process that writes it writes the same
        temporary.unlink(missing_ok=True)
        write_file(temporary, f"{final.name}\n".encode())
        os.rename(temporary, final.parent / LATEST_NAME)
    flush(final.parent)


def mend_latest(folder: Path) -> None:
    """Let the hint in `folder` name the newest checkpoint, if it names one that is gone."""
    hint = folder / LATEST_NAME
    with contextlib.suppress(FileNotFoundError):
        if not (folder / hint.read_text(errors="replace").strip()).is_dir() and (newest := latest(folder)) is not None:
            write_latest(newest)

"""Atomic commits: a checkpoint exists completely or not at all. Only rank 0 calls this module.

    .NAME.staging       the stage: a checkpoint that is being written; a later save removes the stage of a dead job
    NAME                a complete checkpoint: it got its name by one rename, after all its files were flushed to disk
    .NAME.replaced      the old checkpoint, while a new one takes its name
    .NAME.removed       a checkpoint that is being removed (removal.py): hidden first, so that no reader finds half of it
    .NAME.TOKEN.board   the messages of the ranks during a background save (board.py)

A checkpoint has one stage at a time: a second thread or process that begins to write it gets an error. leftovers.py finds the folders
of dead jobs. The rename is the commit, as in Orbax's `path/atomicity.py`.
"""

import contextlib
import ctypes
import errno
import os
import shutil
import threading
from collections.abc import Callable, Iterable
from itertools import takewhile
from pathlib import Path

from ckpt.commit.leftovers import leftovers, settle
from ckpt.commit.owner import forget_token, is_alive, new_token, owner_in, refusal, signature
from ckpt.commit.removal import clear, hide_and_delete, refuse_strangers, take_away
from ckpt.format.manifest import FILE_NAME
from ckpt.storage.catalog import LATEST_NAME, OWNER_NAME, check_outside, latest, newest_sequence, reason_to_keep
from ckpt.storage.local import flush, write_file
from ckpt.storage.local_path import LocalPath, read_given
from ckpt.storage.places import Place, write_and_read_back

_MAX_HINT_BYTES = 1 << 16
_making = threading.Lock()  # no thread may take another thread's unsigned stage for a dead job's
_open: dict[LocalPath, int] = {}  # the stages of this process; in a forked child with the parent's pid

_around: dict[Path, list[LocalPath]] = {}  # by board: the folders around it that its save made, inner ones first


class Stage:
    """The folder in which one checkpoint is made: `open`, fill, then `publish` or `discard`."""

    def __init__(self, final: LocalPath, *, private: bool = False) -> None:
        """`private`: the folder is for this user alone, whatever the umask."""
        self.final = final
        self._mode = 0o700 if private else 0o777
        self.path = final.parent / f".{final.name}.staging"
        self._token = ""  # empty: not begun, or ended
        self._board: LocalPath | None = None
        self._made: list[LocalPath] = []  # the folders around it that did not exist before

    def open(self, *, overwrite: bool) -> "Stage":
        """Make the stage of checkpoint `final`, after the removal of dead jobs' folders beside it; returns the stage.

        ValueError if `final` would lie in another checkpoint. FileExistsError if it exists and may not be replaced (no `overwrite`, or
        foreign files in it), or if a live process of this host, or another thread of this process, is writing it.
        """
        check_outside(self.final.parent)
        self._refuse_existing(overwrite)
        with _making:
            if self.final.parent.is_dir():
                for leftover in leftovers(self.final.parent, own=self.final):
                    if leftover.path != self.path:
                        settle(leftover)
            if _open.get(self.path) == os.getpid():
                # The path may be missing, if the new checkpoint has its name already, and the old one is being removed.
                raise FileExistsError(errno.EEXIST, refusal(os.getpid()), str(self.path))
            # Checked first: a stage that appears later is signed by a live process.
            is_left = os.path.lexists(self.path)
            if (owner := owner_in(self.path)) and is_alive(owner):
                raise FileExistsError(errno.EEXIST, refusal(owner.pid), str(self.path))
            if is_left and owner_in(self.path) == owner:
                clear(self.path)
            if overwrite:  # the old checkpoint moves there if folders cannot be exchanged
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
        """Make a folder for the messages of the ranks. It outlives the stage: see `end_board`."""
        token = new_token()
        self._board = self.final.parent / f".{self.final.name}.{token[:8]}.board"
        # Made in the signed stage, so that no process finds a board without an owner.
        unsigned = self.path / ".board"
        unsigned.mkdir(self._mode)
        write_file(unsigned / OWNER_NAME, signature(token), durable=False)
        os.rename(unsigned, self._board)
        _around[self._board] = self._made
        return self._board

    def publish(
        self,
        manifest: bytes | None = None,
        *,
        overwrite: bool,
        newest: bool = True,
        before: Callable[[], None] | None = None,
    ) -> None:
        """Give the finished stage its final name: from this moment on the checkpoint exists.

        `manifest`: written first; None if the stage already has it. `newest`: whether `latest` shall name the checkpoint. `before`: is
        called before the rename, and before `latest` is written; if it raises an error, the checkpoint or `latest` stays as it was.
        """
        if not self._is_ours():
            raise FileExistsError(errno.EEXIST, "another job took this checkpoint over", str(self.path))
        self._refuse_existing(overwrite)
        if manifest is not None:
            write_and_read_back(self.path / FILE_NAME, manifest)
        flush(self.path)
        parent = self.final.parent
        if before is not None:
            before()
        if self.final.exists():
            replaced = self.path
            if not _exchange(self.path, self.final):
                replaced = parent / f".{self.final.name}.replaced"
                with contextlib.suppress(FileNotFoundError):  # another save may remove it as an old one
                    os.rename(self.final, replaced)
                os.rename(self.path, self.final)
            flush(parent)
            take_away(replaced)  # if this fails, a later save tries again
        else:
            os.rename(self.path, self.final)
            flush(parent)
        # Not before the rename: a stage without an owner counts as a dead job's.
        with contextlib.suppress(OSError):
            os.unlink(self.final / OWNER_NAME)
        self._end()
        if newest:
            if before is not None:
                before()
            write_latest(self.final)

    def discard(self, *, board: bool = False) -> None:
        """Remove the stage, unless it is published, its `board`, and the folders that it made around it, if they are empty.

        Never raises, because it runs after another error.
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
        # The stage gets its name after the signature: if several processes begin this checkpoint, only one rename succeeds, and the
        # others can read its owner.
        unsigned = parent / f".{self.final.name}.{self._token[:8]}.staging"
        try:
            unsigned.mkdir(self._mode)
            write_file(unsigned / OWNER_NAME, signature(self._token), durable=False)
            os.rename(unsigned, self.path)
        except BaseException as error:
            shutil.rmtree(unsigned, ignore_errors=True)
            is_taken = isinstance(error, OSError) and error.errno in (errno.EEXIST, errno.ENOTEMPTY)
            if is_taken and (owner := owner_in(self.path)):
                raise FileExistsError(errno.EEXIST, refusal(owner.pid), str(self.path)) from None
            raise

    def _remove(self) -> None:
        if owner_in(self.path) is None or self._is_ours():  # on a full disk it is unsigned
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
    """FileExistsError if `final` exists, unless `overwrite` is given and it may be replaced."""
    if reason := reason_to_keep(final):
        problem = f"this path {reason}; a save replaces only a checkpoint without foreign files"
        raise FileExistsError(errno.EEXIST, problem, str(final))
    if not overwrite:
        raise FileExistsError(errno.EEXIST, "this checkpoint exists; pass overwrite=True to replace it", str(final))


def end_board(board: Path) -> None:
    """Remove a board (`Stage.make_board`) after all ranks have read all messages. Never raises."""
    owner = owner_in(board)
    take_away(board)
    if owner is not None:
        forget_token(owner.token)
    _remove_empty(_around.pop(board, []))  # after a failed save only the board was in them


def _remove_empty(folders: Iterable[Path]) -> None:
    for folder in folders:
        with contextlib.suppress(OSError):
            folder.rmdir()


def _exchange(a: Path, b: Path) -> bool:
    """Exchange two folders in one step, so that neither name is ever missing. False if kernel or file system cannot do it (NFS)."""
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    at_fdcwd, rename_exchange = -100, 2
    return (
        renameat2 is not None
        and renameat2(at_fdcwd, os.fsencode(a), at_fdcwd, os.fsencode(b), ctypes.c_uint(rename_exchange)) == 0
    )


def write_latest(final: Path) -> None:
    """Write the checkpoint's name to the hint `latest` beside it, unless another save has removed the checkpoint."""
    temporary = final / f".{LATEST_NAME}"
    with contextlib.suppress(FileNotFoundError, FileExistsError):  # another process writes the same content
        temporary.unlink(missing_ok=True)
        write_file(temporary, f"{final.name}\n".encode())
        os.rename(temporary, final.parent / LATEST_NAME)
    flush(final.parent)


def mend_latest(folder: Path) -> None:
    """If the hint in `folder` names a removed checkpoint, let it name the newest one."""
    try:
        named = read_given(folder / LATEST_NAME, _MAX_HINT_BYTES).decode(errors="replace").strip()
    except FileNotFoundError:
        return
    except ValueError:  # no file of ours
        named = ""
    if not (named and os.path.isdir(folder / named)) and (newest := latest(folder)) is not None:
        write_latest(newest)

"""A checkpoint in a remote place, where files cannot be renamed: the manifest is written last, which is the commit.

    NAME/.owner           the process that writes this checkpoint; removed when it is complete
    NAME/rank-00000.h5    and so on, index.h5: the files, as in a local place
    NAME/manifest.jsonl   the checkpoint exists as soon as this file exists
    latest                the name of the newest checkpoint, only a hint

Only rank 0 calls this module; each rank writes its own files. A replacement first removes the manifest of the old checkpoint. Until
the new manifest is written, this place has neither checkpoint.
"""

import contextlib
import errno
import socket
import time

from ckpt.commit.atomic import refuse_existing
from ckpt.commit.owner import FolderOwner, forget_token, is_alive, new_token, owner_of, refusal, signature
from ckpt.format.manifest import FILE_NAME, MAX_SEQUENCE, CheckpointError
from ckpt.storage.catalog import LATEST_NAME, OWNER_NAME, check_outside, newest_sequence
from ckpt.storage.places import read_header, write_and_read_back
from ckpt.storage.remote import Url

_ABANDONED_S = 86400.0  # an upload of another host that began so long ago counts as a dead job's


class Upload:
    """The counterpart of `Stage` in atomic.py for a remote checkpoint."""

    def __init__(self, final: Url) -> None:
        self.final = self.path = final
        self._token = ""
        self._made: list[Url] = []  # the folders that did not exist before

    def open(self, *, overwrite: bool) -> "Upload":
        """Make the folder of checkpoint `final`, after the removal of dead jobs' uploads beside it; returns this object.

        ValueError if it would lie in another checkpoint. FileExistsError if it exists and may not be replaced (no `overwrite`, or
        foreign files in it), or if a live process of this host is writing it.
        """
        final = self.final
        check_outside(final.parent)
        names = final.names() if final.is_dir() else []
        if names:
            is_unfinished = OWNER_NAME in names and FILE_NAME not in names
            refuse_existing(final, overwrite=overwrite or is_unfinished)
        with contextlib.suppress(FileNotFoundError):
            _clean(final.parent, except_for=final.name)
        owner = _owner(final)
        if owner and is_alive(owner):
            raise FileExistsError(errno.EEXIST, refusal(owner.pid), str(final))
        final.remove_folder(FILE_NAME, OWNER_NAME)
        self._token = new_token()
        try:
            self._made = final.make()
            (final / OWNER_NAME).write(signature(self._token))
        except BaseException:
            self.discard()
            raise
        return self

    def publish(self, manifest: bytes, *, overwrite: bool) -> None:
        """Write the manifest: from this moment on the checkpoint exists."""
        if not self._is_ours():
            raise FileExistsError(errno.EEXIST, "another job took this checkpoint over", str(self.path))
        write_and_read_back(self.path / FILE_NAME, manifest)
        with contextlib.suppress(OSError):
            (self.path / OWNER_NAME).unlink()
        self._end()
        (self.final.parent / LATEST_NAME).write(f"{self.final.name}\n".encode())

    def discard(self) -> None:
        """Remove the uploaded files, and the folders that it made around them, if these are empty.

        Never raises, because it runs after another error.
        """
        if not self._token:
            return
        with contextlib.suppress(OSError):
            if _owner(self.path) is None or self._is_ours():  # unsigned if the signature could not be written
                self.path.remove_folder(FILE_NAME, OWNER_NAME)
            for folder in self._made[1:]:
                folder.remove_empty()
        self._end()

    def withdraw(self) -> None:
        """Remove the checkpoint `final`, its manifest first."""
        (self.final / OWNER_NAME).write(signature(""))  # if this job dies meanwhile, the next one continues
        self.final.remove_folder(FILE_NAME, OWNER_NAME)

    def newest_sequence(self) -> int:
        """The number of the newest checkpoint beside `final`, 0 if there is none. The hint saves a look at each checkpoint."""
        folder = self.final.parent
        with contextlib.suppress(OSError, CheckpointError, UnicodeDecodeError):
            name = (folder / LATEST_NAME).read().decode().strip()
            if (hinted := read_header(folder / name).sequence) <= MAX_SEQUENCE:
                return hinted
        return newest_sequence(folder)

    def _end(self) -> None:
        forget_token(self._token)
        self._token = ""

    def _is_ours(self) -> bool:
        owner = _owner(self.path)
        return owner is not None and owner.token == self._token


def _clean(folder: Url, *, except_for: str) -> None:
    """Remove the unfinished uploads of dead jobs."""
    for name in folder.folders():
        names = (folder / name).names() if name != except_for else []
        if OWNER_NAME not in names or FILE_NAME in names:
            continue
        owner = _owner(folder / name)
        if owner is None or owner.begun is None:
            continue
        if owner.host == socket.gethostname():
            dead = not is_alive(owner)
        else:
            dead = time.time() - owner.begun > _ABANDONED_S
        if dead and not (folder / name / FILE_NAME).exists():  # it may have become complete meanwhile
            (folder / name).remove_folder(FILE_NAME, OWNER_NAME)


def _owner(folder: Url) -> FolderOwner | None:
    with contextlib.suppress(FileNotFoundError):
        return owner_of((folder / OWNER_NAME).read())
    return None

"""The same checkpoint in further places: copied when it is complete, read back, and published there as it was at home.

Each data file is copied by the rank that made it, index and manifest by rank 0. A copy that fails is a warning and leaves nothing
behind: the checkpoint stands, and a run does not end because a second disk is full.
"""

import os
import socket
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ckpt.check.verifying import verify_files
from ckpt.commit.atomic import Stage, next_sequence
from ckpt.commit.removal import retain
from ckpt.commit.upload import Upload, newest_sequence
from ckpt.format.hdf5 import INDEX_NAME
from ckpt.format.manifest import FILE_NAME, CheckpointError, Manifest
from ckpt.format.validation import decode
from ckpt.ranks import Ranks
from ckpt.storage.access import open_regular
from ckpt.storage.local import check_room, naming, patient
from ckpt.storage.places import Paths, Place, all_places, is_there, read_all
from ckpt.storage.remote import Url

_BUFFER_BYTES = 4 << 20


def further_places(folder: Path, copies: Paths | None, *, name: str | None = None) -> tuple[Place, ...]:
    """The places that `copies` names, beside `folder`, in which a checkpoint of that name is saved, if any is.

    TypeError or ValueError for what cannot be one.
    """
    places = all_places(copies)
    known = [os.path.realpath(folder)]
    for place in places:
        if isinstance(place, Url) and not place.name:
            raise ValueError(f"copies names {place}, which has no path; expected a folder in it, as s3://bucket/run")
        where = str(place) if isinstance(place, Url) else os.path.realpath(place)
        if where in known:
            raise ValueError(
                f"copies names {place}, where the checkpoint or another copy is to lie; expected further places"
            )
        if name is not None and not isinstance(place, Url) and Path(where).is_relative_to(Path(known[0], name)):
            raise ValueError(f"copies names {place}, which is the checkpoint or lies in it; expected further places")
        known.append(where)
    return places


def next_sequence_in(folder: Path, places: Sequence[Place]) -> int:
    """One more than the newest checkpoint's number in all of them: a new folder goes on where its copies are."""
    numbers = [next_sequence(folder)]
    for place in places:
        with suppress(OSError, CheckpointError):  # whoever copies will find out
            numbers.append(newest_sequence(place) + 1 if isinstance(place, Url) else next_sequence(place))
    return max(numbers)


@dataclass(frozen=True)
class Retention:
    """What `retain` is told in every place."""

    keep: int | None
    keep_every: int | None


def make_copies(
    source: Path, places: Sequence[Place], own: str | None, ranks: Ranks, retention: Retention, *, overwrite: bool
) -> None:
    """Copy the checkpoint `source` into each of `places`; `own`: the data file that this rank copies. Collective over `ranks`.

    A copy that could not be made is a RuntimeWarning on rank 0 that says where and why.
    """
    if not places:
        return
    text: str | None = None
    with ranks.together():
        if ranks.rank == 0:
            with suppress(FileNotFoundError):
                text = read_all(source / FILE_NAME).decode()
    text = ranks.broadcast_object(text)
    removed = f"{source} was not copied: another save that keeps fewer checkpoints has removed it"
    if text is None:
        with ranks.together():
            if ranks.rank == 0:
                warnings.warn(removed, RuntimeWarning, stacklevel=4)
        return
    data = text.encode()
    manifest = decode(data)
    mine = [] if own is None else [own]
    if ranks.rank == 0:
        mine.append(INDEX_NAME)
    failed = []
    for place in places:
        final = place / source.name
        if problem := _Copy(source, final, data, manifest, mine, ranks, overwrite).make():
            failed.append(f"the copy {final} was not made: {problem}; the checkpoint {source} stands")
        elif problem := _agreed(ranks, lambda final=final: _retain(final, retention, ranks)):  # type: ignore[misc]
            failed.append(f"old checkpoints beside the copy {final} were not removed: {problem}")
    with ranks.together():  # a warning can be made an error
        if ranks.rank == 0:
            if failed and not is_there(source / FILE_NAME):  # while it was copied
                failed = [removed]
            for line in failed:
                warnings.warn(line, RuntimeWarning, stacklevel=4)  # who called save


def _retain(final: Place, retention: Retention, ranks: Ranks) -> None:
    if ranks.rank == 0:
        retain(final, retention.keep, retention.keep_every)


@dataclass
class _Copy:
    """One copy on its way. `data`: of the manifest; `mine`: the files that this rank brings."""

    source: Path
    final: Place
    data: bytes
    manifest: Manifest
    mine: Sequence[str]
    ranks: Ranks
    overwrite: bool
    stage: Stage | Upload | None = None  # on rank 0

    def make(self) -> str | None:
        """Make it; on all ranks why that could not be, or None."""
        made = False
        try:
            for step in (self._open, self._transfer, self._read_back, self._publish):
                if problem := _agreed(self.ranks, step):
                    return problem
            made = True
            return None
        finally:
            if self.stage is not None and not made:
                self.stage.discard()

    @property
    def _folder(self) -> Place:
        """Where it is made."""
        return self.final if isinstance(self.final, Url) else Stage(self.final).path

    def _open(self) -> None:
        if self.ranks.rank > 0:
            return
        if isinstance(self.final, Url):
            self.stage = Upload.open(self.final, self.data, overwrite=self.overwrite)
        else:
            self.stage = Stage.open(self.final, overwrite=self.overwrite)

    def _transfer(self) -> None:
        folder = self._folder
        if not isinstance(folder, Url) and self.mine:
            _check_visible(folder)
        for name in self.mine:
            source = self.source / name
            patient(lambda source=source: os.stat(source))  # type: ignore[misc]  # rank 0 has just renamed it
            if isinstance(folder, Url):
                (folder / name).upload(source)
            else:
                _write(folder / name, source)
        if self.ranks.rank == 0 and not isinstance(folder, Url):  # elsewhere it comes last, and is the commit
            _write(folder / FILE_NAME, self.source / FILE_NAME)

    def _read_back(self) -> None:
        folder = self._folder
        if self.mine and (damages := verify_files(folder, self.manifest, self.mine, threads=1)):
            raise CheckpointError(f"reading it back: {damages[0]}")
        if self.ranks.rank == 0 and not isinstance(folder, Url) and read_all(folder / FILE_NAME) != self.data:
            raise CheckpointError(f"reading it back: {FILE_NAME} is not what was written")

    def _publish(self) -> None:
        if self.stage is not None:
            self.stage.publish(overwrite=self.overwrite)


def _agreed(ranks: Ranks, step: Callable[[], None]) -> str | None:
    """Do `step` on all ranks; on all of them what went wrong on any, or None."""
    try:
        with ranks.together():
            step()
    except Exception as error:  # of whatever kind: it must not leave the other ranks alone
        return str(error)
    return None


def _check_visible(folder: Path) -> None:
    try:
        patient(lambda: os.stat(folder))
    except FileNotFoundError as error:
        problem = f"not seen on {socket.gethostname()}: copies lie where all nodes see them"
        raise FileNotFoundError(error.errno, problem, str(folder)) from error


def _write(target: Path, source: Path) -> None:
    """A new file at `target` with the bytes of `source`, on the disk and no more in memory: who reads it back asks the disk.

    Read and written, not `copy_file_range`: that may give both names the same blocks of one disk.
    """
    with open(open_regular(source), "rb", buffering=0) as opened, naming(target):
        check_room(target, os.fstat(opened.fileno()).st_size)
        fd = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            buffer = memoryview(bytearray(_BUFFER_BYTES))
            while True:
                with naming(source):
                    count = opened.readinto(buffer)
                if not count:
                    break
                view = buffer[:count]
                while view:
                    view = view[os.write(fd, view) :]
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)

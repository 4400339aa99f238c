"""The folder of files of tokens that a job writes, or that several jobs write one after another.

OUT/tokenize.json               what the files are made of: a job with other settings does not go on
    NAME-000000.bin, .idx       the tokens of a piece (documents.py); none if it has no documents
    NAME-000000.json            its numbers, written last: the piece is complete
    .lock                       the job that writes: see monitor/record/folder_lock.py
    .claims/NAME-000000         a rank of this job has the piece
           /failed              a rank of this job has an error: the others end
"""

import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from collectives.files import write_new
from mpitrain.job.config import ConfigError, FolderInUseError
from mpitrain.job.data.documents import VERSION
from mpitrain.job.data.remarks import Remark, say_remark
from mpitrain.job.data.tokenize.documents import DocumentPiece
from mpitrain.job.record.files.folder_lock import FolderLock, LockedError

_SETTINGS, _VERSION, _MARKS = "tokenize.json", "reader", "marks"


class Numbers(msgspec.Struct, frozen=True, kw_only=True):
    """Of a piece, or of several. `text_bytes`: of the documents in UTF-8."""

    documents: int = 0
    tokens: int = 0
    text_bytes: int = 0
    damaged: int = 0


class OutputFolder:
    """The folder, on any rank. `item_bytes`: of a token. OSError of all methods: the folder cannot be read or written."""

    def __init__(self, folder: Path, item_bytes: int) -> None:
        self.folder, self._item_bytes = folder, item_bytes
        self._claims = folder / ".claims"

    def lock(self) -> FolderLock:
        """Lock the folder, and make it if necessary. FolderInUseError if another job writes to it. On rank 0."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            return FolderLock(self.folder)
        except OSError as error:
            raise OSError(f"tokenize: {self.folder} cannot be written: {error.strerror or error}") from None
        except LockedError as error:
            raise FolderInUseError(
                f"tokenize: {error} writes to {self.folder}; wait for its end, or choose another --out"
            ) from None

    def begin(self, settings: Mapping[str, Any], marks: Sequence[str] = ()) -> int:
        """Prepare the folder for the ranks of a job, on rank 0. ConfigError if it has something else, or tokens of other settings.

        `marks`: of the sources (Origin.mark). Other ones than before are a line for the user: a signature may have been made anew.
        Returns the version of the readers (documents.VERSION) of an earlier job in the folder, or of this one.
        """
        version = VERSION
        if (path := self.folder / _SETTINGS).exists():
            version = self._check(path, settings, marks)
        elif others := sorted(each.name for each in self.folder.iterdir() if not each.name.startswith(".")):
            raise ConfigError(
                f"tokenize: --out: expected an empty folder or that of an earlier job, got {self.folder} with {others[0]}"
            )
        shutil.rmtree(self._claims, ignore_errors=True)
        self._claims.mkdir()
        for left in self.folder.glob("*.part"):  # by ranks that were killed
            left.unlink()
        whole = {**settings, _VERSION: version} if version > 1 else dict(settings)
        if any(marks):
            whole[_MARKS] = list(marks)
        _write(path, msgspec.json.format(msgspec.json.encode(whole), indent=1))
        return version

    def check_shared(self) -> None:
        """ConfigError if this rank does not see the folder of rank 0."""
        if not self._claims.is_dir():
            raise ConfigError(
                f"tokenize: a rank does not see {self.folder} of rank 0; expected --out in a file system of all nodes"
            )

    def end(self) -> None:
        """Remove what serves the running job alone, on rank 0."""
        shutil.rmtree(self._claims, ignore_errors=True)

    def path_of(self, piece: DocumentPiece) -> Path:
        """The .bin file of a piece."""
        return self.folder / f"{piece.name}.bin"

    def claim(self, piece: DocumentPiece) -> bool:
        """Take a piece. Returns False if a rank has it already."""
        try:
            (self._claims / piece.name).open("xb").close()  # exclusive on NFS as well
        except FileExistsError:
            return False
        return True

    def is_alive(self, piece: DocumentPiece) -> None:
        """Tell the other ranks that this one still works on a piece."""
        with suppress(OSError):
            os.utime(self._claims / piece.name)

    def signs(self) -> object:
        """What changes while any rank works: the pieces that are taken and complete, and when a rank has last been alive."""
        times = [path.stat().st_mtime_ns for path in self._claims.iterdir()]
        return len(times), max(times, default=0), len(self.complete_names())

    def complete(self, piece: DocumentPiece, numbers: Numbers) -> None:
        """Mark a piece as complete. Its files of tokens are there."""
        _write(self._numbers_of(piece), msgspec.json.encode(numbers))

    def numbers(self, piece: DocumentPiece) -> Numbers | None:
        """The numbers of a piece; None if it is not complete, or its file of tokens was lost or cut off."""
        try:
            found = msgspec.json.decode(self._numbers_of(piece).read_bytes(), type=Numbers)
            path = self.path_of(piece)
            size = path.stat().st_size if found.tokens and path.with_suffix(".idx").exists() else 0
        except (FileNotFoundError, msgspec.MsgspecError):
            return None
        return found if size == found.tokens * self._item_bytes else None

    def complete_names(self) -> set[str]:
        """The names of the pieces that are complete."""
        return {path.stem for path in self.folder.glob("*.json")}

    def mark_failed(self) -> None:
        """Tell the other ranks to end."""
        with suppress(OSError):  # which may be the error itself: then they find it at the end
            (self._claims / "failed").touch()

    def has_failed(self) -> bool:
        """Whether a rank has told the others to end."""
        return (self._claims / "failed").exists()

    def _check(self, path: Path, settings: Mapping[str, Any], marks: Sequence[str]) -> int:
        """The version of the readers of the job that has left these settings. ConfigError if it was another job."""
        try:
            there = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
        except msgspec.MsgspecError as error:
            raise ConfigError(f"tokenize: {path} is damaged: {error}; choose another --out") from None
        for name, value in settings.items():
            if there.get(name) != value:
                are_shards = name in ("sources", "pieces")
                what = (
                    "its shards were others" if are_shards else f"its {name} was {there.get(name)}, and is {value} now"
                )
                raise ConfigError(
                    f"tokenize: {self.folder} has tokens of another job: {what}; take the same, or another --out"
                )
        version: Any = there.get(_VERSION, 1)
        if type(version) is not int or not 1 <= version <= VERSION:
            raise ConfigError(
                f"tokenize: {self.folder} has tokens by version {version!s:.20} of the readers, and this program has {VERSION}; take a "
                "program that is as new, or another --out"
            )
        if there.get(_MARKS) != (list(marks) if any(marks) else None):
            its = "hidden parameters of the addresses have changed, or the folder does not have them"
            say_remark(
                Remark(
                    f"shards of {self.folder} are known by name and size alone: {its}. If the files are others, choose another --out"
                )
            )
        return version

    def _numbers_of(self, piece: DocumentPiece) -> Path:
        return self.folder / f"{piece.name}.json"


def _write(path: Path, data: bytes) -> None:
    part = path.with_name(f"{path.name}.part")
    write_new(part, data)
    part.replace(path)


def summed(numbers: Iterable[Numbers]) -> Numbers:
    """The numbers of several pieces together."""
    total = np.zeros(len(Numbers.__struct_fields__), np.int64)
    for each in numbers:
        total += msgspec.structs.astuple(each)
    return Numbers(**dict(zip(Numbers.__struct_fields__, total.tolist(), strict=True)))

"""A folder of checkpoints: which there are, which are complete, which is the newest.

A checkpoint is a folder with a manifest. It got its name by one rename when all of it was on disk, so what has the name is
complete, unless somebody damaged it since: the manifest's checksum and the sizes of the files tell. Names that begin with a dot
are work in progress (see commit.py).
"""

import os
import re
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import overload

from ckpt.guard import Header, check_files, decode, decode_header, open_regular, verified_lines
from ckpt.manifest import FILE_NAME, CheckpointError, File, Manifest
from ckpt.places import Paths, Place, Url, all_places, bytes_in, check_sizes, folders_in, names_in, place_of, read_all

LATEST_NAME = "latest"
RUN_SUBFOLDER = "checkpoints"  # where a run's folder keeps them, by the main job's and our convention
_MAX_HEADER_BYTES = 256 << 20
_PARTS = r"manifest\.jsonl|index\.h5|(rank|node|part)-[0-9]{5}\.h5"


@dataclass(frozen=True)
class CheckpointInfo:
    """One checkpoint of a folder. `problem` says why an incomplete one cannot be used; `saved` is in seconds since the epoch.

    `step`: the number its name ends with, if any. `sequence` and `saved` are None where the manifest cannot be read.
    """

    path: Place
    name: str
    step: int | None
    problem: str | None
    nbytes: int
    num_tensors: int | None
    sequence: int | None
    saved: float | None

    @property
    def complete(self) -> bool:
        return self.problem is None


def list_checkpoints(folder: str | os.PathLike[str]) -> list[CheckpointInfo]:
    """The checkpoints in `folder` (or behind a URL), or of the run whose folder it is, oldest first, incomplete ones included.

    FileNotFoundError if there is no such folder.
    """
    folder = place_of(folder)
    places = _candidates(folder)
    if not places and (folder / RUN_SUBFOLDER).is_dir():
        places = _candidates(folder / RUN_SUBFOLDER)
    found = [info(path, name) for path, name in places]
    return sorted(found, key=lambda c: (-1 if c.sequence is None else c.sequence, c.saved or 0.0, c.name))


@overload
def latest(folder: Path, *, copies: None = None) -> Path | None: ...
@overload
def latest(folder: str | os.PathLike[str], *, copies: Paths | None = None) -> Path | Url | None: ...
def latest(folder: str | os.PathLike[str], *, copies: Paths | None = None) -> Path | Url | None:
    """The newest complete checkpoint in `folder`, or None. Found by looking; the file `latest` there is for people and scripts.

    `copies`: the further places that `save` was given, in which it may be, too: one that was lost or damaged in `folder` is then
    found there. Of equally new ones it is that in `folder`, or in the first place. One that cannot be reached is a RuntimeWarning.
    """
    place = place_of(folder)
    found = [newest] if (newest := _newest_complete(place)) else []
    for place in all_places(copies):
        try:
            found += [newest] if (newest := _newest_complete(place)) else []
        except OSError as error:  # a job goes on from home while a further place is away
            warnings.warn(f"no copy is looked for in {place}: {error}", RuntimeWarning, stacklevel=2)
    return max(found, key=lambda pair: pair[0], default=(None, None))[1]


def _newest_complete(folder: Place) -> tuple[tuple[int, float], Place] | None:
    """The newest complete checkpoint there, after what orders those of several places."""
    if not folder.is_dir():
        return None
    complete = (
        ((header.sequence, header.saved), path)
        for path, header in newest_first(folder)
        if info(path, path.name).complete
    )
    return next(complete, None)


def find(path: str | os.PathLike[str]) -> Path | Url:
    """The checkpoint that `path` means: itself, or the newest complete one in it or in its `checkpoints` (a run's folder).

    CheckpointError if there is none; of a checkpoint itself, opening it tells what may be wrong with it.
    """
    folder = place_of(path)
    if (folder / FILE_NAME).exists():
        return folder
    if not folder.is_dir():
        raise CheckpointError(f"{folder} does not exist" if not folder.exists() else f"{folder} is not a folder")
    found = latest(folder) or latest(folder / RUN_SUBFOLDER)
    if found is None:
        damaged = list_checkpoints(folder)
        if damaged:
            raise CheckpointError(f"{damaged[-1].path}: {damaged[-1].problem}; {folder} holds no complete checkpoint")
        raise CheckpointError(f"{folder} has no {FILE_NAME}: it is no checkpoint, and holds no complete one")
    return found


def newest_first(folder: Place) -> list[tuple[Place, Header]]:
    """The checkpoints of `folder` whose header can be read, newest first. They may be incomplete."""
    found = []
    for path, name in _candidates(folder):
        try:
            header = read_header(path)
        except (CheckpointError, OSError):
            continue
        found.append((header.sequence, header.saved, name, path, header))
    return [(path, header) for *_, path, header in sorted(found, key=lambda entry: entry[:3], reverse=True)]


def info(path: Place, name: str) -> CheckpointInfo:
    """What there is to say about the checkpoint at `path`, called `name`."""
    step = step_of(name)
    header, problem = None, None
    try:
        header = read_header(path)
        _check_files(path, header.files)
        verified_lines(read_all(path / FILE_NAME))
    except CheckpointError as error:
        problem = str(error)
    except OSError as error:
        problem = f"the manifest cannot be read: {error}"
    sequence, saved = (header.sequence, header.saved) if header else (None, None)
    return CheckpointInfo(
        path, name, step, problem, bytes_in(path), header.num_tensors if header else None, sequence, saved
    )


def step_of(name: str) -> int | None:
    """The number that a checkpoint's name ends with."""
    number = re.search(r"[0-9]+$", name)
    return int(number[0]) if number else None


def read_manifest(path: Place) -> bytes:
    """The bytes of a checkpoint's manifest, after a look at its files. CheckpointError if there is none or files do not fit."""
    data = manifest_bytes(path)
    try:
        files = decode_header(verified_lines(data)[0]).files
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from None
    check_there(path, files)
    return data


def manifest_bytes(path: Place) -> bytes:
    """The bytes of a checkpoint's manifest. CheckpointError if there is none."""
    try:
        return read_all(path / FILE_NAME)
    except FileNotFoundError:
        what = "has no manifest.jsonl: it is no complete checkpoint" if path.is_dir() else "does not exist"
        raise CheckpointError(f"{path} {what}") from None
    except OSError as error:
        raise CheckpointError(f"{path}: the manifest cannot be read: {error}") from error


def check_there(path: Place, files: Iterable[File]) -> None:
    """CheckpointError unless the checkpoint's files are there, in the sizes that its manifest says."""
    try:
        _check_files(path, tuple(files))
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from None


def parse_manifest(path: Place, data: bytes) -> Manifest:
    """`decode`, with the checkpoint's path in its error."""
    try:
        return decode(data)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from None


def _candidates(folder: Place) -> list[tuple[Place, str]]:
    found = []
    for entry in folders_in(folder):
        name = entry
        if name.startswith("."):
            # Where the kernel cannot exchange two folders, a replaced checkpoint has only this name for an instant, or
            # for longer if the job died in that instant.
            original = name[1:].removesuffix(".replaced")
            if not name.endswith(".replaced") or (folder / original).exists():
                continue
            name = original
        if any(re.fullmatch(_PARTS, part) for part in _names(folder / entry)):
            found.append((folder / entry, name))
    return found


def _names(folder: Place) -> list[str]:
    try:
        return names_in(folder)
    except OSError:
        return []


def _check_files(path: Place, files: tuple[File, ...]) -> None:
    if isinstance(path, Url):
        check_sizes(path, {file.name: file.nbytes for file in files})
    else:
        check_files(path, files)


def read_header(path: Place) -> Header:
    """The first line of a checkpoint's manifest, checked."""
    if isinstance(path, Url):
        return decode_header(read_all(path / FILE_NAME).partition(b"\n")[0])
    with open(open_regular(path / FILE_NAME), "rb") as file:
        return decode_header(file.readline(_MAX_HEADER_BYTES))

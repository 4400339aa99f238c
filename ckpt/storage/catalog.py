"""A folder of checkpoints: the list of checkpoints, which of them are complete, and the newest one, which was saved last.

The order is that of the saves, which the manifests count (`sequence`), not that of the steps in the names: if a run goes back to an
earlier step and continues there, its state is in the checkpoint that it saved last.

A checkpoint is a folder with a manifest. It got its name by one rename after all files were on disk, so it is complete unless it was
damaged later, which the manifest's checksum and the sizes of the files show. Names that begin with a dot are work in progress (see
atomic.py).
"""

import os
import re
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import overload

from ckpt.format.hdf5 import INDEX_NAME
from ckpt.format.manifest import FILE_NAME, CheckpointError, File, Manifest, OutOfReachError, order_of
from ckpt.format.validation import Header, decode, verified_header
from ckpt.storage.local_path import LocalPath
from ckpt.storage.places import (
    Paths,
    Place,
    absolute,
    all_places,
    is_checkpoint,
    place_of,
    read_bytes,
    read_header,
)
from ckpt.storage.underway import wait_for

LATEST_NAME = "latest"
RUN_SUBFOLDER = "checkpoints"  # the folder of checkpoints in a run's folder: a convention of ours and of the main job
OWNER_NAME = ".owner"  # names the process that is filling a folder (see owner.py)
_PARTS = r"manifest\.jsonl|index\.h5|(rank|node|part)-[0-9]{5,}\.h5"
# Temporary names. NFS and FUSE give these names to files that are removed while they are open.
_HIDDEN = rf"\{OWNER_NAME}|\.{LATEST_NAME}|\.nfs[0-9a-f]+|\.fuse_hidden[0-9a-f]+"


@dataclass(frozen=True)
class CheckpointInfo:
    """One checkpoint of a folder. `problem`: why an incomplete one cannot be used; `saved`: seconds since the epoch.

    `broken`: whether a part is certainly missing or altered, not only out of this program's reach (a newer format, no permission).
    `step`: the number at the end of its name, if any. `sequence` and `saved` are None if the manifest cannot be read.
    """

    path: Place
    name: str
    step: int | None
    problem: str | None
    nbytes: int
    num_tensors: int | None
    sequence: int | None
    saved: float | None
    broken: bool = False

    @property
    def complete(self) -> bool:
        return self.problem is None


def list_checkpoints(folder: str | os.PathLike[str]) -> list[CheckpointInfo]:
    """The checkpoints in `folder`, which may be a URL or a run's folder, oldest first, including incomplete ones.

    FileNotFoundError if there is no such folder.
    """
    found = [info(path, name) for path, name in _candidates(folder_of_checkpoints(folder))]
    return sorted(found, key=lambda c: (order_of(c.sequence or 0, c.saved or 0.0), c.name))


def folder_of_checkpoints(folder: str | os.PathLike[str]) -> Place:
    """The folder of checkpoints in a run's folder; `folder` itself if it holds checkpoints, or is no run's folder.

    FileNotFoundError if `folder` is missing.
    """
    folder = place_of(folder)
    inner = folder / RUN_SUBFOLDER
    return inner if not _candidates(folder) and inner.is_dir() else folder


def is_part(name: str) -> bool:
    """Whether a save makes files of this name."""
    return re.fullmatch(_PARTS, name) is not None


def strangers(names: Iterable[str]) -> list[str]:
    """The foreign names: no file of a checkpoint, finished or not, has such a name."""
    return [name for name in names if not is_part(name) and not re.fullmatch(_HIDDEN, name)]


def check_outside(path: str | os.PathLike[str]) -> None:
    """ValueError if `path` is a checkpoint or lies in one, because no file is ever added there."""
    place = absolute(path)  # without `..`, which may lead out of a checkpoint
    for folder in (place, *place.parents):
        if is_checkpoint(folder):
            what = f"{place} is" if folder == place else f"{place} lies in {folder},"
            raise ValueError(f"{what} a checkpoint, in which nothing is ever changed; expected another place")


def reason_to_keep(path: str | os.PathLike[str]) -> str | None:
    """The reason why a save must not replace or remove this folder, or None, for an empty folder or a checkpoint, also a damaged one.

    A folder with a foreign file belongs to another program. So does a folder with a `manifest.jsonl`, which data sets also have, and no
    other sign of a save. A write-protected folder must stay. OSError if the folder cannot be read.
    """
    place = place_of(path)
    if place.is_there() and not place.is_dir():
        return "is no folder"
    names = sorted(place.names())
    if strange := strangers(names) or sorted(place.folders()):
        return f"holds {strange[0]!r:.80}, which no save made"
    if names and not {INDEX_NAME, OWNER_NAME}.intersection(names) and not is_checkpoint(place):
        return "has neither an index nor a manifest that a save made"
    if place.is_write_protected():
        return "is write-protected"  # it could be renamed, but its files could not be removed
    return None


@overload
def latest(folder: Path, *, copies: None = None) -> LocalPath | None: ...
@overload
def latest(folder: str | os.PathLike[str], *, copies: Paths | None = None) -> Place | None: ...
def latest(folder: str | os.PathLike[str], *, copies: Paths | None = None) -> Place | None:
    """The newest complete checkpoint in `folder`, or None. The newest one is the one saved last, for any step in its name.

    The function reads the checkpoints; the file `latest` is only for people and scripts.

    `copies`: the argument `copies` of `save`: a checkpoint that was lost or damaged in `folder` is then found in these places. Of
    equally new ones the result is the one in `folder`, or in the first place. An unreachable place causes a RuntimeWarning.
    """
    place = place_of(folder)
    found = [newest] if (newest := _newest_complete(place)) else []
    for place in all_places(copies):
        try:
            found += [newest] if (newest := _newest_complete(place)) else []
        except OSError as error:  # the job can continue without this place
            warnings.warn(f"no copy is looked for in {place}: {error}", RuntimeWarning, stacklevel=2)
    return max(found, key=lambda pair: pair[0], default=(None, None))[1]


def _newest_complete(folder: Place) -> tuple[tuple[int, float], Place] | None:
    """The newest complete checkpoint there, after its sort key among those of several places."""
    if not folder.is_dir():
        return None
    complete = ((header.order, path) for path, header in newest_first(folder) if info(path, path.name).complete)
    return next(complete, None)


def find(path: str | os.PathLike[str]) -> Place:
    """The checkpoint that `path` means: `path` itself, or the newest complete one in it or in its `checkpoints` (a run's folder).

    CheckpointError if there is none. `path` itself is not checked here; damage is found when it is opened.
    """
    folder = place_of(path)
    wait_for(folder)
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
        found.append((header.order, name, path, header))
    return [(path, header) for *_, path, header in sorted(found, key=lambda entry: entry[:2], reverse=True)]


def newest_sequence(folder: Place) -> int:
    """The number of the newest checkpoint in `folder`, 0 if there is none. Absurd numbers do not count."""
    return max((header.order[0] for _, header in newest_first(folder)), default=0)


def info(path: Place, name: str) -> CheckpointInfo:
    """The entry of a list for the checkpoint at `path`, with the name `name`."""
    step = step_of(name)
    header, problem, broken = None, None, False
    try:
        header = read_header(path)
        path.check_files(header.files)
        verified_header(read_bytes(path))
    except CheckpointError as error:
        problem, broken = str(error), not isinstance(error, OutOfReachError)
    except OSError as error:
        problem, broken = f"the manifest cannot be read: {error}", isinstance(error, FileNotFoundError)
    sequence, saved = (header.sequence, header.saved) if header else (None, None)
    num_tensors = header.num_tensors if header else None
    try:
        nbytes = path.nbytes()
    except OSError:  # another save is removing it as an old one
        nbytes = 0
    return CheckpointInfo(path, name, step, problem, nbytes, num_tensors, sequence, saved, broken)


def step_of(name: str) -> int | None:
    """The number that a checkpoint's name ends with."""
    number = re.search(r"[0-9]+$", name)
    return int(number[0]) if number else None


def read_manifest(path: Place) -> Manifest:
    """The manifest of a checkpoint after a check that its files exist. CheckpointError if there is no manifest, or files do not fit."""
    manifest = parse_manifest(path, manifest_bytes(path))
    check_there(path, manifest.files)
    return manifest


def manifest_bytes(path: Place) -> bytes:
    """The bytes of a checkpoint's manifest. CheckpointError if there is none. Waits for the end of a save of it by this process."""
    failed = wait_for(path)
    try:
        with _naming(path):
            return read_bytes(path)
    except FileNotFoundError:
        what = "has no manifest.jsonl: it is no complete checkpoint" if path.is_dir() else "does not exist"
        if failed is not None:
            what += f": its save in the background has failed, and ckpt.wait() raises the error: {failed}"
        raise CheckpointError(f"{path} {what}") from None
    except OSError as error:
        raise CheckpointError(f"{path}: the manifest cannot be read: {error}") from error


def check_there(path: Place, files: tuple[File, ...]) -> None:
    """CheckpointError unless the files of the manifest exist in the checkpoint, with their sizes."""
    with _naming(path):
        path.check_files(files)


def parse_manifest(path: Place, data: bytes) -> Manifest:
    """`decode`, with the checkpoint's path in its error."""
    with _naming(path):
        return decode(data)


@contextmanager
def _naming(path: Place) -> Iterator[None]:
    try:
        yield
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from None


def none_usable(problems: Sequence[str]) -> CheckpointError:
    """The error for a checkpoint each of whose copies has one of these problems."""
    return CheckpointError(f"none of {len(problems)} copies can be used: {'; '.join(problems)}")


def _candidates(folder: Place) -> list[tuple[Place, str]]:
    found = []
    for entry in folder.folders():
        name = entry
        if name.startswith("."):
            # If the kernel cannot exchange two folders, a replaced checkpoint has only this name for a moment, or for
            # longer if the job died in this moment.
            original = name[1:].removesuffix(".replaced")
            if not name.endswith(".replaced") or (folder / original).exists():
                continue
            name = original
        parts = set(filter(is_part, _names(folder / entry)))
        # Data sets, too, may have a `manifest.jsonl`.
        if parts and (parts != {FILE_NAME} or is_checkpoint(folder / entry)):
            found.append((folder / entry, name))
    return found


def _names(folder: Place) -> list[str]:
    try:
        return folder.names()
    except OSError:
        return []

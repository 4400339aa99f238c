"""Copies of a checkpoint in other places: copied when the checkpoint is complete, read back, and published like the original.

The rank that made a data file copies it; rank 0 copies the index and the manifest. A copy that fails causes a warning and leaves no
files: the checkpoint itself stays, and a run does not end because a second disk is full.
"""

import os
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ckpt.commit.atomic import Stage
from ckpt.commit.retention import retain, stage_for
from ckpt.commit.upload import Upload
from ckpt.format.hdf5 import INDEX_NAME
from ckpt.format.manifest import FILE_NAME, CheckpointError, Manifest, following
from ckpt.format.validation import decode
from ckpt.ranks import Ranks
from ckpt.storage.checksums import verify_files
from ckpt.storage.local import patient
from ckpt.storage.local_path import LocalPath
from ckpt.storage.places import Paths, Place, absolute, all_places


def further_places(folder: Path, copies: Paths | None, *, name: str | None = None) -> tuple[Place, ...]:
    """The places in `copies`, for copies of the checkpoint `name` in `folder`. None: no name is known yet.

    TypeError or ValueError for a place that cannot hold copies.
    """
    places = all_places(copies)
    known = [absolute(folder).real()]
    for place in places:
        if not place.name:
            raise ValueError(f"copies names {place}, which has no path; expected a folder, such as s3://bucket/run")
        where = place.real()
        if where in known:
            raise ValueError(
                f"copies names {place}, which is named twice, or is the checkpoint's folder; expected further places"
            )
        if name is not None and known[0] / name in (where, *where.parents):
            raise ValueError(f"copies names {place}, which is the checkpoint or lies in it; expected further places")
        known.append(where)
    return places


def next_sequence(final: LocalPath, places: Sequence[Place]) -> int:
    """The number that follows that of the newest checkpoint in the folder of `final` and in all places, so that it grows in each."""
    newest = [stage_for(final).newest_sequence()]
    for place in places:
        with suppress(OSError, CheckpointError):  # the copy will report it
            newest.append(stage_for(place / final.name).newest_sequence())
    return following(max(newest))


@dataclass(frozen=True)
class Retention:
    """The arguments of `retain`, which hold in every place."""

    keep: int | None
    keep_every: int | None


def make_copies(
    source: LocalPath,
    places: Sequence[Place],
    own: str | None,
    ranks: Ranks,
    retention: Retention,
    *,
    overwrite: bool,
    private: bool = False,
    check: Callable[[], None] = lambda: None,
) -> None:
    """Copy the checkpoint `source` into each of `places`; `own`: the data file that this rank copies. Collective over `ranks`.

    `private`: of the folders of copies in local places, see `Stage`. `check`: rank 0 calls it before it gives a copy its name, and
    before it removes older ones. An error of it ends the copy.
    For a copy that could not be made, rank 0 gives a RuntimeWarning with the place and the reason.
    """
    if not places:
        return
    text: str | None = None
    with ranks.together():
        if ranks.rank == 0:
            with suppress(FileNotFoundError):
                text = (source / FILE_NAME).read().decode()
    text = ranks.broadcast_object(text)
    removed = f"{source} was not copied: another save that keeps fewer checkpoints has removed it"
    if text is None:
        with ranks.together():
            if ranks.rank == 0:
                warnings.warn(removed, RuntimeWarning, stacklevel=6)
        return
    data = text.encode()
    manifest = decode(data)
    mine = [] if own is None else [own]
    if ranks.rank == 0:
        mine.append(INDEX_NAME)
    failed = []
    for place in places:
        final = place / source.name

        def remove_old(final: Place = final) -> None:
            check()
            retain(final, retention.keep, retention.keep_every)

        stage = stage_for(final, private=private)
        if problem := _Copy(source, stage, data, manifest, mine, ranks, overwrite, check).make():
            failed.append(f"the copy {final} was not made: {problem}; the checkpoint {source} stands")
        elif problem := _agreed(ranks, remove_old, on_rank_0=True):
            failed.append(f"old checkpoints beside the copy {final} were not removed: {problem}")
    with ranks.together():  # a filter may turn the warning into an error
        if ranks.rank == 0:
            if failed and not (source / FILE_NAME).is_there():  # removed while it was copied
                failed = [removed]
            for line in failed:
                warnings.warn(line, RuntimeWarning, stacklevel=6)  # the line that called save


@dataclass
class _Copy:
    """One copy in progress. `data`: the bytes of the manifest; `mine`: the files that this rank copies."""

    source: LocalPath
    stage: Stage | Upload
    data: bytes
    manifest: Manifest
    mine: Sequence[str]
    ranks: Ranks
    overwrite: bool
    check: Callable[[], None]

    def make(self) -> str | None:
        """Make the copy. Returns the reason of a failure on all ranks, or None."""
        begin = partial(self.stage.open, overwrite=self.overwrite)
        steps = ((begin, True), (self._transfer, False), (self._read_back, False), (self._publish, True))
        made = False
        try:
            for step, on_rank_0 in steps:
                if problem := _agreed(self.ranks, step, on_rank_0=on_rank_0):
                    return problem
            made = True
            return None
        finally:
            if self.ranks.rank == 0 and not made:
                self.stage.discard()

    def _publish(self) -> None:
        self.check()
        self.stage.publish(self.data, overwrite=self.overwrite)

    def _transfer(self) -> None:
        for name in self.mine:
            source = self.source / name
            patient(lambda source=source: os.stat(source))  # type: ignore[misc]  # rank 0 has just renamed it
            (self.stage.path / name).upload(source)

    def _read_back(self) -> None:
        if self.mine and (damages := verify_files(self.stage.path, self.manifest, self.mine, threads=1)):
            raise CheckpointError(f"reading it back: {damages[0]}")


def _agreed(ranks: Ranks, step: Callable[[], object], *, on_rank_0: bool = False) -> str | None:
    """Call `step` on all ranks, or only on rank 0. Returns, on all ranks, the message of an error of any rank, or None."""
    try:
        with ranks.together():
            if ranks.rank == 0 or not on_rank_0:
                step()
    except Exception as error:  # any error: the other ranks must not wait for this rank
        return str(error)
    return None

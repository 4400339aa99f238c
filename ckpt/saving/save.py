"""Saving: all ranks check and agree, each writes its blocks into the stage, rank 0 writes index and manifest, and commits."""

import json
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from numbers import Integral
from pathlib import Path
from typing import Any

from ckpt.commit.atomic import Stage, mend_latest
from ckpt.commit.retention import retain
from ckpt.format.boxes import Box
from ckpt.format.manifest import encode_meta, file_entry
from ckpt.format.validation import file_of
from ckpt.garbage import no_collections
from ckpt.ranks import Ranks, ranks_of
from ckpt.saving.agreement import Agreed, Arguments, agree
from ckpt.saving.background import begin, wait_before
from ckpt.saving.buffers import copied, give_back, take
from ckpt.saving.copies import Retention, further_places, make_copies, next_sequence
from ckpt.saving.describing import Contents, write_index, write_manifest
from ckpt.saving.placement import DataFile, Files, Item, assign, file_name, files_error, group_ranks, lay_out
from ckpt.saving.writer import Driver, Posix, room_of
from ckpt.storage.catalog import step_of
from ckpt.storage.local import check_free, flush
from ckpt.storage.local_path import LocalPath
from ckpt.storage.places import Paths, Place, local_path, text_of
from ckpt.tensors import Description, LocalBox, inspect
from collectives.arrays.dtypes import DTYPES

_DOING = "ckpt.save"


@no_collections()
def save(
    path: str | os.PathLike[str],
    tensors: Mapping[str, Any],
    *,
    comm: Ranks | None = None,
    meta: Mapping[str, Any] | None = None,
    files: Files = "rank",
    driver: str = "posix",
    background: bool = False,
    copies: Paths | None = None,
    keep: int | None = None,
    keep_every: int | None = None,
    overwrite: bool = False,
    private: bool = False,
    before_commit: Callable[[], None] | None = None,
) -> Path:
    """Write a checkpoint as the folder `path`, completely or not at all. Collective over `comm`; None means only this process.

    All arguments are the same on all ranks, except where noted. Threads may save at the same time, to any folders, if each has
    its own communicator or passes None. Only one of them at a time may save under one name.

    Args:
        comm: a `collectives.Communicator`, such as `collectives.world()`, whose ranks save one checkpoint together. None: only this
            process saves; if there are several ranks, each one saves its own tensors to its own path.
        tensors: name -> array, which is the same on all ranks, and which one of them writes (only checked mode compares the values); or
            `Shard`, this rank's box of a tensor that the ranks' boxes cover exactly; or a list of Shards, the rank's boxes of one
            tensor, which may be empty. Arrays are NumPy arrays or torch CPU tensors of bool, integers, fp16, bf16, fp32, fp64,
            complex64, complex128 and the kinds of float8; one that is not contiguous is copied first. A "/" in a name makes groups.
        meta: a JSON-like dict, nested up to 400 deep; the dict of rank 0 is saved.
        files: the data files: "rank", one for each rank that has blocks to write; "node", one per node; "one"; or the largest number
            of files. There are no more files than ranks.
        driver: "posix": each rank writes its ranges with `pwrite`. "mpio": with parallel HDF5, each rank independently;
            "mpio-collective": all ranks together. The files are the same.
        background: return as soon as the values and the meta are copied to host memory; a thread writes them. `ckpt.wait()`, or the
            next save over `comm` (with None: of the same thread), waits for the end and raises the errors.
        copies: other places, folders that all nodes see or URLs that fsspec knows ("s3://bucket/run"). The finished checkpoint is
            copied to each place under its name, and read back. If a copy fails, rank 0 gives a RuntimeWarning, no files of the copy
            stay, and the checkpoint is valid. `keep` holds in each place. The list of rank 0 is used.
        keep: this number of complete checkpoints, those saved last, stay in the folder of `path`; older ones are removed. Only names
            that end with a step, such as step-00000100, count and are removed: others, such as "best", stay.
        keep_every: a checkpoint is never removed if its step, the number at the end of its name, is a multiple of this number.
        overwrite: replace a checkpoint of that name, also a damaged one, or an empty folder; never a folder with foreign files.
        private: the folder of the checkpoint, and of each copy in a local place, has mode 0700: for this user alone. Else the umask
            decides, as for all files.
        before_commit: rank 0 calls it before it gives the checkpoint or a copy its name, before it writes `latest`, and before it
            removes older checkpoints. If it raises an error, all ranks give the save up (of a copy: the copy). So a job that has lost
            its folder to another job writes nothing there.

    Returns the absolute path. Other nodes may see it a moment later; with `background` it exists at the end of the save.

    Raises on all ranks, with nothing written: ValueError or TypeError if tensors or arguments are wrong or do not fit between the
    ranks, FileExistsError if `path` exists and may not be replaced, or another process or thread is writing it. OSError on all
    ranks if one of them cannot write; then the stage is removed, and an earlier checkpoint of this name is still there.
    """
    comm = ranks_of(comm)
    wait_before(comm)
    with comm.together(_DOING):
        checked = checked_path(path)
        places = further_places(checked.parent, copies, name=checked.name)
        _check_arguments(files, driver, keep, keep_every, comm, in_background=background)
        if keep is not None and step_of(checked.name) is None and comm.rank == 0:
            problem = f"keep={keep} neither counts nor removes {checked.name!r}, whose name ends with no step"
            warnings.warn(f"{problem}; expected a name such as step-00000100, or no keep", RuntimeWarning, stacklevel=3)
        held = inspect(tensors)
        line = encode_meta(meta or {})
    arguments = Arguments(
        os.path.normpath(path), files, driver, bool(background), keep, keep_every, bool(overwrite), bool(private)
    )
    agreed = agree(held, arguments, comm, _DOING)
    plan = _plan(agreed, files, comm)

    written = {item.name for item in plan.own.items[comm.rank]} if plan.own is not None else set()
    mine = [part for local in held if local.name in written for part in local.boxes]  # in the order of the items
    stage: Stage | None = None
    opened, buffer = None, None
    try:
        with comm.together(_DOING):
            if background:
                buffer = take(mine)
            if comm.rank == 0:
                stage = Stage(checked, private=private).open(overwrite=overwrite)
                check_free(stage.path, sum(room_of(file) for file in plan.files))
                board = stage.make_board() if background and comm.size > 1 else None
                opened = stage.path, stage.final, board, places
        folder, final, board, places = comm.broadcast_object(opened)
        # Of the meta at this call, because the caller may change what is in it while a thread saves.
        retention, of_save = Retention(keep, keep_every), json.loads(line) if comm.rank == 0 else {}
        if buffer is not None:
            # From here until the start of the thread only Ctrl-C can fail, so the ranks need not agree again.
            mine = copied(mine, buffer)
    except BaseException:
        if buffer is not None:
            give_back(buffer)
        if stage is not None:
            stage.discard(board=True)
        raise
    job = _Job(
        plan, folder, final, stage, agreed.tensors, mine, agreed.scalars, of_save, places, retention, overwrite, private, before_commit
    )  # fmt: skip

    def work(ranks: Ranks) -> None:
        with discarding(stage), _driver(driver, job, comm) as chosen:
            _carry_out(job, chosen, ranks)

    if buffer is None:
        work(comm)
    else:
        begin(comm, board, work, buffer, (checked, *(place / checked.name for place in places)))
    return Path(final)


@dataclass(frozen=True)
class _WritePlan:
    """The blocks of each rank and their files. `own`: this rank's file, if the rank writes a block; `files`: on rank 0 all files."""

    own: DataFile | None
    files: tuple[DataFile, ...]
    shares: bool  # whether a file may have more than one writer


@dataclass(frozen=True)
class _Job:
    """The data for writing and committing. `stage`: only on rank 0. `mine`: the boxes that this rank writes."""

    plan: _WritePlan
    folder: LocalPath
    final: LocalPath
    stage: Stage | None
    tensors: Sequence[Description]
    mine: Sequence[LocalBox]
    scalars: Mapping[str, bytes]
    meta: dict[str, Any]
    copies: tuple[Place, ...]
    retention: Retention
    overwrite: bool
    private: bool
    before_commit: Callable[[], None] | None

    def check(self) -> None:
        """Call `before_commit`."""
        if self.before_commit is not None:
            self.before_commit()


def _check_arguments(
    files: Files, driver: str, keep: int | None, keep_every: int | None, comm: Ranks, *, in_background: bool
) -> None:
    for name, number in (("keep", keep), ("keep_every", keep_every)):
        if number is None:
            continue
        if not isinstance(number, Integral) or isinstance(number, bool):
            raise TypeError(f"{name} is {number!r}; expected a whole number of at least 1, or None")
        if number < 1:
            raise ValueError(f"{name} is {number}; expected at least 1, or None")
    if problem := files_error(files):
        raise ValueError(problem)
    if driver not in ("posix", "mpio", "mpio-collective"):
        raise ValueError(f"driver is {driver!r}; expected 'posix', 'mpio' or 'mpio-collective'")
    if driver != "posix":
        from ckpt.saving.mpio import mpio_error

        if in_background:
            raise ValueError(
                f"driver={driver!r} cannot save in the background, where MPI must not be called; pass driver='posix'"
            )
        if problem := mpio_error(getattr(comm, "mpi", None)):
            raise ValueError(problem)


def checked_path(path: str | os.PathLike[str]) -> LocalPath:
    """The absolute path of a new checkpoint. ValueError if it cannot have this name."""
    if not text_of(path):
        raise ValueError("path is empty; expected a folder that the checkpoint becomes")
    final = local_path(path, "path", "a folder, which copies=[URL of its parent] copies to a remote place")
    if final.name.startswith(".") or final.name in ("", "latest"):
        raise ValueError(
            f"{final} cannot be a checkpoint's name: it is empty, hidden, or the name of the file `latest`"
        )
    if not final.name.isprintable():  # the file `latest` has one name per line, and terminals obey control characters
        raise ValueError(
            f"{final.name!r} cannot be a checkpoint's name: it has a control character, or one that is no text"
        )
    return final


@contextmanager
def discarding(stage: Stage | None) -> Iterator[None]:
    """Remove the stage if it did not become a checkpoint."""
    try:
        yield
    except BaseException:
        if stage is not None:
            stage.discard()
        raise


@contextmanager
def _driver(name: str, job: _Job, comm: Ranks) -> Iterator[Driver | None]:
    """The driver that writes this rank's file; None if the rank writes no block."""
    own = job.plan.own
    path = job.folder / own.name if own else job.folder
    if name == "posix":
        yield Posix(path, own, comm.rank) if own else None
        return
    from ckpt.saving.mpio import Mpio

    mpi = comm.mpi.Split(own.ranks[0] if own else comm.size, comm.rank)  # type: ignore[attr-defined]
    try:
        yield Mpio(path, own, comm.rank, mpi, collective=name == "mpio-collective") if own else None
    finally:
        mpi.Free()


def _carry_out(job: _Job, driver: Driver | None, ranks: Ranks) -> None:
    """Write the files, describe and commit them. Collective over `ranks`, which only take JSON-like messages."""
    own = job.plan.own
    with ranks.together(_DOING):
        file = driver.prepare() if driver else None
    if job.plan.shares:
        made = ranks.all_gather_object(file_entry(file) if file else None)
        if own is not None and made[own.ranks[0]] is not None:
            file = file_of(made[own.ranks[0]])
    sequence = 0
    with ranks.together(_DOING):
        sums = driver.write(job.mine, file) if driver else []
        with ThreadPoolExecutor(1) as beside:
            flushed = beside.submit(flush, job.folder / own.name) if own else None
            if job.stage is not None:  # while the disk is busy
                contents = Contents(job.tensors, job.plan.files, job.meta)
                write_index(job.folder, contents, job.scalars)
                sequence = next_sequence(job.final, job.copies)
            if flushed is not None:
                flushed.result()
        file = driver.finish() if driver else None
    reports = ranks.all_gather_object((file_entry(file) if file else None, sums))
    with ranks.together(_DOING):
        if job.stage is not None:
            write_manifest(job.folder, contents, reports, sequence=sequence, num_ranks=len(reports))
            job.stage.publish(overwrite=job.overwrite, before=job.check)
            if job.retention.keep is not None:
                job.check()
                retain(job.final, job.retention.keep, job.retention.keep_every)
                mend_latest(job.final.parent)  # a concurrent save may have removed the checkpoint that `latest` names
    leads = own is not None and own.ranks[0] == ranks.rank
    copied = own.name if own and leads else None
    make_copies(
        job.final, job.copies, copied, ranks, job.retention,
        overwrite=job.overwrite, private=job.private, check=job.check,
    )  # fmt: skip


def _plan(agreed: Agreed, files: Files, comm: Ranks) -> _WritePlan:
    tensors, boxes = agreed.tensors, agreed.boxes
    whole = {tensor.name: Box.full(tensor.shape) for tensor in tensors if tensor.whole and 0 not in tensor.shape}
    owner: dict[str, int] = {}
    if whole:
        itemsize = {tensor.name: DTYPES[tensor.dtype].itemsize for tensor in tensors}
        loads = [sum(box.size * itemsize[name] for name, own in theirs.items() for box in own) for theirs in boxes]
        owner = assign({name: box.size * itemsize[name] for name, box in whole.items()}, loads)

    def items(rank: int) -> list[Item]:
        """The items of a rank: its shards, and its share of the tensors that all ranks hold."""
        held = {**boxes[rank], **{name: [whole[name]] for name, its in owner.items() if its == rank}}
        return [Item(tensor.name, tensor.dtype, box) for tensor in tensors for box in held.get(tensor.name, ())]

    numbers = group_ranks(files, agreed.hosts)

    def made(number: int) -> DataFile | None:
        writers = {rank: items(rank) for rank in range(comm.size) if numbers[rank] == number}
        writers = {rank: written for rank, written in writers.items() if written}
        return lay_out(file_name(files, number), writers) if writers else None

    mine = numbers[comm.rank]
    laid_out = {number: made(number) for number in (dict.fromkeys(numbers) if comm.rank == 0 else (mine,))}
    own = laid_out[mine]
    return _WritePlan(
        own if own is not None and comm.rank in own.ranks else None,
        tuple(file for file in laid_out.values() if file is not None),
        len(set(numbers)) < comm.size,
    )

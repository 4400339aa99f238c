"""The whole command: checks arguments, disk and memory, measures in a temporary folder, prints, and writes the file."""

import argparse
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

from ckpt.bench.bench_report import tables
from ckpt.bench.beside import Background
from ckpt.bench.dcp import Dcp
from ckpt.bench.results import BACKGROUND, DCP, LARGE, POSIX, TINY, ActionRow, CheckpointLaunch, ours
from ckpt.bench.state import Cut, Memory, large, tiny, training
from ckpt.bench.stored import CkptFiles, PosixFiles, Stored
from ckpt.bench.testbed import Testbed
from ckpt.saving.placement import files_error
from collectives import Communicator
from collectives.bench.kit.running import measure_and_show
from collectives.bench.kit.turns import Contestant, make_each, slowest, spread, take_turns
from collectives.texts import show_bytes

PEERS: dict[str, tuple[str, Callable[[str, Testbed, list[Cut]], Stored]]] = {
    "posix": (POSIX, PosixFiles), "dcp": (DCP, Dcp),
}  # fmt: skip
_COPIES = 5
"""Copies of the state in memory: the state, the loaded values, the buffer of a background save, the copy measured beside it, and the
files in the page cache."""
_MARGIN_BYTES = 64 << 20  # on the disk, beside the state, for the metadata of a contestant's files


def main(args: argparse.Namespace, comm: Communicator) -> None:
    """Measure, and print on rank 0. Errors are raised on all ranks. Collective."""
    with comm.together("bench"):
        _check_arguments(args, comm)
    measure_and_show(comm, lambda: _measure(args, comm), tables, json=args.json)


def _measure(args: argparse.Namespace, comm: Communicator) -> CheckpointLaunch:
    with comm.together("bench"):
        _check_memory(args.size, comm)
        source = Memory(args.size, comm.rank, comm.size)
        target = Memory(args.size, comm.rank, comm.size)
        source.fill()
    cuts = training()
    with _folder(args.dir, args.size, comm) as folder, ExitStack() as ended:
        bed = Testbed(comm, folder, source, target, args.cold, ended)
        makers: dict[str, Callable[[], Contestant]] = {
            ours(files, driver): partial(CkptFiles, ours(files, driver), bed, cuts, files, driver)
            for driver in args.drivers
            for files in args.layouts
        }
        makers |= {name: partial(peer, name, bed, cuts) for word, (name, peer) in PEERS.items() if word in args.peers}
        makers[TINY] = partial(CkptFiles, TINY, bed, tiny())
        makers[LARGE] = partial(CkptFiles, LARGE, bed, large())
        makers[BACKGROUND] = partial(Background, BACKGROUND, bed, cuts)
        contestants, skipped = make_each(makers)
        series = slowest(comm, take_turns(contestants, rounds=args.rounds, warm_up=1))
    rows = [ActionRow(*key, *spread(seconds)) for key, seconds in series.items()]
    sizes = {"nbytes": source.nbytes, "tensors": len(cuts), "rounds": args.rounds, "cold": args.cold}
    return CheckpointLaunch.of(comm, **sizes, rows=rows, skipped=skipped)


def _check_arguments(args: argparse.Namespace, comm: Communicator) -> None:
    for files in args.layouts:
        if problem := files_error(files):
            raise ValueError(f"--layouts: {problem}")
        if isinstance(files, int) and files > comm.size:  # `save` would make fewer files
            raise ValueError(f"--layouts: {files} files; expected at most {comm.size}, one for each rank")
    if set(args.drivers) - {"posix"}:
        from ckpt.saving.mpio import mpio_error

        if problem := mpio_error(comm.mpi):
            raise ValueError(problem)


@contextmanager
def _folder(where: str | None, nbytes: int, comm: Communicator) -> Iterator[Path]:
    """A new folder with room for `nbytes`, the same on all ranks. It is removed at the end, also after an error. Collective."""
    made = None
    with comm.together("bench"):
        if comm.rank == 0:
            free = shutil.disk_usage(where or ".").free
            if free < nbytes + _MARGIN_BYTES:
                raise OSError(
                    f"{Path(where or '.').absolute()} has {show_bytes(free)} free; expected {show_bytes(nbytes + _MARGIN_BYTES)}: "
                    "pass a smaller --size, or another --dir"
                )
            made = Path(tempfile.mkdtemp(prefix="ckpt-bench-", dir=os.path.abspath(where or ".")))
            print(f"writing into {made}, which is removed at the end", flush=True)
    folder: Path = comm.broadcast_object(made)
    try:
        yield folder
    finally:
        # Not collective, because the block may end by an error of only this rank.
        if made is not None:
            shutil.rmtree(made, ignore_errors=True)


def _check_memory(nbytes: int, comm: Communicator) -> None:
    """MemoryError if the node of this rank has too little memory for its ranks."""
    needed, free = _COPIES * nbytes * comm.node.size // comm.size, _available_memory()
    if free is not None and free < needed:
        raise MemoryError(
            f"{show_bytes(free)} of memory are available; expected {show_bytes(needed)}, {_COPIES} times the state: "
            "pass a smaller --size"
        )


def _available_memory() -> int | None:
    """Bytes of available memory of this node, without swapping; None if unknown."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)

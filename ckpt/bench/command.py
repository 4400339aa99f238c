"""All of it in order: look whether it can be done, measure in a folder of its own, print, write the file."""

import argparse
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from ckpt.bench.beside import Background
from ckpt.bench.contestants import Ckpt, Posix
from ckpt.bench.dcp import Dcp, missing
from ckpt.bench.report import tables
from ckpt.bench.results import BACKGROUND, DCP, LARGE, POSIX, TINY, Launch, ours
from ckpt.bench.state import Memory, large, tiny, training
from ckpt.bench.timing import Contestant, measure
from ckpt.saving.placement import files_error
from collectives import Communicator
from collectives.bench.units import show_bytes
from collectives.commands.measuring import writable
from collectives.commands.terminal import console

_COPIES = 5
"""Of the state in memory: itself, what is loaded, the buffer of a save in the background and what is measured beside it, files in the
page cache."""
_MARGIN_BYTES = 64 << 20  # on the disk, beside the state: nobody's files are much larger than that


def main(args: argparse.Namespace, comm: Communicator) -> None:
    """Measure, and print on rank 0. An error of all ranks for what cannot be done. Collective."""
    with comm.together("bench"):
        _check_arguments(args, comm)
    writable(comm, args.json)
    with comm.together("bench"):
        _check_memory(args.size, comm)
        source = Memory(args.size, comm.rank, comm.size)
        target = Memory(args.size, comm.rank, comm.size)
        source.fill()
    with _folder(args.dir, args.size, comm) as folder:
        launch = _measure(args, comm, folder, source, target)
    with comm.together():
        if comm.rank == 0:
            if args.json:
                launch.write(args.json)
            console().print(*tables([launch]), sep="\n")


def report(files: Sequence[str]) -> None:
    """Print the tables of several launches. ValueError, OSError."""
    console().print(*tables([Launch.read(file) for file in files]), sep="\n")


def _measure(args: argparse.Namespace, comm: Communicator, folder: Path, source: Memory, target: Memory) -> Launch:
    cuts, both = training(), (source, target)
    contestants: list[Contestant] = [
        Ckpt(ours(files, driver), folder / f"{driver}-{files}", *both, cuts, comm, files=files, driver=driver)
        for driver in args.drivers
        for files in args.layouts
    ]
    skipped = {}
    with ExitStack() as ended:
        if "posix" in args.peers:
            contestants.append(Posix(POSIX, folder / "peer", *both, cuts, comm))
        if "dcp" in args.peers:
            reason = missing(comm)
            if reason is None:
                contestants.append(dcp := Dcp(DCP, folder / "dcp", *both, cuts, comm))
                ended.callback(dcp.close)
            else:
                skipped[DCP] = reason
        contestants += [
            Ckpt(TINY, folder / "tiny", *both, tiny(), comm),
            Ckpt(LARGE, folder / "large", *both, large(), comm),
            Background(BACKGROUND, folder / "background", source, cuts),
        ]
        rows = measure(contestants, comm, rounds=args.rounds, cold=args.cold)
    return Launch(
        machine=comm.machine(),
        ranks=comm.size,
        nodes=comm.num_nodes,
        nbytes=source.nbytes,
        tensors=len(cuts),
        rounds=args.rounds,
        cold=args.cold,
        rows=rows,
        skipped=skipped,
    )


def _check_arguments(args: argparse.Namespace, comm: Communicator) -> None:
    for files in args.layouts:
        if problem := files_error(files):
            raise ValueError(f"--layouts: {problem}")
        if isinstance(files, int) and files > comm.size:  # `save` would make fewer, under this name
            raise ValueError(f"--layouts: {files} files; expected at most {comm.size}, one for each rank")
    if set(args.drivers) - {"posix"}:
        from ckpt.saving.mpio import mpio_error

        if problem := mpio_error(comm.mpi):
            raise ValueError(problem)


@contextmanager
def _folder(where: str | None, nbytes: int, comm: Communicator) -> Iterator[Path]:
    """A new folder with room for `nbytes`, the same on all ranks, which is removed at the end, also by an error. Collective."""
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
        # Not collective: an error that only this rank has may be on its way.
        if made is not None:
            shutil.rmtree(made, ignore_errors=True)


def _check_memory(nbytes: int, comm: Communicator) -> None:
    """MemoryError if the node of this rank has too little for its ranks."""
    needed, free = _COPIES * nbytes * comm.node.size // comm.size, _available_memory()
    if free is not None and free < needed:
        raise MemoryError(
            f"{show_bytes(free)} of memory are available; expected {show_bytes(needed)}, {_COPIES} times the state: "
            "pass a smaller --size"
        )


def _available_memory() -> int | None:
    """Bytes that this node can give without swapping; None where it does not say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)

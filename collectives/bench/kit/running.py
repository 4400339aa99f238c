"""Runs a command that measures."""

from collections.abc import Callable, Iterable, Sequence

from rich.console import RenderableType

from collectives.bench.kit.launches import L
from collectives.communicator.communicator import Communicator
from collectives.shared.pictures import need_matplotlib
from collectives.shared.terminal import console


def measure_and_show(
    comm: Communicator,
    measure: Callable[[], L],
    tables: Callable[[Sequence[L]], Iterable[RenderableType]],
    *,
    json: str | None,
    plot: str | None = None,
    draw: Callable[[str, Sequence[L]], None] | None = None,
) -> None:
    """Measure on all ranks; then rank 0 writes the files and prints the tables. Collective.

    OSError or UsageError on all ranks, before the measurement, if a file cannot be written or a picture cannot be drawn.
    """
    with comm.together():
        if plot:
            need_matplotlib()
    writable(comm, json, plot)
    launch = measure()
    with comm.together():
        if comm.rank == 0:
            if json:
                launch.write(json)
            if plot and draw:
                draw(plot, [launch])
            console().print(*tables([launch]), sep="\n")


def writable(comm: Communicator, *files: str | None) -> None:
    """OSError on all ranks if rank 0 cannot write one of `files`. Collective."""
    with comm.together():
        if comm.rank == 0:
            for file in filter(None, files):
                open(file, "a").close()

"""Facts about the MPI library of this process, for reports of an installation."""

import ctypes
from typing import Any, NamedTuple

from collectives.processes import loaded_libraries, mpi_libraries

_LEVELS = ("MPI_THREAD_SINGLE", "MPI_THREAD_FUNNELED", "MPI_THREAD_SERIALIZED", "MPI_THREAD_MULTIPLE")


class MpiFacts(NamedTuple):
    """The MPI library, as it says itself."""

    version: str
    standard: str
    threads: str
    paths: tuple[str, ...]
    """The MPI libraries that are loaded in this process: one, or something is wrong."""
    has_ulfm: bool
    """Whether the library has the functions of ULFM (MPIX_Comm_revoke and others), which need not work in this job."""
    ucx_is_loaded: bool


def mpi_facts() -> MpiFacts:
    """The facts of this process. MPI must have been started."""
    from mpi4py import MPI

    from collectives.transports.mpi import library_version

    paths = mpi_libraries()
    return MpiFacts(
        version=library_version(),
        standard=".".join(map(str, MPI.Get_version())),
        threads=_LEVELS[sorted(_values(MPI)).index(MPI.Query_thread())],
        paths=paths,
        has_ulfm=any(_has(path, "MPIX_Comm_revoke") for path in paths),
        ucx_is_loaded=bool(loaded_libraries("libucp.so")),
    )


def _has(path: str, name: str) -> bool:
    try:
        return hasattr(ctypes.CDLL(path), name)
    except OSError:
        return False


def _values(mpi: Any) -> list[int]:
    return [mpi.THREAD_SINGLE, mpi.THREAD_FUNNELED, mpi.THREAD_SERIALIZED, mpi.THREAD_MULTIPLE]

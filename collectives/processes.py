"""What the kernel says about a process of this host, and does for this one."""

import ctypes
import math
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """Let the kernel kill this process when the thread that has started it ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


@contextmanager
def helpers_start() -> Iterator[None]:
    """A block in which a rank starts processes that shall not hear the signals that ask the ranks to stop.

    Slurm sends these to all processes of a job step, and without its helpers a rank could not save. A process inherits the blocked
    signals, and so do the threads that its imports start, which an own handler would not reach.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def end_by_parent_alone() -> None:
    """In a process that was started within `helpers_start`: SIGTERM ends it if its parent sends it, as multiprocessing does."""
    threading.Thread(target=_await_end, args=(os.getppid(),), name="end-by-parent", daemon=True).start()


def _await_end(parent: int) -> None:
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != parent:
        pass
    os._exit(128 + signal.SIGTERM)


def stat_fields(pid: int) -> list[str]:
    """The fields of /proc/PID/stat from the state on: state, parent, process group, session, ...; empty if there is no process.

    The name of the process, in parentheses, comes before them. It may have spaces.
    """
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def age_s(pid: int) -> float:
    """The seconds since a process has started; infinite if there is no such process."""
    if not (fields := stat_fields(pid)):
        return math.inf
    up_s = float(Path("/proc/uptime").read_text().split()[0])
    return up_s - int(fields[19]) / os.sysconf("SC_CLK_TCK")


def loaded_libraries(*names: str) -> list[str]:
    """The files of loaded libraries whose names begin with one of `names`, also of those that dlopen by name does not find."""
    try:
        with open("/proc/self/maps") as maps:
            paths = {line.split(maxsplit=5)[5].strip() for line in maps if len(line.split(maxsplit=5)) == 6}
    except OSError:  # not Linux, so there is no CUDA
        return []
    return sorted(path for path in paths if os.path.basename(path).startswith(names))


def mpi_libraries() -> tuple[str, ...]:
    """The files of the MPI libraries that are loaded in this process."""
    return tuple(path for path in loaded_libraries("libmpi") if _is_mpi(path))


def _is_mpi(path: str) -> bool:
    """Whether a library is libmpi.so, libmpich.so or one of Intel's or Cray's names of them, not its Fortran or C++ part."""
    stem = os.path.basename(path).partition(".so")[0]
    return stem in ("libmpi", "libmpich", "libmpi_cray", "libmpi_gnu", "libmpi_intel", "libmpi_nvidia", "libmpi_abi")

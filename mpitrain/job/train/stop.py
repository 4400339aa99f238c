"""SIGUSR1 means: save a checkpoint and stop. A run accepts it from its first moment; all ranks stop together between two steps.

SIGINT (Ctrl-C) and SIGTERM mean the same while a run trains, if the launcher gives its ranks the time: without mpirun, under
MPICH's mpirun, under srun (there SIGTERM from the first moment). Open MPI's mpirun ends its ranks a quarter of a second after
either signal. That is too short for a checkpoint, so one line says what is lost and what to do instead. Open MPI's mpirun forwards
SIGUSR1. This module does not import torch, so that a run listens before the import of torch, which takes seconds.
"""

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

_requested = False
_OF_MPIRUN = "OMPI_COMM_WORLD_RANK"
"""Open MPI's mpirun sets this variable for its ranks; srun does not."""


def listen(*, trains: bool = True) -> None:
    """From now on SIGUSR1 is a request to stop. An earlier request is a file at the path in MPITRAIN_STOP_FILE.

    SIGTERM is one too for a program that `trains` as a task of srun: by it Slurm announces scancel, preemption, a requeue and the limit
    of time, perhaps twice. Other programs, which nothing asks whether they should stop, end by it.

    Both may be blocked until now, so that one that comes earlier waits (mpirun/lib.sh).
    """
    signal.signal(signal.SIGUSR1, _request)
    if trains and _is_task_of_srun():
        signal.signal(signal.SIGTERM, _request)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1, signal.SIGTERM})
    file = os.environ.get("MPITRAIN_STOP_FILE")
    if file and Path(file).exists():
        _request(signal.SIGUSR1, None)


@contextlib.contextmanager
def interrupts_are_requests(*, rank: int) -> Iterator[None]:
    """SIGINT and SIGTERM are requests to stop inside this context. A second signal ends the process, as it does outside of the context.

    In a task of srun SIGTERM is always a request, because Slurm sends SIGKILL once the time is over. Under Open MPI's mpirun the first
    signal ends the process, and a line says what is lost.
    """
    if threading.current_thread() is not threading.main_thread():  # only the main thread may set handlers
        yield
        return
    before = {signum: signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM)}

    def restore() -> None:
        for signum, handler in before.items():
            signal.signal(signum, signal.SIG_DFL if handler is None else handler)

    ends_at_once = _OF_MPIRUN in os.environ

    def interrupted(signum: int, frame: FrameType | None) -> None:
        is_first, ends_next = not requested(), before[signal.Signals(signum)] is not _request
        if ends_next:
            restore()
        if rank == 0 and not ends_at_once and is_first:
            text = (
                "mpitrain: stopping after this step, with a checkpoint"
                + " (second signal: at once, without)" * ends_next
            )
            os.write(2, text.encode() + b"\n")
        _request(signum, frame)

    with _farewell(rank) if ends_at_once else contextlib.nullcontext():
        for signum in before:
            signal.signal(signum, interrupted)
        try:
            yield
        finally:
            restore()


LOST = (
    "mpitrain: mpirun ends this job at once ({name}), so no checkpoint was saved. The same command goes on from the last one. "
    "To save and stop, send SIGUSR1 to mpirun (it was: kill -USR1 {mpirun}), or start the job by mpirun/train and press Ctrl-C.\n"
)
LEFT = (
    "mpitrain: rank 0 ends at once ({name}), without a checkpoint. If mpirun ends the other ranks too, the same command goes on from "
    "the copies in node memory. To save and stop, send SIGUSR1 to mpirun (kill -USR1 {mpirun}).\n"
)


@contextlib.contextmanager
def _farewell(rank: int) -> Iterator[None]:
    """End this process at SIGINT or SIGTERM; rank 0 says what is lost.

    A thread does this, because the main thread may be in a kernel for longer than mpirun waits. The thread forwards the signals to the
    earlier listener, such as that of collectives for SIGUSR2.
    """
    # not with this module, which is loaded before anything heavy
    from collectives.diagnosis.ending import die, end_process
    from collectives.diagnosis.job import Job

    ends, wakes = os.pipe()
    os.set_blocking(wakes, False)
    earlier = signal.set_wakeup_fd(wakes, warn_on_full_buffer=False)

    def watch() -> None:
        while number := os.read(ends, 1):
            if number[0] in (signal.SIGINT, signal.SIGTERM):
                name = signal.Signals(number[0]).name
                if rank == 0:
                    text = LEFT if Job.survives else LOST
                    _tell_past_mpirun(text.format(name=name, mpirun=os.getppid()))
                if Job.survives:
                    die(f"has ended at {name}")  # perhaps only this rank got the signal, and the others go on
                end_process(128 + number[0])  # mpirun ends all ranks
            if earlier != -1:
                with contextlib.suppress(OSError):
                    os.write(earlier, number)
        os.close(ends)

    threading.Thread(target=watch, name="mpitrain-farewell", daemon=True).start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(earlier, warn_on_full_buffer=False)
        os.close(wakes)


def _tell_past_mpirun(line: str) -> None:
    """Write to the stderr of mpirun itself, this rank's parent, which no longer forwards the output of its ranks."""
    with contextlib.suppress(OSError):
        fd = os.open(f"/proc/{os.getppid()}/fd/2", os.O_WRONLY | os.O_APPEND | os.O_NOCTTY | os.O_NONBLOCK)
        os.write(fd, line.encode())


def _is_task_of_srun() -> bool:
    return _OF_MPIRUN not in os.environ and bool(os.environ.get("SLURM_STEP_NUM_TASKS"))


def requested() -> bool:
    """Whether this rank was asked to stop. Other ranks may not know of the request yet."""
    return _requested


def _request(signum: int, frame: FrameType | None) -> None:
    global _requested
    _requested = True

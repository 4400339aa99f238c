"""Watches NCCL's work on the device: an error, or a kernel that waits for a peer forever, ends the job.

A notice reports a kernel that waits for long first (diagnosis/hangs/notice.py).

NCCL's calls return at once, and the host then waits for a stream in the array library. The deadline for waits in MPI
(diagnosis/hangs/monitor.py) does not see that wait, and the waiting program starts no operation that would detect an error. So a thread
watches the operations, like PyTorch's watchdog.
"""

import threading
import time
import weakref
from collections.abc import Callable
from functools import partial

from collectives.diagnosis import dump
from collectives.diagnosis.ending import abort_job
from collectives.diagnosis.hangs import notice
from collectives.diagnosis.hangs.deadline import EXIT_CODE, Deadline
from collectives.transports.gpu.nccl_queue import Queue, Underway

_POLL_S = 0.5
_GRACE_S = 5.0  # for the program to raise the error by itself, with the place


class Watch:
    """Watches one communicator's operations by repeated calls of `look`. `end(why)` is called at most once.

    Each look calls `note(work)` with the work that has not ended on the device, or None.
    """

    def __init__(self, end: Callable[[str], None], note: Callable[[notice.DeviceWork | None], None]) -> None:
        self._end, self._note = end, note
        self._operation: Underway | None = None
        self._since = 0.0
        self._failed_since = 0.0  # 0: the last look found no error

    def look(self, queue: Queue, now: float, deadline_s: float) -> bool:
        """Look once. Returns whether to look again. `deadline_s`: 0 for no deadline."""
        if queue.is_over:
            self._note(None)
            return False
        try:
            operation = queue.look(self._operation)
        except Exception as error:
            self._failed_since = self._failed_since or now
            if now - self._failed_since < _GRACE_S:
                return True
            self._end(f"NCCL failed, and the program waits on: {error}")
            return False
        self._failed_since = 0.0
        if operation is not self._operation:
            self._operation, self._since = operation, now
        self._note(None if operation is None else notice.DeviceWork(f"NCCL's {operation.what}", self._since))
        if operation is None or not deadline_s or now - self._since <= deadline_s:
            return True
        self._end(
            f"NCCL's {operation.what} has not ended on the device {deadline_s:g} s after it was started: "
            "perhaps not all ranks have called this operation, or with another size, or in another order"
        )
        return False


def over(queue: Queue) -> None:
    """Start a thread that watches a communicator until its end, with the deadline of `collectives.set_deadline`."""
    number = id(queue)
    held, watch = weakref.ref(queue), Watch(_end_job, partial(notice.note_device, number))

    def run() -> None:
        while (queue := held()) is not None and watch.look(queue, time.monotonic(), Deadline.seconds or 0.0):
            del queue
            time.sleep(_POLL_S)
        notice.note_device(number, None)

    threading.Thread(target=run, name="collectives-nccl-watch", daemon=True).start()


def _end_job(why: str) -> None:
    dump.dump(why)
    abort_job(EXIT_CODE)

"""The signals that a supervisor gets, as requests that its loop reads."""

import os
import signal
from collections.abc import MutableMapping
from types import FrameType

ASKED_VARIABLE = "MPITRAIN_STOP_ASKED"
"""Set by mpirun/elastic if SIGUSR1 came before this process was there."""


class SignalRequests:
    """SIGUSR1, and the first SIGINT, SIGTERM or SIGHUP: save and stop. A second one of the latter: end now. SIGUSR2 is passed on.

    In a batch job SIGTERM never means to end now: the batch system repeats it, and its SIGKILL follows when the time is over.
    Made by the first statement of the program: until then a signal ends it, but SIGUSR1 waits if it is blocked, as by mpirun/elastic.
    It is not blocked from here on, nor in the processes that are started later. `in_batch_job`: None asks the environment.
    """

    def __init__(self, *, in_batch_job: bool | None = None, environ: MutableMapping[str, str] = os.environ) -> None:
        self.in_batch_job = bool(in_batch_job)
        self.stop = int(signal.SIGUSR1) if environ.pop(ASKED_VARIABLE, "") else 0
        """the first signal that asked to save and stop, or 0"""
        self.end = 0
        """the signal that asked to end now, or 0"""
        self._records = 0
        for signum in (signal.SIGUSR1, signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signum != signal.SIGHUP or signal.getsignal(signum) is not signal.SIG_IGN:  # nohup has it ignored
                signal.signal(signum, self._asked)
        signal.signal(signal.SIGUSR2, self._record)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})
        if in_batch_job is None:
            from mpitrain.job.elastic.supervisor.batch import is_unattended  # not before the signals are taken

            self.in_batch_job = is_unattended(environ)

    def take_records(self) -> int:
        """The number of SIGUSR2 since the last call."""
        taken, self._records = self._records, 0
        return taken

    def _asked(self, signum: int, frame: FrameType | None) -> None:
        if not self.stop:
            self.stop = signum
        elif signum != signal.SIGUSR1 and not (self.in_batch_job and signum == signal.SIGTERM):
            self.end = signum

    def _record(self, signum: int, frame: FrameType | None) -> None:
        self._records += 1

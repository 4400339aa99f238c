"""One launch of a job: its process, its signals and its end."""

import contextlib
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence

from mpitrain.job.elastic.supervisor.words import Kind

# The job of a supervisor that was killed saves and stops, as with SIGUSR1 by hand: a new supervisor can go on with it. The kernel sends
# the signal (PR_SET_PDEATHSIG, which outlives an exec). Not by `preexec_fn`, which is not safe beside threads.
_START = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, int(signal.SIGUSR1))
if os.getppid() == int(sys.argv[1]):
    os.execvp(sys.argv[2], sys.argv[2:])
"""


class RunningJob:
    """A running job. It leads a session of its own, so that the terminal's Ctrl-C reaches the supervisor alone."""

    def __init__(self, words: Sequence[str], env: Mapping[str, str]) -> None:
        command = [sys.executable, "-I", "-S", "-c", _START, str(os.getpid()), *words]
        self._process = subprocess.Popen(command, env=dict(env), stdin=subprocess.DEVNULL, start_new_session=True)
        self._end: int | None = None  # can be read once the launcher has ended
        with contextlib.suppress(OSError, AttributeError):  # an old kernel
            self._end = os.pidfd_open(self._process.pid)

    @property
    def code(self) -> int | None:
        """The exit code; None while the job runs."""
        return self._process.poll()

    def wait(self, timeout_s: float) -> None:
        """Return when the job ends, at once, or after the time. `Popen.wait` would look only 20 times a second."""
        if self._end is None:
            time.sleep(timeout_s)
        else:
            select.select([self._end], [], [], timeout_s)

    def signal(self, signum: int) -> None:
        """Send a signal to the launcher, which passes it on to the ranks if it is SIGUSR1 or SIGUSR2."""
        if self.code is None:
            self._process.send_signal(signum)

    def end(self, timeout_s: float) -> None:
        """End the launcher: by SIGTERM, so that it ends its ranks and removes its files, and by SIGKILL if that takes too long."""
        try:
            if self.code is None:
                self._terminate(timeout_s)
        finally:
            if self._end is not None:
                os.close(self._end)
                self._end = None

    def _terminate(self, timeout_s: float) -> None:
        self._process.terminate()
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


def launcher_kind(launcher: str, env: Mapping[str, str]) -> Kind:
    """Whose mpirun it is: openmpi, mpich or other; or srun, in a job of Slurm. ValueError if there is no such command."""
    if shutil.which(launcher) is None:
        raise ValueError(f"{launcher} is not found: expected a command such as mpirun -np 4 python -m mpitrain")
    if os.path.basename(launcher) == "srun" and env.get("SLURM_JOB_NODELIST"):
        return "srun"
    if not os.path.basename(launcher).startswith(("mpirun", "mpiexec", "prterun", "orterun")):
        return "other"
    try:
        answer = subprocess.run([launcher, "--version"], env=dict(env), capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.SubprocessError):
        return "other"
    text = answer.stdout + answer.stderr
    return "openmpi" if "Open MPI" in text or "PRRTE" in text else "mpich" if "HYDRA" in text else "other"

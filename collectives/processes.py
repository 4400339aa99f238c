"""What the kernel says about a process of this host, and does for this one."""

import ctypes
import signal
from pathlib import Path

_PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """Let the kernel kill this process when the thread that has started it ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def stat_fields(pid: int) -> list[str]:
    """The fields of /proc/PID/stat from the state on: state, parent, process group, session, ...; empty if there is no process.

    The name of the process, in parentheses, comes before them. It may have spaces.
    """
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []

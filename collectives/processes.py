"""What the kernel says about a process of this host, and does for this one."""

import ctypes
import math
import os
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


def age_s(pid: int) -> float:
    """The seconds since a process has started; infinite if there is no such process."""
    if not (fields := stat_fields(pid)):
        return math.inf
    up_s = float(Path("/proc/uptime").read_text().split()[0])
    return up_s - int(fields[19]) / os.sysconf("SC_CLK_TCK")

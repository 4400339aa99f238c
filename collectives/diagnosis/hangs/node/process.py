"""What /proc says about another process of this node: whether it is the same process as before, its state, and how it has ended."""

import os
import signal
from contextlib import suppress
from pathlib import Path

from collectives.processes import stat_fields

# Fields of /proc/PID/stat, counted from the one after the name, which is the state.
_STATE, _START, _EXIT = 0, 19, 49


def start_time(pid: int) -> int:
    """When the process has started, in ticks since the boot; 0 if there is none. A later process with the same id has another time."""
    fields = stat_fields(pid)
    return int(fields[_START]) if fields and fields[_STATE] not in "ZX" else 0


def pid_space() -> int:
    """A number for the space of process ids of this process: ids of another space, as of another container, mean nothing here."""
    with suppress(OSError):
        return os.stat("/proc/self/ns/pid").st_ino
    return 0


def state(pid: int) -> str:
    """The state of the process's main thread as in /proc/PID/status, such as "T (stopped)"; "" if there is no process."""
    return _status(pid).get("State", "")


def where(pid: int) -> str:
    """The function of the kernel in which the main thread waits; "" if it runs, or if the kernel does not say."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/wchan").read_text().strip().removeprefix("0")
    return ""


def catches(pid: int, signum: int) -> bool:
    """Whether the process has a handler of the signal, which would else end it."""
    return bool(int(_status(pid).get("SigCgt", "0"), 16) >> (signum - 1) & 1)


def free_signal() -> int:
    """A real-time signal that this process neither handles nor ignores; 0 if there is none."""
    status = _status(os.getpid())
    used = int(status.get("SigCgt", "0"), 16) | int(status.get("SigIgn", "0"), 16) | int(status.get("SigBlk", "0"), 16)
    return next((each for each in range(signal.SIGRTMIN + 8, signal.SIGRTMAX) if not used >> (each - 1) & 1), 0)


def _status(pid: int) -> dict[str, str]:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return {}
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def how_ended(pid: int) -> str:
    """How a process has ended: "was killed by signal 9 (SIGKILL)". "" where it is not known: its parent has seen to it already."""
    fields = stat_fields(pid)
    if len(fields) <= _EXIT:
        return ""
    code = int(fields[_EXIT])
    if number := code & 0x7F:
        with suppress(ValueError):
            return f"was killed by signal {number} ({signal.Signals(number).name})"
        return f"was killed by signal {number}"
    return f"ended with exit code {code >> 8}" if fields[_STATE] in "ZX" or code else ""

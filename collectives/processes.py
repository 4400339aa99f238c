"""What the kernel says about a process of this host."""

from pathlib import Path


def stat_fields(pid: int) -> list[str]:
    """The fields of /proc/PID/stat from the state on: state, parent, process group, session, ...; empty if there is no process.

    The name of the process, in parentheses, comes before them. It may have spaces.
    """
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []

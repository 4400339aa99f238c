"""Kills of the kernel's OOM killer in this process's cgroup since the job began, for each report of a failure.

A process that was killed says nothing itself. It may be another rank, or a process that a rank needs, such as a worker of a DataLoader:
then an error of any kind follows.
"""

from collectives.cgroup import NAMED, Kills, groups_of


class _Own:
    kills: Kills | None = None


def begin() -> None:
    """Count from now on."""
    _Own.kills = Kills(groups_of())


def note(report: str = "") -> str:
    """A sentence for a report that names no kill, with the limit and a remedy; "" without a kill since `begin`."""
    return "" if _Own.kills is None or NAMED in report else _Own.kills.words()

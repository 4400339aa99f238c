"""Names kills of the kernel's OOM killer in a launch. The supervisor can do so when no rank was left to write a report."""

import socket

from mpitrain.files import load_alone
from mpitrain.job.record.files.marks import Alive

for name in ("secret_tokens", "secret_forms", "addresses", "texts", "cgroup"):  # each imports those before it
    load_alone(name)
from collectives.cgroup import NAMED as NAMED  # noqa: E402
from collectives.cgroup import Kills, groups_of, with_outer  # noqa: E402


class LaunchKills:
    """Counts the kills since it was made, in the cgroup of this process, and in that of the ranks here once one of them is known."""

    def __init__(self) -> None:
        self._groups = groups_of()
        self._kills = [Kills(self._groups)]
        self._knows_ranks = False

    def see(self, alive: Alive | None) -> None:
        """Note the cgroup of rank 0, if it is on this host. The group around it and this process has those of the other ranks here."""
        if self._knows_ranks or alive is None or alive.host != socket.gethostname():
            return
        self._knows_ranks = True
        theirs = groups_of(alive.pid)
        shared = next((each for each in theirs if each in self._groups), None)
        for folder in theirs[:1] + ((shared,) if shared else ()):
            if folder not in self._groups[:1]:
                self._kills.append(Kills(with_outer(folder)))

    def words(self) -> str:
        """A sentence with the kills, the limit and a remedy; "" without a kill."""
        return next((words for each in self._kills if (words := each.words())), "")

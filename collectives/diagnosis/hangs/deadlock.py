"""Checked mode: which ranks wait for each other in different communicators, and can never go on. Uses no MPI and no threads."""

from collections.abc import Mapping

from collectives.diagnosis.hangs.answer import State, Waiting
from collectives.diagnosis.record import shown_ranks


def deadlocked(states: Mapping[int, State]) -> dict[int, Waiting]:
    """The ranks that can never go on, each with the operation in which it is stuck. Only ranks that compare their calls count.

    Rank r waits for rank m if m takes part in r's operation, has not entered it, and the thread of m that last used r's communicator
    is stuck in another operation. A rank needs all ranks for which it waits, so it is stuck forever exactly if its waits lead to a
    cycle.
    """
    stuck: dict[int, Waiting] = {}
    for rank, state in states.items():
        comparing = [each for each in state["waiting"] if each["comparing"]]
        if len(comparing) == 1:  # a rank with several threads in checked collectives is left out
            stuck[rank] = comparing[0]

    def waits_for(rank: int, other: int) -> bool:
        mine, theirs = stuck[rank], stuck[other]
        state = states[other]
        server = state["serving"].get(mine["key"], state["main"])
        to_come = state["counts"].get(mine["key"], 0) < mine["sequence"]
        return other in mine["awaited"] and to_come and server == theirs["thread"]

    while True:
        remaining = {
            rank: each
            for rank, each in stuck.items()
            if any(waits_for(rank, other) for other in stuck if other != rank)
        }
        if len(remaining) == len(stuck):
            return remaining
        stuck = remaining


def deadlock_report(stuck: Mapping[int, Waiting]) -> str:
    """The text of the error on ranks that wait for each other in different communicators."""
    groups: dict[str, list[int]] = {}
    for rank, each in sorted(stuck.items()):
        groups.setdefault(f"{each['label']}: {each['call']}  at {each['site']}", []).append(rank)
    lines = [f"  {shown_ranks(ranks)}: {words}" for words, ranks in groups.items()]
    return (
        "the ranks wait for each other in different communicators; expected that all ranks use these communicators in the same order:\n"
        + "\n".join(lines)
    )

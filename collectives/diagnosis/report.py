"""What the ranks' answers mean: who waits for whom, who is missing, and who can never go on. Pure: no MPI, no threads.

A `State` is what one rank says of itself (a JSON object); None stands for a rank that did not answer.
"""

from collections.abc import Mapping, Sequence
from typing import TypedDict

from collectives.diagnosis.record import shown_ranks


class Waiting(TypedDict):
    """An operation that a thread of a rank is in."""

    number: int  # on that rank
    key: str  # of the communicator
    label: str  # of the communicator, for readers
    awaited: list[int]  # the ranks of the job that take part
    sequence: int  # its number on that communicator; 0 between two ranks
    call: str  # with its number on that communicator; the same on ranks that make the same call
    algorithm: str
    age: float  # seconds
    site: str
    thread: int
    comparing: bool  # still waits for the others' fingerprints


class State(TypedDict):
    """What a rank says of itself."""

    waiting: list[Waiting]  # oldest first
    standing: str  # where its main thread is
    left: bool  # its program has ended
    last: dict[str, str]  # its last operation on each communicator that the record knows
    serving: dict[str, int]  # the thread that entered it
    entered: dict[str, int]  # the number of that operation
    main: int  # the main thread


def deadline_report(reporter: int, late: Waiting, states: Sequence[State | None], deadline_s: float) -> str:
    """Why rank `reporter`, whose operation `late` passed the deadline, still waits."""
    lines = [
        f"rank {reporter} has waited {late['age']:.1f} s in {late['label']}: {late['call']}; the deadline is {deadline_s:g} s "
        "(MPITRAIN_DEADLINE_S). The job ends."
    ]
    groups: dict[str, list[int]] = {}
    for rank, state in enumerate(states):
        groups.setdefault(_described(state, late["key"]), []).append(rank)
    for words, ranks in groups.items():
        ages = [
            max(each["age"] for each in state["waiting"])
            for rank in ranks
            if (state := states[rank]) and state["waiting"]
        ]
        since = f", for {max(ages):.1f} s" if ages else ""
        lines.append(f"  {shown_ranks(ranks)}: {words}{since}")
    lines.append(f"  => {_verdict(late, states)}")
    return "\n".join(lines)


def _described(state: State | None, key: str) -> str:
    """A rank in words, equal for ranks in the same place. `key`: the communicator in question."""
    if state is None:
        return "no answer: dead, stopped, or stuck outside Python"
    if state["waiting"]:
        return "; ".join(
            f"in {each['label']}: {each['call']}"
            + (f" by {each['algorithm']}" if each["algorithm"] else "")
            + (" (comparing calls)" if each["comparing"] else "")
            + (f", at {each['site']}" if each["site"] else "")
            for each in state["waiting"]
        )
    last = f"; its last one there: {state['last'][key]}" if key in state["last"] else ""
    where = "its program has ended" if state["left"] else f"main thread at {state['standing']}"
    return f"in no operation, {where}{last}"


def _verdict(late: Waiting, states: Sequence[State | None]) -> str:
    """Whom `late` waits for, in one line."""
    reasons: dict[str, list[int]] = {}
    for rank in late["awaited"]:
        state = states[rank]
        if state is None:
            reasons.setdefault("do not answer", []).append(rank)
        elif not state["waiting"]:
            reasons.setdefault("have ended" if state["left"] else "are in no operation", []).append(rank)
        else:
            there = [each for each in state["waiting"] if each["key"] == late["key"]]
            if not there:
                reasons.setdefault("are in an operation of another communicator", []).append(rank)
            elif all(each["call"] != late["call"] or each["algorithm"] != late["algorithm"] for each in there):
                reasons.setdefault("are in a different operation of the same communicator", []).append(rank)
    if not reasons:
        return "nobody is missing: all its ranks are in this operation, which is slow or stuck in the MPI library"
    return "missing: " + "; ".join(
        f"{shown_ranks(ranks)} ({reason if len(ranks) > 1 else _SINGULAR.get(reason, reason)})"
        for reason, ranks in reasons.items()
    )


_SINGULAR = {
    "do not answer": "does not answer",
    "have ended": "has ended",
    "are in no operation": "is in no operation",
    "are in an operation of another communicator": "is in an operation of another communicator",
    "are in a different operation of the same communicator": "is in a different operation of the same communicator",
}


def deadlocked(states: Mapping[int, State]) -> dict[int, Waiting]:
    """The ranks that can never go on, each with the operation it is stuck in, judged by those that compare their calls.

    Rank r waits for rank m if m takes part in r's operation, has not entered it, and the thread of m that serves that communicator
    is itself stuck in another one. A rank needs all it waits for, so it is stuck for ever just where it leads into a circle of such
    waits.
    """
    stuck: dict[int, Waiting] = {}
    for rank, state in states.items():
        comparing = [each for each in state["waiting"] if each["comparing"]]
        if len(comparing) == 1:  # with several threads in checked collectives: not judged
            stuck[rank] = comparing[0]

    def waits_for(rank: int, other: int) -> bool:
        mine, theirs = stuck[rank], stuck[other]
        state = states[other]
        server = state["serving"].get(mine["key"], state["main"])
        to_come = state["entered"].get(mine["key"], 0) < mine["sequence"]
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
    """The error of ranks that wait for each other in different communicators."""
    groups: dict[str, list[int]] = {}
    for rank, each in sorted(stuck.items()):
        groups.setdefault(f"{each['label']}: {each['call']}  at {each['site']}", []).append(rank)
    lines = [f"  {shown_ranks(ranks)}: {words}" for words, ranks in groups.items()]
    return "the ranks wait for each other in different communicators, in different orders:\n" + "\n".join(lines)

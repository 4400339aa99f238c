"""What the ranks' answers mean: who waits for whom, who is missing, and who can never go on. Pure: no MPI, no threads.

A `State` is what one rank says of itself (a JSON object); None stands for a rank that did not answer.
"""

import os
from collections.abc import Mapping, Sequence

from collectives.diagnosis.answer import State, Waiting
from collectives.diagnosis.record import shown_ranks


def deadline_report(reporter: int, late: Waiting, states: Sequence[State | None], deadline_s: float) -> str:
    """Why rank `reporter`, whose operation `late` passed the deadline, still waits."""
    lines = [
        f"rank {reporter} has waited {late['age']:.1f} s in {late['label']}: {late['call']}; the deadline is {deadline_s:g} s "
        "(MPITRAIN_DEADLINE_S). The job ends."
    ]
    return "\n".join([*lines, *_places(states, late["key"]), f"  => {_verdict(late, states)}"])


def _places(states: Sequence[State | None], key: str) -> list[str]:
    """Where the ranks are, those in the same place in one line. `key`: the communicator in question."""
    lines, groups = [], dict[str, list[int]]()
    for rank, state in enumerate(states):
        groups.setdefault(_described(state, key), []).append(rank)
    for words, ranks in groups.items():
        ages = [
            max(each["age"] for each in state["waiting"])
            for rank in ranks
            if (state := states[rank]) and state["waiting"]
        ]
        since = f", for {max(ages):.1f} s" if ages else ""
        lines.append(f"  {shown_ranks(ranks)}: {words}{since}")
    return lines


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
    where = f"its program has ended: {state['ended']}" if state["ended"] else f"main thread at {state['standing']}"
    return f"in no operation, {where}{last}"


def _verdict(late: Waiting, states: Sequence[State | None]) -> str:
    """Whom `late` waits for, and what may help."""
    reasons: dict[str, list[int]] = {}
    for rank in late["awaited"]:
        state = states[rank]
        if state is None:
            reasons.setdefault("do not answer", []).append(rank)
        elif not state["waiting"]:
            reasons.setdefault("have ended" if state["ended"] else "are in no operation", []).append(rank)
        else:
            there = [each for each in state["waiting"] if each["key"] == late["key"]]
            if not there:
                reasons.setdefault(_ELSEWHERE, []).append(rank)
            elif all(each["call"] != late["call"] or each["algorithm"] != late["algorithm"] for each in there):
                reasons.setdefault(_OTHERWISE, []).append(rank)
    if not reasons:
        return (
            "nobody is missing: all its ranks are in this operation, which is stuck in the MPI library, or slow: then set a later "
            "deadline"
        )
    missing = "missing: " + "; ".join(
        f"{shown_ranks(ranks)} ({reason if len(ranks) > 1 else _SINGULAR.get(reason, reason)})"
        for reason, ranks in reasons.items()
    )
    apart = _ELSEWHERE in reasons or _OTHERWISE in reasons
    if not apart or os.environ.get("MPITRAIN_DEBUG", "0") not in ("", "0"):
        return missing
    return f"{missing}\n  => MPITRAIN_DEBUG=1 finds the call at which the ranks part"


_ELSEWHERE = "are in an operation of another communicator"
_OTHERWISE = "are in a different operation of the same communicator"
_SINGULAR = {
    "do not answer": "does not answer",
    "have ended": "has ended",
    "are in no operation": "is in no operation",
    _ELSEWHERE: "is in an operation of another communicator",
    _OTHERWISE: "is in a different operation of the same communicator",
}


def abandoned(states: Sequence[State | None]) -> dict[int, Waiting]:
    """The ranks that wait for one whose program has ended before it came to the operation, each with that operation.

    What the others have long done their part of may last: a reduction to one rank, a message on its way.
    """
    stuck: dict[int, Waiting] = {}
    for rank, state in enumerate(states):
        if state is not None and not state["ended"]:
            for each in state["waiting"]:
                if not each["dispensable"] and _gone(each, states):
                    stuck.setdefault(rank, each)
    return stuck


def _gone(waiting: Waiting, states: Sequence[State | None]) -> list[int]:
    """The ranks that have ended before they came to an operation."""
    return [
        rank
        for rank in waiting["awaited"]
        if (state := states[rank])
        and state["ended"]
        # Where it has freed the communicator it cannot tell.
        and waiting["key"] in state["counts"]
        and state["counts"].get(waiting["counter"], 0) < waiting["sequence"]
    ]


def end_report(stuck: Mapping[int, Waiting], states: Sequence[State | None]) -> str:
    """Ranks `stuck`, as `abandoned` found them, wait for ranks that have ended. About the operation of the lowest of them."""
    first = stuck[min(stuck)]
    gone = _gone(first, states)
    waiting = [rank for rank, each in stuck.items() if each["key"] == first["key"]]
    lines = [
        f"{shown_ranks(gone)} {'has' if len(gone) == 1 else 'have'} ended, and {shown_ranks(waiting)} "
        f"wait{'s' * (len(waiting) == 1)} for {'it' if len(gone) == 1 else 'them'} in {first['label']}: {first['call']}. "
        "The job ends."
    ]
    advice = "a rank must end after the last operation that others make with it"
    return "\n".join([*lines, *_places(states, first["key"]), f"  => {_verdict(first, states)}", f"  => {advice}"])


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
    """The error of ranks that wait for each other in different communicators."""
    groups: dict[str, list[int]] = {}
    for rank, each in sorted(stuck.items()):
        groups.setdefault(f"{each['label']}: {each['call']}  at {each['site']}", []).append(rank)
    lines = [f"  {shown_ranks(ranks)}: {words}" for words, ranks in groups.items()]
    return (
        "the ranks wait for each other in different communicators; expected that all use these in the same order:\n"
        + "\n".join(lines)
    )

"""Makes reports of the ranks' answers: which ranks wait, and for which ranks. Uses no MPI and no threads.

monitor.py asks the ranks; conclusions.py prints the report and ends the job. long_wait.py makes the notices.

A `State` is the answer of one rank (a JSON object); None stands for a rank that has not answered. `looks`: what is known about such
ranks (look.py), by rank. The roster gives the hosts and processes of the ranks.
"""

import os
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from collectives.diagnosis.hangs.answer import State, Waiting
from collectives.diagnosis.record import shown_ranks
from collectives.diagnosis.ring.roster import NOBODY, Roster


def deadline_report(
    reporter: int,
    late: Waiting,
    states: Sequence[State | None],
    deadline_s: float,
    roster: Roster = NOBODY,
    looks: Mapping[int, str] = MappingProxyType({}),
    ends: str = "The job ends.",
) -> str:
    """The report about rank `reporter`, whose operation `late` has passed the deadline. `ends`: a sentence about what ends now."""
    lines = [
        f"{roster.name(reporter)} has waited {late['age']:.1f} s in {late['label']}: {late['call']}; the deadline is {deadline_s:g} s "
        f"(MPITRAIN_DEADLINE_S). {ends}"
    ]
    verdict = _verdict(_seen_by_most(reporter, late, states), states, roster)
    return "\n".join([*lines, *_places(states, late["key"], roster, looks), f"  => {verdict}"])


def _seen_by_most(reporter: int, late: Waiting, states: Sequence[State | None]) -> Waiting:
    """The operation whose missing ranks are named: `late`, or that of most ranks if the reporter is one of the few in another one."""
    few = ranks_to_end(late, states)
    if reporter in few and 2 * len(few) < len(late["awaited"]):
        for rank in late["awaited"]:
            state = states[rank]
            for each in state["waiting"] if state is not None and rank not in few else ():
                if reporter in _to_come(each, states):
                    return each
    return late


def missing_ranks(late: Waiting, states: Sequence[State | None]) -> list[int]:
    """The ranks for which `late` waits: all that take part in it and are not in it."""
    return [rank for rank in late["awaited"] if not is_in(late, states[rank])]


def ranks_to_end(late: Waiting, states: Sequence[State | None]) -> list[int]:
    """The ranks without which the others can go on, when `late` has passed the deadline; empty if no rank is missing.

    They are at the end of the waits: they wait for no rank themselves. If the waits lead to a cycle, as after a skipped collective,
    they are the fewest ranks in one operation. Of equally many they are those that are ahead, then those with higher numbers.
    """
    missing = _to_come(late, states)
    found, seen, ahead = set(), set(), list(missing)
    while ahead:
        rank = ahead.pop()
        if rank in seen:
            continue
        seen.add(rank)
        state = states[rank]
        awaited = [] if state is None else [other for each in state["waiting"] for other in _to_come(each, states)]
        ahead += awaited
        if not awaited:
            found.add(rank)
    if found or not missing:
        return sorted(found)
    places: dict[tuple[int, str, str, str], list[int]] = {}
    for rank in sorted(seen):
        for each in states[rank]["waiting"] if states[rank] else []:  # type: ignore[index]
            # A rank that has skipped a collective is in one with the same number, but another call.
            place = each["sequence"], each["key"], each["call"], each["algorithm"]
            places.setdefault(place, []).append(rank)
    return min(places.items(), key=lambda each: (len(each[1]), -each[0][0], -each[1][0]))[1]


def _to_come(waiting: Waiting, states: Sequence[State | None]) -> list[int]:
    """The ranks for which `waiting` waits. A rank that has done its part, such as the root of a broadcast, is not to blame."""
    return absent(waiting, states) or missing_ranks(waiting, states)


def _places(
    states: Sequence[State | None], key: str, roster: Roster, looks: Mapping[int, str] = MappingProxyType({})
) -> list[str]:
    """The places of the ranks, with one line for ranks in the same place. `key`: the communicator of the report."""
    return [f"  {place(words, ranks, states, roster)}" for words, ranks in groups(states, key, looks).items()]


def groups(
    states: Sequence[State | None], key: str, looks: Mapping[int, str] = MappingProxyType({})
) -> dict[str, list[int]]:
    """The ranks by the description of their places."""
    found: dict[str, list[int]] = {}
    for rank, state in enumerate(states):
        look = f"; {looks[rank]}" if state is None and looks.get(rank) else ""
        found.setdefault(described(state, key) + look, []).append(rank)
    return found


def place(
    words: str, ranks: Sequence[int], states: Sequence[State | None] | Mapping[int, State], roster: Roster = NOBODY
) -> str:
    """A description of ranks in the same place, and of the time that they have been there."""
    there = [state for rank in ranks if (state := states[rank])]
    ages = [max(each["age"] for each in state["waiting"]) for state in there if state["waiting"]]
    ages = ages or [state["device_age"] for state in there if state["device"]]
    since = f", for {max(ages):.1f} s" if ages else ""
    return f"{roster.names(ranks)}: {words}{since}"


def described(state: State | None, key: str) -> str:
    """A description of a rank's state, equal for ranks in the same place. `key`: the communicator of the report."""
    if state is None:
        return "no answer yet"
    device = f"; on its device {state['device']}, which has not ended" if state["device"] else ""
    if state["waiting"]:
        return (
            "; ".join(
                f"in {each['label']}: {each['call']}"
                + (f" by {each['algorithm']}" if each["algorithm"] else "")
                + (" (comparing calls)" if each["comparing"] else "")
                + (f", in {each['doing']}" if each["doing"] else "")
                + (f", at {each['site']}" if each["site"] else "")
                for each in state["waiting"]
            )
            + device
        )
    last = f"; its last operation there: {state['last'][key]}" if key in state["last"] else ""
    where = f"its program has ended: {state['ended']}" if state["ended"] else f"main thread at {state['standing']}"
    doing = f"in {state['doing']}, " if state["doing"] else ""
    return f"in no operation, {doing}{where}{last}{device}"


def _verdict(late: Waiting, states: Sequence[State | None], roster: Roster) -> str:
    """The ranks for which `late` waits, and advice."""
    if not late["sequence"]:  # not an operation: see `deadline.Standstill`
        return (
            "JAX has computed nothing meanwhile: perhaps a callback of the program waits for an event that never comes, or for work "
            "of JAX's own threads (a rank that is bound to one core has one of these threads)"
        )
    reasons: dict[tuple[str, str], list[int]] = {}
    for rank in late["awaited"]:
        state = states[rank]
        if state is None:
            reasons.setdefault(_SILENT, []).append(rank)
        elif not state["waiting"]:
            reasons.setdefault(_ENDED if state["ended"] else _IDLE, []).append(rank)
        elif not any(each["key"] == late["key"] for each in state["waiting"]):
            reasons.setdefault(_ELSEWHERE, []).append(rank)
        elif not is_in(late, state):
            reasons.setdefault(_OTHERWISE, []).append(rank)
    if not reasons:
        return (
            "no rank is missing: all ranks are in this operation, which is stuck in the MPI library, or slow. If the operation is "
            "slow, set a later deadline"
        )
    missing = "missing: " + "; ".join(
        f"{roster.names(ranks)} ({one if len(ranks) == 1 else several})" for (one, several), ranks in reasons.items()
    )
    return "\n  => ".join([missing, *hints(_ELSEWHERE in reasons or _OTHERWISE in reasons)])


def _is_same(one: Waiting, other: Waiting) -> bool:
    """Whether two ranks are in the same operation of the same communicator."""
    return (one["key"], one["call"], one["algorithm"]) == (other["key"], other["call"], other["algorithm"])


def is_in(waiting: Waiting, state: State | None) -> bool:
    """Whether a rank is in the operation `waiting` of another rank."""
    return state is not None and any(_is_same(each, waiting) for each in state["waiting"])


def absent(waiting: Waiting, states: Sequence[State | None]) -> list[int]:
    """The ranks for which `waiting` waits, without those that have finished their part of it."""
    key, sequence = waiting["key"], waiting["sequence"]
    found: list[int] = []
    for rank in waiting["awaited"]:
        state = states[rank]
        if is_in(waiting, state):
            continue
        if state is not None:
            there = [each for each in state["waiting"] if each["key"] == key]
            unfinished = [*(each["sequence"] for each in there), *state["issued"].get(key, ())]
            if state["counts"].get(waiting["counter"], 0) >= sequence and sequence not in unfinished:
                continue
        found.append(rank)
    return found


def hints(apart: bool) -> list[str]:
    """Advice on how to find the reason of missing ranks. `apart`: whether some of them are in another operation."""
    if not apart or os.environ.get("MPITRAIN_DEBUG", "0") not in ("", "0"):
        return []
    return ["MPITRAIN_DEBUG=1 finds the first call that differs between the ranks"]


# Reasons of missing ranks, for one rank and for several.
_SILENT = "gives no answer yet", "give no answer yet"
_ENDED = "has ended", "have ended"
_IDLE, _ELSEWHERE, _OTHERWISE = (
    (f"is in {place}", f"are in {place}")
    for place in (
        "no operation",
        "an operation of another communicator",
        "a different operation of the same communicator",
    )
)


def abandoned(states: Sequence[State | None]) -> dict[int, Waiting]:
    """The ranks that wait for a rank whose program has ended before it entered the operation, each with that operation.

    An operation for which the ended rank has done its part may still go on: a reduction to one rank, or a message.
    """
    stuck: dict[int, Waiting] = {}
    for rank, state in enumerate(states):
        if state is not None and not state["ended"]:
            for each in state["waiting"]:
                if not each["dispensable"] and _gone(each, states):
                    stuck.setdefault(rank, each)
    return stuck


def _gone(waiting: Waiting, states: Sequence[State | None]) -> list[int]:
    """The ranks that have ended before they entered the operation."""
    return [
        rank
        for rank in waiting["awaited"]
        if (state := states[rank])
        and state["ended"]
        # A rank that has freed the communicator has no counts for it.
        and waiting["key"] in state["counts"]
        and state["counts"].get(waiting["counter"], 0) < waiting["sequence"]
    ]


def gone(stuck: Mapping[int, Waiting], states: Sequence[State | None]) -> list[int]:
    """The ended ranks for which the ranks in `stuck`, a result of `abandoned`, wait."""
    return sorted({rank for waiting in stuck.values() for rank in _gone(waiting, states)})


def end_report(
    stuck: Mapping[int, Waiting], states: Sequence[State | None], roster: Roster = NOBODY, ends: str = "The job ends."
) -> str:
    """The report about the operation of the lowest rank in `stuck`, a result of `abandoned`: ranks that wait for ended ranks."""
    first = stuck[min(stuck)]
    ended = _gone(first, states)
    waiting = [rank for rank, each in stuck.items() if each["key"] == first["key"]]
    lines = [
        f"{roster.names(ended)} {'has' if len(ended) == 1 else 'have'} ended, and {shown_ranks(waiting)} "
        f"wait{'s' * (len(waiting) == 1)} for {'it' if len(ended) == 1 else 'them'} in {first['label']}: {first['call']}. "
        f"{ends}"
    ]
    advice = "a rank must not end before the last operation in which it takes part"
    verdict = _verdict(first, states, roster)
    return "\n".join([*lines, *_places(states, first["key"], roster), f"  => {verdict}", f"  => {advice}"])


def error_report(reporter: int, states: Sequence[State | None], roster: Roster = NOBODY) -> str:
    """The places of the other ranks, when an error ends the job on rank `reporter`."""
    lines = [f"the other ranks when {roster.name(reporter)} failed:"]
    for words, ranks in groups(states, "").items():
        if others := [rank for rank in ranks if rank != reporter]:
            lines.append(f"  {place(words, others, states, roster)}")
    return "\n".join(lines)

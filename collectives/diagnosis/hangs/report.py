"""Makes reports of the ranks' answers: which ranks wait, and for which ranks. Uses no MPI and no threads.

monitor.py asks the ranks, prints the report and ends the job.

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
    return [rank for rank in late["awaited"] if not _is_in(late, states[rank])]


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
    return _absent(waiting, states) or missing_ranks(waiting, states)


def notice(
    reporter: int, number: int, states: Sequence[State | None], deadline_s: float, roster: Roster = NOBODY
) -> str:
    """One line about a wait of rank `reporter`: in its operation `number`, or for its device if there is no such operation.

    The places of that rank and of the ranks for which it waits come first.
    """
    mine = states[reporter]
    assert mine is not None
    late = _operation(mine, number)
    missing = set() if late is None else {*_absent(late, states)}
    gone = set() if late is None else {rank for rank in late["awaited"] if not _is_in(late, states[rank])} - missing
    groups = _groups(states, "" if late is None else late["key"])
    apart = missing or gone
    order = sorted(groups.items(), key=lambda group: (reporter not in group[1], apart.isdisjoint(group[1]), group[1]))
    parts = [_place(words, ranks, states, roster) + _waiting_for(ranks, states) for words, ranks in order[:_NUM_PLACES]]
    if rest := [rank for _, ranks in order[_NUM_PLACES:] for rank in ranks]:
        parts.append(f"{len(rest)} rank{'s' * (len(rest) > 1)} elsewhere")
    if late is None:
        parts.append("perhaps not all ranks have called this operation, or with another size, or in another order")
    elif not apart:
        parts.append("no rank is missing: the operation is slow, or stuck in the MPI library")
    elif not missing:
        parts.append(
            f"{shown_ranks(sorted(gone))} called an operation with that number and left it: perhaps a different operation, as with "
            "async_op, or this operation is slow"
        )
    elsewhere = any(state["waiting"] for rank in apart if (state := states[rank]))
    return _noticed(reporter, mine, late, [*parts, *_hints(elsewhere)], deadline_s)


def lone_notice(reporter: int, number: int, mine: State, deadline_s: float) -> str:
    """The `notice` of a rank that cannot ask the other ranks."""
    late = _operation(mine, number)
    parts = [_place(_described(mine, ""), [reporter], {reporter: mine})]
    parts.append("the other ranks cannot be asked, since MPI has started without MPI_THREAD_MULTIPLE")
    return _noticed(reporter, mine, late, parts, deadline_s)


def _operation(state: State, number: int) -> Waiting | None:
    """The operation with this number in which a rank waits, or None."""
    return next((each for each in state["waiting"] if each["number"] == number), None)


def _noticed(reporter: int, mine: State, late: Waiting | None, parts: Sequence[str], deadline_s: float) -> str:
    age_s = mine["device_age"] if late is None else late["age"]
    end = f"at {deadline_s:g} s the job ends (MPITRAIN_DEADLINE_S)" if deadline_s else "there is no deadline"
    return " | ".join([f"notice: rank {reporter} has waited {age_s:.0f} s", *parts, end])


_NUM_PLACES = 8  # in a notice, which is one line


def _places(
    states: Sequence[State | None], key: str, roster: Roster, looks: Mapping[int, str] = MappingProxyType({})
) -> list[str]:
    """The places of the ranks, with one line for ranks in the same place. `key`: the communicator of the report."""
    return [f"  {_place(words, ranks, states, roster)}" for words, ranks in _groups(states, key, looks).items()]


def _groups(
    states: Sequence[State | None], key: str, looks: Mapping[int, str] = MappingProxyType({})
) -> dict[str, list[int]]:
    """The ranks by the description of their places."""
    groups: dict[str, list[int]] = {}
    for rank, state in enumerate(states):
        look = f"; {looks[rank]}" if state is None and looks.get(rank) else ""
        groups.setdefault(_described(state, key) + look, []).append(rank)
    return groups


def _place(
    words: str, ranks: Sequence[int], states: Sequence[State | None] | Mapping[int, State], roster: Roster = NOBODY
) -> str:
    """A description of ranks in the same place, and of the time that they have been there."""
    there = [state for rank in ranks if (state := states[rank])]
    ages = [max(each["age"] for each in state["waiting"]) for state in there if state["waiting"]]
    ages = ages or [state["device_age"] for state in there if state["device"]]
    since = f", for {max(ages):.1f} s" if ages else ""
    return f"{roster.names(ranks)}: {words}{since}"


def _waiting_for(ranks: Sequence[int], states: Sequence[State | None]) -> str:
    """The ranks for which ranks in the same place wait."""
    operations = {
        (each["key"], each["counter"], each["call"], each["algorithm"]): each
        for rank in ranks
        if (state := states[rank])
        for each in state["waiting"]
    }
    awaited = sorted({rank for each in operations.values() for rank in _absent(each, states)})
    return f", waiting for {shown_ranks(awaited)}" if awaited else ""


def _described(state: State | None, key: str) -> str:
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
    if not late["sequence"]:  # not an operation: see standstill.py
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
        elif not _is_in(late, state):
            reasons.setdefault(_OTHERWISE, []).append(rank)
    if not reasons:
        return (
            "no rank is missing: all ranks are in this operation, which is stuck in the MPI library, or slow. If the operation is "
            "slow, set a later deadline"
        )
    missing = "missing: " + "; ".join(
        f"{roster.names(ranks)} ({one if len(ranks) == 1 else several})" for (one, several), ranks in reasons.items()
    )
    return "\n  => ".join([missing, *_hints(_ELSEWHERE in reasons or _OTHERWISE in reasons)])


def _is_same(one: Waiting, other: Waiting) -> bool:
    """Whether two ranks are in the same operation of the same communicator."""
    return (one["key"], one["call"], one["algorithm"]) == (other["key"], other["call"], other["algorithm"])


def _is_in(waiting: Waiting, state: State | None) -> bool:
    """Whether a rank is in the operation `waiting` of another rank."""
    return state is not None and any(_is_same(each, waiting) for each in state["waiting"])


def _absent(waiting: Waiting, states: Sequence[State | None]) -> list[int]:
    """The ranks for which `waiting` waits, without those that have finished their part of it."""
    key, sequence = waiting["key"], waiting["sequence"]
    absent: list[int] = []
    for rank in waiting["awaited"]:
        state = states[rank]
        if _is_in(waiting, state):
            continue
        if state is not None:
            there = [each for each in state["waiting"] if each["key"] == key]
            unfinished = [*(each["sequence"] for each in there), *state["issued"].get(key, ())]
            if state["counts"].get(waiting["counter"], 0) >= sequence and sequence not in unfinished:
                continue
        absent.append(rank)
    return absent


def _hints(apart: bool) -> list[str]:
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
    for words, ranks in _groups(states, "").items():
        if others := [rank for rank in ranks if rank != reporter]:
            lines.append(f"  {_place(words, others, states, roster)}")
    return "\n".join(lines)

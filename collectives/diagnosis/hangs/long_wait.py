"""The lines of a notice: where the ranks are while one of them waits. Uses no MPI and no threads. notice.py says when one is due."""

from collections.abc import Sequence

from collectives.diagnosis.hangs.answer import State, Waiting
from collectives.diagnosis.hangs.hang_report import absent, described, groups, hints, is_in, place
from collectives.diagnosis.record import shown_ranks
from collectives.diagnosis.ring.roster import NOBODY, Roster

MAX_LINES = 20  # of a notice, so that a job of many ranks does not fill the screen


def notice(
    reporter: int, number: int, states: Sequence[State | None], deadline_s: float, roster: Roster = NOBODY
) -> str:
    """The lines about a wait of rank `reporter`: in its operation `number`, or for its device if there is no such operation.

    One line for ranks in the same place. The places of that rank and of the ranks for which it waits come first.
    """
    mine = states[reporter]
    assert mine is not None
    late = _operation(mine, number)
    missing = set() if late is None else {*absent(late, states)}
    gone = set() if late is None else {rank for rank in late["awaited"] if not is_in(late, states[rank])} - missing
    apart = missing or gone
    found = groups(states, "" if late is None else late["key"])
    order = sorted(found.items(), key=lambda group: (reporter not in group[1], apart.isdisjoint(group[1]), group[1]))
    elsewhere = any(state["waiting"] for rank in apart if (state := states[rank]))
    advice = [*_advice(late, missing, gone), *hints(elsewhere)]
    return _noticed(
        reporter,
        mine,
        late,
        [(ranks, place(words, ranks, states, roster) + _waiting_for(ranks, states)) for words, ranks in order],
        advice,
        deadline_s,
    )


def lone_notice(reporter: int, number: int, mine: State, deadline_s: float) -> str:
    """The `notice` of a rank that cannot ask the other ranks."""
    there = [([reporter], place(described(mine, ""), [reporter], {reporter: mine}))]
    advice = ["the other ranks cannot be asked, since MPI has started without MPI_THREAD_MULTIPLE"]
    return _noticed(reporter, mine, _operation(mine, number), there, advice, deadline_s)


def _operation(state: State, number: int) -> Waiting | None:
    """The operation with this number in which a rank waits, or None."""
    return next((each for each in state["waiting"] if each["number"] == number), None)


def _advice(late: Waiting | None, missing: set[int], gone: set[int]) -> list[str]:
    """What a wait may mean if it is not known for which ranks it waits."""
    if late is None:
        return ["perhaps not all ranks have called this operation, or with another size, or in another order"]
    if missing:
        return []
    if gone:
        return [
            f"{shown_ranks(sorted(gone))} called an operation with that number and left it: perhaps a different operation, as with "
            "async_op, or this operation is slow"
        ]
    return ["no rank is missing: the operation is slow, or stuck in the MPI library"]


def _noticed(
    reporter: int,
    mine: State,
    late: Waiting | None,
    places: Sequence[tuple[Sequence[int], str]],
    advice: Sequence[str],
    deadline_s: float,
) -> str:
    """The lines, at most `MAX_LINES`. `places`: the ranks in each place, and its line."""
    age_s = mine["device_age"] if late is None else late["age"]
    end = f"at {deadline_s:g} s the job ends (MPITRAIN_DEADLINE_S)" if deadline_s else "there is no deadline"
    room = MAX_LINES - 1 - len(advice)
    shown = places if len(places) <= room else places[: room - 1]
    lines = [f"notice: rank {reporter} has waited {age_s:.0f} s; {end}", *(f"  {line}" for _, line in shown)]
    if rest := places[len(shown) :]:
        num_ranks = sum(len(ranks) for ranks, _ in rest)
        lines.append(f"  {num_ranks} rank{'s' * (num_ranks > 1)} in {len(rest)} other places")
    return "\n".join([*lines, *(f"  => {line}" for line in advice)])


def _waiting_for(ranks: Sequence[int], states: Sequence[State | None]) -> str:
    """The ranks for which ranks in the same place wait."""
    operations = {
        (each["key"], each["counter"], each["call"], each["algorithm"]): each
        for rank in ranks
        if (state := states[rank])
        for each in state["waiting"]
    }
    awaited = sorted({rank for each in operations.values() for rank in absent(each, states)})
    return f", waiting for {shown_ranks(awaited)}" if awaited else ""

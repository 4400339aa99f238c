"""The notice: when it is due, and what it says. All without MPI."""

import math
import re
from collections.abc import Iterator

import pytest
from answers import leave_all, state, waiting

from collectives.diagnosis import record, stacks
from collectives.diagnosis.hangs import answer, deadline, long_wait, notice
from collectives.diagnosis.record import Log


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    yield
    leave_all()


def test_notice_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for said, expected in (("", 30.0), ("0", 0.0), ("2.5", 2.5)):
        monkeypatch.setenv("MPITRAIN_NOTICE_S", said)
        assert notice.from_environment() == expected
    monkeypatch.setenv("MPITRAIN_NOTICE_S", "soon")
    with pytest.raises(
        ValueError, match="MPITRAIN_NOTICE_S is 'soon'; expected seconds of at least 0, such as 30, or 0 for no"
    ):
        notice.from_environment()


# When a notice is due


class Waits:
    """Operations of this process, and a clock that is set by hand."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seconds: float = 30.0, deadline_s: float = 600.0) -> None:
        monkeypatch.setattr(deadline.Deadline, "seconds", deadline_s)
        # the stacks of the threads do not matter here
        monkeypatch.setattr(stacks, "inside_package", lambda thread: True)
        monkeypatch.setattr(notice, "_on_devices", {})
        self._monkeypatch, self._begun = monkeypatch, 1000.0
        self.clock, self.notices = deadline.Clock(), notice.Notices(seconds)
        self.clock.awake_since = -math.inf
        self.now = 0.0
        self.at(0)

    def at(self, seconds: float) -> None:
        self.now = self.clock.now = self._begun + seconds
        self._monkeypatch.setattr("time.monotonic", lambda: self.now)

    def enter(self, name: str = "all_reduce") -> record.Entry:
        entry = Log(range(2)).enter(name)
        entry.begun = self.now
        return entry

    def lines(self, until: float, of_rank: int = 0) -> list[float]:
        """When a rank that looks twice a second prints lines from now on, which it tells all ranks."""
        first, told = self.now - self._begun, []
        for tick in range(int(2 * first), int(2 * until)):
            self.at(tick / 2)
            if (wait := self.notices.due(self.clock, 0.25 * of_rank)) is not None:
                told.append(tick / 2)
                self.notices.told(self.now - wait.begun)
        return told


def test_one_wait_is_told_ever_more_rarely(monkeypatch: pytest.MonkeyPatch) -> None:
    waits = Waits(monkeypatch)
    entry = waits.enter()
    assert waits.lines(600) == [30.5, 61, 122, 244, 488]
    entry.leave()
    assert waits.lines(700) == []
    entry = waits.enter("barrier")
    assert waits.lines(800) == [730, 760.5], "another wait"
    wait = waits.notices.due(waits.clock, -100.0)
    assert wait is not None and waits.notices.goes_on(wait)
    entry.leave()
    assert not waits.notices.goes_on(wait), "it ended while the others were asked"


def test_a_line_of_another_rank_is_about_this_one_too(monkeypatch: pytest.MonkeyPatch) -> None:
    waits = Waits(monkeypatch)
    waits.at(20)
    waits.enter()
    waits.at(30)
    waits.notices.told(30.0)  # as a rank that has waited since 0 says
    assert waits.lines(75, of_rank=1) == [60.5], "where that rank has gone on"


@pytest.mark.parametrize(("seconds", "deadline_s"), [(0.0, 600.0), (30.0, 30.0), (30.0, 2.0)])
def test_no_notice_where_they_are_off_or_the_deadline_comes_first(
    seconds: float, deadline_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits = Waits(monkeypatch, seconds, deadline_s)
    waits.enter()
    assert waits.lines(100) == []


def test_an_operation_under_way_and_a_process_that_was_stopped_are_no_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    waits = Waits(monkeypatch)
    waits.enter().issued()
    assert waits.lines(40) == []
    waits.enter()
    waits.at(100)
    waits.clock.awake_since = waits.now
    assert waits.lines(120) == []


def test_what_is_on_a_device_is_a_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    waits = Waits(monkeypatch)
    notice.note_device(7, notice.DeviceWork("NCCL's all_reduce", waits.now))
    assert answer.state(0, "")["device"] == "NCCL's all_reduce"
    assert waits.lines(70) == [30, 60]
    notice.note_device(7, None)
    assert (waits.lines(200), answer.state(0, "")["device"]) == ([], "")


# What it says


END = "; at 600 s the job ends (MPITRAIN_DEADLINE_S)"
SLOW = "  => no rank is missing: the operation is slow, or stuck in the MPI library"
HINT = "  => MPITRAIN_DEBUG=1 finds the first call that differs between the ranks"


def test_a_notice_says_where_all_are_and_for_whom_they_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MPITRAIN_DEBUG", raising=False)
    everyone = range(5)
    late = waiting(ranks=everyone, age=30.2, doing="the forward of layers.3", number=9)
    states = [
        state(late),
        state(late),
        state(last={"A": "#4 barrier (ended)"}, counts={"A": 4}),
        state(waiting("B", 2, name="barrier", ranks=(3, 4)), counts={"A": 5}),
        state(counts={"A": 7, "B": 1}, standing="c.py:5 in h", doing="the backward of layers.2"),
    ]
    where = (
        "in A (ranks 0-4): #5 all_reduce, in the forward of layers.3, at a.py:3 in f, for 30.2 s, waiting for rank 2"
    )
    assert long_wait.notice(1, 9, states, 600.0).splitlines() == [
        f"notice: rank 1 has waited 30 s{END}",
        f"  ranks 0, 1: {where}",
        "  rank 2: in no operation, main thread at b.py:4 in g; its last operation there: #4 barrier (ended)",
        "  rank 3: in B (ranks 3, 4): #2 barrier, at a.py:3 in f, for 3.0 s, waiting for rank 4",
        "  rank 4: in no operation, in the backward of layers.2, main thread at c.py:5 in h",
    ]
    lines = long_wait.notice(0, 9, [*states[:2], None, *states[3:]], 0.0).splitlines()
    assert "  rank 2: no answer yet" in lines and lines[0].endswith("; there is no deadline")
    for issued, is_awaited in ((4, False), (5, True)):  # which it has not done its part of
        text = long_wait.notice(0, 9, [state(waiting(number=9)), state(counts={"A": 5}, issued={"A": [issued]})], 600.0)
        assert (", waiting for rank 1" in text) is is_awaited
    text = long_wait.notice(0, 9, [state(waiting(number=9)), state(waiting())], 600.0)
    assert "waiting for" not in text and text.splitlines()[-1] == SLOW
    assert long_wait.lone_notice(1, 9, state(late), 600.0).splitlines()[1:] == [
        f"  rank 1: {where.removesuffix(', waiting for rank 2')}",
        "  => the other ranks cannot be asked, since MPI has started without MPI_THREAD_MULTIPLE",
    ]


def test_ranks_in_different_calls_of_one_number_wait_for_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MPITRAIN_DEBUG", raising=False)
    states = [state(waiting(number=9, name="reduce_scatter")), state(waiting(name="all_gather"))]
    text = long_wait.notice(0, 9, states, 600.0)
    assert text.splitlines()[-1] == HINT
    assert re.findall(r"(rank \d): in A .*, waiting for (rank \d)", text) == [
        ("rank 0", "rank 1"),
        ("rank 1", "rank 0"),
    ]


def test_a_rank_that_called_an_operation_of_that_number_and_waits_elsewhere_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It passed a barrier with async_op, where the reporter has called one without: neither can go on."""
    monkeypatch.delenv("MPITRAIN_DEBUG", raising=False)
    states = [state(waiting(number=9, name="barrier")), state(waiting("B", 3), counts={"A": 5})]
    lines = long_wait.notice(0, 9, states, 600.0).splitlines()
    assert "  rank 1: in B (ranks 0, 1): #3 all_reduce, at a.py:3 in f, for 3.0 s, waiting for rank 0" in lines
    told = "  => rank 1 called an operation with that number and left it: perhaps a different operation, as with async_op, or"
    assert lines[-2].startswith(told) and lines[-1] == HINT


@pytest.mark.parametrize("num_places", [2, 19, 20, 40])
def test_a_notice_of_many_ranks_has_a_line_for_each_place_and_twenty_lines_at_most(num_places: int) -> None:
    """All wait for rank 62, at `num_places - 1` lines of the program; rank 63 tells it."""
    everyone = range(64)
    states = [
        state(waiting(ranks=everyone, number=9, site=f"x.py:{rank % (num_places - 1)} in f")) for rank in everyone
    ]
    states[62] = state(counts={"A": 4})
    lines = long_wait.notice(63, 9, states, 600.0).splitlines()
    assert lines[0] == f"notice: rank 63 has waited 3 s{END}"
    assert "63" in lines[1].split(":")[0] and lines[2].startswith("  rank 62: in no operation, ")
    if num_places <= 19:
        assert len(lines) == 1 + num_places
    else:
        assert len(lines) == 20
        assert re.fullmatch(rf"  \d+ ranks? in {num_places - 18} other places", lines[-1]), lines[-1]


def test_a_notice_of_what_is_on_a_device() -> None:
    states = [state(device="NCCL's all_reduce", device_age=31.0), state()]
    assert long_wait.notice(0, -5, states, 600.0).splitlines() == [
        f"notice: rank 0 has waited 31 s{END}",
        "  rank 0: in no operation, main thread at b.py:4 in g; on its device NCCL's all_reduce, which has not ended, for 31.0 s",
        "  rank 1: in no operation, main thread at b.py:4 in g",
        "  => perhaps not all ranks have called this operation, or with another size, or in another order",
    ]

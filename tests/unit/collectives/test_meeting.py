"""The meeting of ranks of several versions: who may go on, who is told what, and when. Simulated, with a clock of its own."""

from collections import deque
from collections.abc import Iterable, Mapping
from types import SimpleNamespace

import pytest

from collectives.diagnosis.hangs import deadline
from collectives.diagnosis.start import meeting
from collectives.diagnosis.start.meeting import _RECORD, TAG, Kind, MeetingError, Record, StartMeeting, own_record

STEP_S = 0.05
NOTICE_S, DEADLINE_S = 20.0, 60.0
MINE = Record(b"0.1.0".ljust(15, b"\0"), bytes(range(20)), b"place  0")


class Box:
    """The messages of one rank."""

    def __init__(self, rank: int, boxes: "list[Box]") -> None:
        self.rank, self.size, self.boxes = rank, len(boxes) + 1, boxes
        self.messages: deque[tuple[int, bytes]] = deque()

    def send(self, peer: int, message: bytes) -> None:
        assert peer != self.rank
        self.boxes[peer].messages.append((self.rank, message))

    def receive(self) -> tuple[int, bytes] | None:
        return self.messages.popleft() if self.messages else None


class Town:
    """A job: the ranks of `records` meet, each from its time of `starts` on; ranks without a record are of a version that does not."""

    def __init__(
        self,
        size: int,
        records: Mapping[int, Record],
        starts: Mapping[int, float] | None = None,
        hashes: Mapping[int, bytes] | None = None,
        *,
        deadline_s: float = DEADLINE_S,
        notice_s: float = NOTICE_S,
    ) -> None:
        boxes: list[Box] = []
        for rank in range(size):
            boxes.append(Box(rank, boxes))
        for box in boxes:
            box.size = size
        self.ends: dict[int, float | MeetingError] = {}
        self.hashed: list[int] = []
        meetings: dict[int, StartMeeting] = {}
        now = 0.0
        while len(self.ends) < len(records):
            assert now < 2 * DEADLINE_S + 60, f"no end; {self.ends}"
            for rank in sorted(records, reverse=bool(int(now / STEP_S) % 2)):
                if now < (starts or {}).get(rank, 0.0) or rank in self.ends:
                    continue
                if rank not in meetings:
                    meetings[rank] = StartMeeting(
                        boxes[rank], records[rank], lambda rank=rank: self._hash(rank, hashes), now,
                        notice_s=notice_s, deadline_s=deadline_s,
                    )  # fmt: skip
                try:
                    if meetings[rank].step(now):
                        self.ends[rank] = now
                except MeetingError as error:
                    self.ends[rank] = error
            now += STEP_S
        self.seconds, self.num_left = now, sum(len(box.messages) for box in boxes)

    def _hash(self, rank: int, hashes: Mapping[int, bytes] | None) -> bytes:
        self.hashed.append(rank)
        return (hashes or {}).get(rank, b"sources!")

    def all_go(self) -> bool:
        return not any(isinstance(end, MeetingError) for end in self.ends.values())


def at(place: int, **its: bytes) -> Record:
    return MINE._replace(place=f"place {place:2}".encode(), **its)


def lines(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return capsys.readouterr().err.splitlines()


@pytest.mark.parametrize("size", [2, 3, 4, 100])
def test_ranks_of_one_place_go_on_and_hash_nothing(size: int, capsys: pytest.CaptureFixture[str]) -> None:
    town = Town(size, dict.fromkeys(range(size), MINE))
    assert town.all_go() and town.seconds < 1 and town.hashed == [] and lines(capsys) == []


@pytest.mark.parametrize("size", [2, 3, 4, 12])
def test_one_rank_of_each_place_hashes_its_sources(size: int) -> None:
    town = Town(size, {rank: at(rank % 3) for rank in range(size)}, {rank: rank % 5 * 0.2 for rank in range(size)})
    assert town.all_go() and sorted(rank % 3 for rank in town.hashed) == list(range(min(size, 3)))


@pytest.mark.parametrize(
    ("others", "hashes", "words"),
    [
        ({"version": b"0.2.0".ljust(15, b"\0")}, {}, "0.1.0 (commit 0001020304) on rank 0; 0.2.0 (commit 0001020304) on ranks 1, 2"),
        ({"place": b"place  1", "commit": bytes(range(20, 0, -1))}, {}, "(commit 0001020304, sources 736f7572) on rank 0; 0.1.0 (com"),
        ({"commit": b"c" * 20}, {0: b"itsown!!"}, "(commit 0001020304, sources 6974736f) on rank 0; 0.1.0 (commit 6363636363,"),
        ({"place": b"place  1"}, {0: b"sources1"}, "sources 736f7572) on rank 0; 0.1.0 (commit 0001020304, sources 736f7572) on"),
        ({"place": b"place  1", "commit": bytes(20)}, {1: b"Sources!"}, "(commit unknown, sources 536f7572) on ranks 1, 2"),
    ],
)  # fmt: skip
def test_ranks_that_differ_are_all_refused(others: dict[str, bytes], hashes: dict[int, bytes], words: str) -> None:
    town = Town(3, {0: MINE, 1: MINE._replace(**others), 2: MINE._replace(**others)}, hashes=hashes)
    texts = {str(end) for end in town.ends.values()}
    (text,) = texts
    assert text.startswith("the ranks of this job run different versions of mpitrain: 0.1.0") and words in text
    assert "install the same commit on all hosts" in text and "\n" not in text
    assert all(isinstance(end, MeetingError) and end.num_refused == 3 for end in town.ends.values())


def test_an_unknown_commit_fits_each_commit_of_the_same_sources() -> None:
    assert Town(3, {0: at(0), 1: at(1, commit=bytes(20)), 2: at(2)}).all_go()


def silent(town: Iterable[str]) -> list[str]:
    return [line.partition(" for ")[2].partition(":")[0] for line in town]


@pytest.mark.parametrize(
    ("size", "meets", "named"),
    [
        (2, [0], "rank 1"),
        (2, [1], "rank 0"),
        (4, [0, 2], "ranks 1, 3"),
        (4, [1, 2, 3], "rank 0"),
        (4, [2, 3], "ranks 0, 1"),
        (4, [1, 3], "ranks 0, 2"),
        (64, range(32, 64), "ranks 0-31"),
    ],
)
def test_one_line_names_the_silent_ranks_and_the_deadline_ends_the_wait(
    size: int, meets: Iterable[int], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    town = Town(size, dict.fromkeys(meets, MINE), {rank: rank % 3 * 0.1 for rank in meets})
    (line,) = lines(capsys)
    assert f"for {named}: another version of mpitrain, or still importing" in line, line
    for end in town.ends.values():
        assert isinstance(end, MeetingError) and end.num_refused < size
        assert f"within {DEADLINE_S:g} s (MPITRAIN_DEADLINE_S)" in str(end)
    first = {str(end) for rank, end in town.ends.items() if 0 in meets or rank == min(meets)}
    assert all(f"no answer of {named if 0 in meets else 'rank 0'} " in text for text in first) and len(first) == 1
    assert DEADLINE_S <= town.seconds < DEADLINE_S + (1 if 0 in meets else 21)


@pytest.mark.parametrize("late", [0, 1, 2])
def test_a_rank_that_still_imports_is_named_and_all_go_on_when_it_comes(
    late: int, capsys: pytest.CaptureFixture[str]
) -> None:
    town = Town(3, dict.fromkeys(range(3), MINE), {late: 40.0})
    assert town.all_go() and town.seconds < 41
    assert silent(lines(capsys)) == [f"rank {late}"]


def test_a_rank_that_comes_a_little_late_is_not_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert Town(4, dict.fromkeys(range(4), MINE), {0: 10.0, 2: 19.0}).all_go()
    assert lines(capsys) == []


def test_ranks_that_differ_do_not_wait_for_a_silent_one() -> None:
    town = Town(4, {0: MINE, 2: at(2, commit=bytes([1] * 20))})
    assert town.seconds < 5
    assert all("different versions" in str(end) and end.num_refused == 2 for end in town.ends.values())


@pytest.mark.parametrize("size", [2, 3, 12])
def test_a_commit_while_ranks_of_one_place_start_is_no_other_version(size: int) -> None:
    """One rank of each commit in each place looks at the files."""
    records = {rank: at(0, commit=bytes([1 + rank % 3] * 20)) for rank in range(size)}
    town = Town(size, records, {rank: rank % 5 * 0.2 for rank in range(size)})
    assert town.all_go() and len(town.hashed) == min(size, 3)


@pytest.mark.parametrize("late_s", [40.0, 58.5, DEADLINE_S - 0.2])
@pytest.mark.parametrize("notice_s", [0.0, NOTICE_S])
def test_a_late_rank_0_names_the_rank_that_does_not_come(
    late_s: float, notice_s: float, capsys: pytest.CaptureFixture[str]
) -> None:
    town = Town(4, dict.fromkeys([0, 1, 2], MINE), {0: late_s}, notice_s=notice_s)
    assert {str(end).partition(" within")[0] for end in town.ends.values()} == {"world() has had no answer of rank 3"}
    assert all(isinstance(end, MeetingError) and end.num_refused == 3 for end in town.ends.values())
    assert len(lines(capsys)) == bool(notice_s)


@pytest.mark.parametrize("late", [0, 1])
def test_no_message_is_left_of_two_ranks(late: int) -> None:
    assert Town(2, dict.fromkeys(range(2), MINE), {late: 30.0}).num_left == 0


def test_the_time_of_a_stopped_job_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch system may stop all ranks for longer than the deadline."""
    stopped_s = [10_000.0]

    class Time:
        now = 0.0

        def monotonic(self) -> float:
            return self.now

        def sleep(self, seconds: float) -> None:
            self.now += seconds + (stopped_s.pop() if stopped_s and self.now > 5 else 0.0)

    class Late(Box):
        def receive(self) -> tuple[int, bytes] | None:
            if now.now < 10_030 or self.sent:
                return None
            self.sent = True
            return 1, _RECORD.pack(b"mpitrain", Kind.HERE, *MINE, 0)

    now, post = Time(), Late(0, [])
    post.size, post.sent, post.boxes = 2, False, [post, Box(1, [])]
    monkeypatch.setattr(meeting, "time", now)
    monkeypatch.setattr(deadline, "time", now)
    monkeypatch.setattr(meeting, "_MpiPost", lambda mpi: post)
    monkeypatch.setattr(meeting, "own_record", lambda: MINE)
    monkeypatch.setattr(post, "flush", lambda: None, raising=False)
    meeting.meet(SimpleNamespace(rank=0, size=2))
    assert now.now > 10_030 and not stopped_s


def test_a_short_deadline_ends_no_import(capsys: pytest.CaptureFixture[str]) -> None:
    assert Town(3, dict.fromkeys(range(3), MINE), {1: 15.0}, deadline_s=1.0).all_go()
    town = Town(3, {0: MINE, 2: MINE}, deadline_s=1.0)
    assert NOTICE_S < town.seconds < NOTICE_S + 3 and len(lines(capsys)) == 1 and not town.all_go()


def test_without_a_deadline_a_rank_waits(capsys: pytest.CaptureFixture[str]) -> None:
    assert Town(2, {0: MINE, 1: MINE}, {1: 100.0}, deadline_s=0.0).all_go()
    assert len(lines(capsys)) == 1


def test_the_form_of_the_messages_never_changes() -> None:
    """Another version reads these bytes. Do not change this test."""
    assert TAG == 28016 and [(kind.name, kind.value) for kind in Kind] == [
        ("HERE", 0), ("GO", 1), ("REFUSED", 2), ("SOURCES", 3), ("WHO", 4),
    ]  # fmt: skip
    boxes: list[Box] = []
    for rank in range(2):
        boxes.append(Box(rank, boxes))
    StartMeeting(boxes[1], MINE._replace(sources=b"sources!"), bytes, 0.0, notice_s=1.0, deadline_s=1.0)
    parts = (b"mpitrain", b"\0", b"0.1.0", bytes(10), bytes(range(20)), b"place  0", b"sources!", bytes(4))
    assert boxes[0].messages.pop() == (1, b"".join(parts))
    assert _RECORD.pack(b"mpitrain", 2, *MINE, 0x01020304)[60:] == b"\4\3\2\1"
    assert tuple(map(len, own_record())) == (15, 20, 8, 8)
    boxes[1].messages += [(0, b"anything" + bytes(56)), (0, b"mpitrain"), (0, b"mpitrain\xff" + bytes(55))]
    assert not StartMeeting(boxes[1], MINE, bytes, 0.0, notice_s=1.0, deadline_s=1.0).step(0.0)

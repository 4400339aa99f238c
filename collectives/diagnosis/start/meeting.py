"""The meeting: before all else in `world()`, rank 0 compares the versions of the ranks, and each rank learns whether it may go on.

Ranks of different versions issue different collectives, and wait for each other without a word. So a version must understand this part
of each other one. **The form of these messages never changes**, nor does their tag. They go point to point on MPI_COMM_WORLD. A message
is a record of 64 bytes, little endian, and only REFUSED has text behind it, in UTF-8:

| bytes | what |
| --- | --- |
| 0-7 | the letters `mpitrain` |
| 8 | the kind of the message, of `Kind` |
| 9-23 | the version in ASCII, cut to 15 letters, padded with zeros |
| 24-43 | the commit, its first 20 bytes; zeros: unknown |
| 44-51 | the place: a hash of the host and the package's folder |
| 52-59 | a hash of the names and sizes of the sources in that place; zeros: not taken |
| 60-63 | in REFUSED the number of ranks that are refused; else zeros |

Each rank sends HERE to rank 0. If the ranks have several places, or several commits in one place, rank 0 asks one rank of each for the
hash of its sources (SOURCES), and gets another HERE. Then rank 0 sends GO or REFUSED to each rank. Two commits in one place are no
fault if the hashes are the same: the user has committed something else while the ranks started.

A rank that may not go on for 20 s (MPITRAIN_MEETING_S) asks all ranks (WHO). They answer by HERE, unless rank 0 asks, which has theirs,
and ask nobody themselves. A second later the rank that asks prints one line, which names those that were silent. Rank 0 asks first,
then one rank after another, because rank 0 may be of a version that does not meet. At the deadline, but not before that line, a rank
ends its wait by an error. A second before, it asks rank 0 again: if rank 0 has come, the wait of rank 0 counts. All waits poll, so that
they give their core away.
"""

import struct
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from enum import IntEnum
from typing import Any, NamedTuple, Protocol

from collectives import version
from collectives.diagnosis import dump
from collectives.diagnosis.hangs import deadline
from collectives.diagnosis.record import shown_ranks
from collectives.diagnosis.together import raised_on
from collectives.environment import seconds_of

TAG = 28016
_RECORD = struct.Struct("<8sB15s20s8s8sI")
_MAGIC, _NOT_TAKEN, _NEVER = b"mpitrain", bytes(8), float("inf")

_NOTICE_S = 20.0
_ANSWER_S = 1.0  # for the answers of the ranks that are there; at most as long as the time before
_STAGGER_S, _MAX_STAGGER_S = 0.3, 20.0  # a rank waits this long for each lower rank to ask first, so that one rank asks
GRACE_S = 3.0  # for ranks that have not come yet, when two that have come differ; and for rank 0 to end the job
_NAP_S, _MAX_NAP_S = 2e-5, 2e-3

_WHY = "another version of mpitrain, or still importing"
_REMEDY = (
    "expected one version on all ranks, because they must issue the same collectives: install the same commit on all hosts, and see "
    "that PYTHONPATH and the environment are the same there (`python -m mpitrain doctor` names the folders)"
)


class Kind(IntEnum):
    """What a message says."""

    HERE, GO, REFUSED, SOURCES, WHO = range(5)


class Record(NamedTuple):
    """What a rank says of itself, in the order of the bytes."""

    version: bytes
    commit: bytes
    place: bytes
    sources: bytes = _NOT_TAKEN

    def __str__(self) -> str:
        words = [f"commit {self.commit.hex()[:10]}" if any(self.commit) else "commit unknown"]
        words += [f"sources {self.sources.hex()[:8]}"] * any(self.sources)
        return f"{self.version.rstrip(bytes(1)).decode(errors='replace')} ({', '.join(words)})"


class MeetingError(RuntimeError):
    """This rank may not go on. `num_refused`: the number of ranks that rank 0 has told so; 0 if this rank has decided by itself."""

    def __init__(self, text: str, num_refused: int = 0) -> None:
        super().__init__(text)
        self.num_refused = num_refused


class Messenger(Protocol):
    """Sends and receives messages, and waits in neither."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def send(self, peer: int, message: bytes) -> None: ...

    def receive(self) -> tuple[int, bytes] | None: ...


class StartMeeting:
    """One rank's part of the meeting."""

    def __init__(
        self,
        post: Messenger,
        mine: Record,
        sources: Callable[[], bytes],
        now: float,
        *,
        notice_s: float,
        deadline_s: float,
    ) -> None:
        """`sources()`: the hash of the sources. `notice_s`: when to ask who is there; `deadline_s`: the end of the wait; 0: never."""
        self._post, self._sources, self._began = post, sources, now
        self._answer_s = _answer_s(notice_s)
        self._limit_s = limit_s(notice_s, deadline_s)
        self._records = {post.rank: mine}  # of the ranks that are here, as far as this rank knows
        self._asked: set[tuple[bytes, ...]] = set()  # the commits and places of which rank 0 has asked for the sources
        self._refuse_at = _NEVER
        self._ask_at = now + notice_s + turn_s(post.rank, post.size) if notice_s else _NEVER
        self._end_at = now + self._limit_s + turn_s(post.rank, post.size)  # so that one rank prints the error
        self._tell_at = self._ask_first_at = _NEVER
        if post.rank:
            self._ask_first_at = self._end_at - self._answer_s
            self._send([0], Kind.HERE)

    def step(self, now: float) -> bool:
        """Do what is due. Returns whether this rank may go on; MeetingError if it may not."""
        is_new = now == self._began
        while (message := self._post.receive()) is not None:
            if self._take(*message, now):
                return True
            is_new = True
        if self._post.rank == 0 and (is_new or now >= self._refuse_at) and self._all_may_go(now):
            return True
        if now >= self._ask_at:
            self._ask_at, self._tell_at = _NEVER, now + self._answer_s
            self._send(self._others(), Kind.WHO)
        if now >= self._tell_at:
            self._tell_at = _NEVER
            if silent := self._silent():
                dump.say(f"world() has waited {now - self._began:.0f} s for {shown_ranks(silent)}: {_WHY}")
        if now >= self._ask_first_at:
            self._ask_first_at = _NEVER
            self._send([0], Kind.WHO)
        if now >= self._end_at:
            who = shown_ranks(self._silent() if self._post.rank == 0 else [0])
            limit = f"within {self._limit_s:g} s (MPITRAIN_DEADLINE_S)"
            self._refuse(f"world() has had no answer of {who} {limit}: {_WHY}; {_REMEDY}")
        return False

    def _take(self, peer: int, message: bytes, now: float) -> bool:
        """Take a message. Returns whether it lets this rank go on."""
        if len(message) < _RECORD.size or not message.startswith(_MAGIC):
            return False
        _, kind, *fields, num_refused = _RECORD.unpack_from(message)
        if peer == 0:  # it is there, and says at its end, which is before this one, who is not
            self._end_at, self._ask_first_at = now + self._limit_s + GRACE_S, _NEVER
        if kind == Kind.HERE:
            self._records[peer] = Record(*fields)
        elif kind == Kind.SOURCES:
            self._hash_own()
            self._send([peer], Kind.HERE)
        elif kind == Kind.WHO:
            if peer:
                self._send([peer], Kind.HERE)
            if self._tell_at == _NEVER or peer < self._post.rank:
                self._ask_at = self._tell_at = _NEVER  # the other rank prints the line
        elif kind == Kind.REFUSED:
            raise MeetingError(message[_RECORD.size :].decode(errors="replace"), num_refused)
        return bool(kind == Kind.GO)

    def _all_may_go(self, now: float) -> bool:
        """On rank 0: whether all ranks are here and fit each other; then they are told. MeetingError if some do not fit."""
        stocks: dict[tuple[bytes, ...], bytes] = {}  # by commit and place, with the hash of the sources there
        for record in self._records.values():
            if any(record.sources) or record[1:3] not in stocks:
                stocks[record[1:3]] = record.sources
        if len(stocks) > 1:
            for rank, record in list(self._records.items()):
                if record[1:3] not in self._asked:
                    self._asked.add(record[1:3])
                    self._send([rank], Kind.SOURCES) if rank else self._hash_own()
            stocks[self._records[0][1:3]] = self._records[0].sources
        kinds: dict[Record, list[int]] = {}
        commits: dict[bytes, bytes] = {}  # by place, that of one rank
        for rank, record in sorted(self._records.items()):
            kinds.setdefault(record._replace(place=b"", sources=stocks[record[1:3]]), []).append(rank)
            commits.setdefault(record.place, record.commit)
        is_full = not self._silent() and (len(stocks) == 1 or all(map(any, stocks.values())))
        if _differ(kinds, commits.values()):
            self._refuse_at = min(self._refuse_at, now + GRACE_S)
            if is_full or now >= self._refuse_at:
                found = "; ".join(f"{kind} on {shown_ranks(ranks)}" for kind, ranks in kinds.items())
                self._refuse(f"the ranks of this job run different versions of mpitrain: {found}; {_REMEDY}")
        elif is_full:
            self._send(self._others(), Kind.GO)
            return True
        return False

    def _hash_own(self) -> None:
        mine = self._records[self._post.rank]
        self._records[self._post.rank] = mine._replace(sources=self._sources())

    def _refuse(self, text: str) -> None:
        """Raise MeetingError, on rank 0 also in the other ranks that are here."""
        here = [] if self._post.rank else list(self._records)
        self._send((peer for peer in here if peer), Kind.REFUSED, len(here), text)
        raise MeetingError(text, len(here))

    def _send(self, peers: Iterable[int], kind: Kind, num_refused: int = 0, text: str = "") -> None:
        message = _RECORD.pack(_MAGIC, kind, *self._records[self._post.rank], num_refused) + text.encode()
        for peer in peers:
            self._post.send(peer, message)

    def _others(self) -> list[int]:
        return [rank for rank in range(self._post.size) if rank != self._post.rank]

    def _silent(self) -> list[int]:
        return [rank for rank in range(self._post.size) if rank not in self._records]


def notice_from_environment() -> float:
    """MPITRAIN_MEETING_S in seconds: when to name the ranks that do not meet; 0: never. ValueError for other values."""
    return seconds_of("MPITRAIN_MEETING_S", _NOTICE_S, "no line")


def waits() -> tuple[float, float]:
    """The notice and the deadline in seconds, 0 for none. Wrong values are errors of all ranks later, and here the defaults."""
    with suppress(ValueError):
        return notice_from_environment(), deadline.from_environment()
    return _NOTICE_S, deadline.DEFAULT_DEADLINE_S


def limit_s(notice_s: float, deadline_s: float) -> float:
    """The end of the wait. Not before the line, because a deadline of a second is for operations, and not for imports."""
    return max(deadline_s, (notice_s or _NOTICE_S) + 2 * _answer_s(notice_s)) if deadline_s else _NEVER


def _answer_s(notice_s: float) -> float:
    return min(_ANSWER_S, notice_s or _NOTICE_S)


def turn_s(rank: int, size: int) -> float:
    """How much later than rank 0 a rank asks or ends its wait, so that one speaks for all."""
    return min(_STAGGER_S, _MAX_STAGGER_S / size) * rank


def own_record() -> Record:
    """The record of this process, without the hash of its sources."""
    mine = version.release()
    commit = b"" if mine.commit == version.UNKNOWN else bytes.fromhex(mine.commit)
    return Record(mine.version.encode()[:15].ljust(15, b"\0"), commit[:20].ljust(20, b"\0"), version.place())


def meet(mpi: Any) -> None:
    """Return when rank 0 lets this rank go on. `mpi`: MPI_COMM_WORLD. MeetingError if the ranks have different versions.

    If all ranks raise it, one of them prints it. Else some rank does not meet, and the error, unless it is caught, ends the job.
    """
    if mpi.size == 1:
        return
    post, nap_s = _MpiPost(mpi), _NAP_S
    dump.RecordOutput.rank = mpi.rank
    notice_s, deadline_s = waits()
    clock = deadline.Clock()  # a batch system may stop all ranks for hours
    meeting = StartMeeting(
        post, own_record(), version.loaded_sources, clock.now, notice_s=notice_s, deadline_s=deadline_s
    )
    try:
        while not meeting.step(clock.look_awake()):
            time.sleep(nap_s)
            nap_s = min(2 * nap_s, _MAX_NAP_S)
        post.flush()
    except MeetingError as error:
        post.flush()
        if error.num_refused == mpi.size:
            raise raised_on(mpi, error, speaker=0) from None
        if error.num_refused and mpi.rank:
            time.sleep(GRACE_S)  # rank 0 prints the error, and ends the job
        raise


def take_late_messages(mpi: Any) -> None:
    """After the meeting, when all ranks have left it: take the answers and questions that came too late, so that none stays behind."""
    post = _MpiPost(mpi)
    while post.receive() is not None:
        pass


class _MpiPost:
    """Messages of mpi4py's communicator."""

    def __init__(self, mpi: Any) -> None:
        from mpi4py import MPI

        self._mpi, self._any, self._status = mpi, MPI.ANY_SOURCE, MPI.Status()
        self.rank: int = mpi.rank
        self.size: int = mpi.size
        self._sent: list[tuple[Any, bytes]] = []

    def send(self, peer: int, message: bytes) -> None:
        self._sent.append((self._mpi.Isend(message, peer, TAG), message))

    def receive(self) -> tuple[int, bytes] | None:
        self._keep_unsent()
        if not self._mpi.Iprobe(self._any, TAG, self._status):
            return None
        message, peer = bytearray(self._status.Get_count()), self._status.Get_source()
        self._mpi.Recv(message, peer, TAG)
        return peer, bytes(message)

    def _keep_unsent(self) -> bool:
        self._sent = [each for each in self._sent if not each[0].Test()]
        return bool(self._sent)

    def flush(self) -> None:
        """Send what is not sent yet, unless a rank does not take it for long: its message stays alive."""
        end = time.monotonic() + _ANSWER_S
        while self._keep_unsent() and time.monotonic() < end:
            time.sleep(_NAP_S)
        _unsent.extend(self._sent)


_unsent: list[tuple[Any, bytes]] = []


def _differ(records: Iterable[Record], commits: Iterable[bytes]) -> bool:
    """Whether the records differ in what two of them know. `commits`: of each place."""
    versions, _, _, sources = zip(*records, strict=True)
    return any(len(set(known)) > 1 for known in (versions, filter(any, commits), filter(any, sources)))

"""The monitor: a thread of each rank that answers for it while the rank itself is stuck in an operation.

- SIGUSR2: it dumps the flight record. Python's own handlers wait until the main thread is back from MPI; the wake-up pipe does not.
- The deadline: when an operation of this rank has waited too long, it asks all ranks where they are, by messages on a communicator
  of its own, prints one report and ends the job. Where several ranks notice, the lowest that asked goes on.
- Checked mode: it finds ranks that wait for each other in different communicators.

A rank whose program has ended still answers, until all have ended. Ranks that cannot talk (MPI without THREAD_MULTIPLE) only write
their own record and end the job.
"""

import atexit
import json
import os
import threading
import time
from collections.abc import Mapping
from typing import Any

from collectives.diagnosis import record, report, stacks
from collectives.diagnosis.bell import Bell
from collectives.diagnosis.report import State, Waiting

DEFAULT_DEADLINE_S = 600.0
EXIT_CODE = 124  # of a job that a deadline ends: the one of timeout(1)

_POLL_S = 0.5  # between two looks at messages: costs no measurable time
_BUSY_POLL_S = 0.05  # while answers are on their way, and in checked mode
_ANSWER_S = 5.0  # a rank that has not answered by then is missing
_GRACE_S = 5.0  # for a report and MPI_Abort
_LAST_RESORT_S = (
    30.0  # after the deadline a process just ends: neither its own monitor nor another has brought a report out
)
_PAUSE_S = 5.0  # a longer gap between two looks: the process was stopped, and time in operations counts from its end
_STAGGER_S, _MAX_STAGGER_S = 0.25, 4.0  # a rank leaves lower ones time to ask first, so that few do
_ORDER_S = 0.6  # checked mode: a comparison that waits longer is looked into
_CONFIRM_S = 0.15  # and again after this, before it is called a deadlock
_TAG = 1


def deadline_from_environment() -> float:
    """MPITRAIN_DEADLINE_S in seconds, 0 for none. ValueError where it is no such number."""
    said = os.environ.get("MPITRAIN_DEADLINE_S", "")
    try:
        return _checked_deadline(float(said)) if said else DEFAULT_DEADLINE_S
    except ValueError:
        raise ValueError(
            f"MPITRAIN_DEADLINE_S is {said!r}; expected seconds of at least 0, such as 600, or 0 for no deadline"
        ) from None


def _checked_deadline(seconds: float) -> float:
    if not 0 <= seconds < float("inf"):
        raise ValueError(f"deadline {seconds}; expected seconds of at least 0, 0 for none")
    return seconds


def set_deadline(seconds: float) -> None:
    """End the job with a report when an operation of this rank waits longer than this. 0: never. Call it alike on all ranks.

    The default is 600, or MPITRAIN_DEADLINE_S. It counts from the entry into each operation, so ranks may compute as long as they
    like while none of the others waits for them. ValueError for negative numbers, RuntimeError before `world()`.
    """
    if _monitor is None:
        raise RuntimeError("set_deadline: call collectives.world() first")
    _monitor.deadline_s = _checked_deadline(seconds)


class _Inquiry:
    """One question to all ranks, and the answers so far."""

    def __init__(self, purpose: str, number: int, size: int, mine: State, rank: int) -> None:
        self.purpose = purpose  # "deadline" or "order"
        self.number = number
        self.asked = time.monotonic()
        self.states: list[State | None] = [None] * size
        self.states[rank] = mine

    @property
    def complete(self) -> bool:
        return all(state is not None for state in self.states)


class _Clock:
    """Time as a thread sees it that looks often: a long gap means that the process was stopped, and does not count."""

    def __init__(self) -> None:
        self.now = self.awake_since = time.monotonic()

    def look(self) -> float:
        last, self.now = self.now, time.monotonic()
        if self.now - last > _PAUSE_S:
            self.awake_since = self.now
        return self.now

    def late(self, patience_s: float) -> record.Operation | None:
        """An operation that has waited longer."""
        for each in record.open_operations():
            if self.now - max(each.begun, self.awake_since) > patience_s:
                return each
        return None


class Monitor:
    """See above. `mpi`: a communicator of its own over all ranks, or None where threads must not use MPI at the same time."""

    def __init__(self, mpi: Any, rank: int, size: int, *, deadline_s: float, checked: bool) -> None:
        self.mpi, self.rank, self.size, self.checked = mpi, rank, size, checked
        self.deadline_s = deadline_s
        self._process = os.getpid()
        self._bell = Bell()
        self._thread = threading.Thread(target=self._run, name="collectives-monitor", daemon=True)
        # MPI itself may be what is stuck, and the monitor with it: this one uses none.
        self._last_resort = threading.Thread(target=self._give_up, name="collectives-last-resort", daemon=True)
        self._stop = threading.Event()
        self._left = False
        self._key: Any = None  # of an attribute that MPI_Finalize deletes
        self._sending: list[tuple[Any, bytes]] = []
        self._inquiry: _Inquiry | None = None
        self._num_asked = 0
        self._quiet_until = {"deadline": 0.0, "order": 0.0}
        self._suspects: dict[int, int] = {}  # rank: number of its operation, as the last look at the order found
        self._clock = _Clock()

    def start(self) -> None:
        """Begin to listen. From the main thread also to SIGUSR2, unless the user's program does."""
        if threading.current_thread() is threading.main_thread():
            self._bell.ring_at_signal()
        if self.mpi is not None:
            self._leave_before_finalize()
        atexit.register(self._at_exit)
        self._thread.start()
        self._last_resort.start()

    def _leave_before_finalize(self) -> None:
        """Leave also where the program ends MPI by itself: before all else that deletes the attributes of COMM_SELF."""
        from mpi4py import MPI

        self._key = MPI.Comm.Create_keyval(delete_fn=lambda *_: self.leave())
        MPI.COMM_SELF.Set_attr(self._key, True)

    def _at_exit(self) -> None:
        self.leave()
        if self._key is not None and self._talks() and os.getpid() == self._process:
            from mpi4py import MPI

            MPI.COMM_SELF.Delete_attr(self._key)  # Python is gone when mpi4py's own exit hook finalizes MPI

    def leave(self) -> None:
        """This rank's program has ended: answer until those of all ranks have, then stop. MPI_Finalize would wait for them too."""
        if os.getpid() != self._process or self._left:
            return
        self._left = together = True
        if self._talks():
            try:
                request, nap_s = self.mpi.Ibarrier(), 1e-4
                while not request.Test():
                    time.sleep(nap_s)
                    nap_s = min(2 * nap_s, 1e-2)
            except Exception:  # a rank died and the job goes on: nobody to wait for
                together = False
        self._stop.set()
        self._bell.ring()
        self._thread.join(_GRACE_S)
        self._last_resort.join(_GRACE_S)
        if self._talks() and together and not self._thread.is_alive():
            self.mpi.Free()

    def _talks(self) -> bool:
        from mpi4py import MPI

        return self.mpi is not None and not MPI.Is_finalized()

    # The thread

    def _run(self) -> None:
        while not self._stop.is_set():
            busy = self._inquiry is not None or self.checked
            signalled = self._bell.wait(_BUSY_POLL_S if busy else _POLL_S)
            if self._stop.is_set():
                return
            if signalled:
                record.dump("SIGUSR2")
            now = self._clock.look()
            if self._talks():
                self._receive()
            if self._inquiry is None:
                self._look(now)
            else:
                self._follow(self._inquiry, now)

    def _look(self, now: float) -> None:
        """Ask where the others are if an operation of this rank has waited too long."""
        if self._late() is not None:
            if now > self._quiet_until["deadline"]:
                self._end_late()
        elif self.checked and now > self._quiet_until["order"] and self._talks():
            stagger = min(self.rank * _STAGGER_S / 10, 0.4)
            if any(each.log.comparing and now - each.begun > _ORDER_S + stagger for each in record.open_operations()):
                self._ask("order")

    def _late(self) -> record.Operation | None:
        """The operation that has passed the deadline, after the time left to lower ranks."""
        if not self.deadline_s or self.size == 1:
            return None
        stagger = min(self.rank * _STAGGER_S, _MAX_STAGGER_S) if self.mpi is not None else 0.0
        return self._clock.late(self.deadline_s + stagger)

    def _end_late(self) -> None:
        """Ask all ranks where they are. Their answers, or the lack of them, will end the job."""
        record.write_file(f"the deadline of {self.deadline_s:g} s has passed")
        if self._talks():
            self._ask("deadline")
        else:
            record.say(record.text(f"the deadline of {self.deadline_s:g} s has passed", record.NUM_SHOWN))
            _end_job()

    def _give_up(self) -> None:
        """The last resort: end this process, and the launcher the job, long after the deadline."""
        clock = _Clock()
        while not self._stop.wait(_POLL_S):
            clock.look()
            if self.deadline_s and self.size > 1 and clock.late(self.deadline_s + _LAST_RESORT_S) is not None:
                record.dump("the deadline has passed, and MPI does not answer")
                os._exit(EXIT_CODE)

    def _follow(self, inquiry: _Inquiry, now: float) -> None:
        """Take the answers that have come, once they are all or no more will come."""
        if inquiry.purpose == "deadline":
            late = self._late()
            if late is None:  # it came to an end at the last moment
                self._inquiry = None
            elif inquiry.complete or now - inquiry.asked > _ANSWER_S:
                mine = _waiting(late)
                record.say(report.deadline_report(self.rank, mine, inquiry.states, self.deadline_s))
                _end_job()
        elif inquiry.complete or now - inquiry.asked > _ANSWER_S:
            self._inquiry = None
            self._judge_order(inquiry, now)

    def _judge_order(self, inquiry: _Inquiry, now: float) -> None:
        """The ranks that wait for each other in different communicators hear so, if a second look finds them where they were."""
        states = {rank: state for rank, state in enumerate(inquiry.states) if state is not None}
        stuck = report.deadlocked(states)
        suspects = {rank: each["number"] for rank, each in stuck.items()}
        if suspects and suspects == self._suspects:
            verdict = report.deadlock_report(stuck)
            for rank in stuck:
                self._send(rank, {"kind": "verdict", "text": verdict})
        self._suspects = suspects
        self._quiet_until["order"] = now + (_CONFIRM_S if suspects else max(2 * _ORDER_S, self._longest_wait(now)))

    def _longest_wait(self, now: float) -> float:
        """So that a rank which is merely slow is asked ever more rarely."""
        return max((now - each.begun for each in record.open_operations()), default=0.0)

    # Messages: JSON objects of a "kind". Never waited for: the receiver may be stopped.

    def _ask(self, purpose: str) -> None:
        self._num_asked += 1
        self._inquiry = _Inquiry(purpose, self._num_asked, self.size, self._state(), self.rank)
        for rank in range(self.size):
            if rank != self.rank:
                self._send(rank, {"kind": "ask", "purpose": purpose, "number": self._num_asked})

    def _send(self, rank: int, message: Mapping[str, Any]) -> None:
        if rank == self.rank:
            self._take(rank, message)
            return
        data = json.dumps(message).encode()
        self._sending = [each for each in self._sending if not each[0].Test()]
        self._sending.append((self.mpi.Isend(data, rank, _TAG), data))

    def _receive(self) -> None:
        from mpi4py import MPI

        status = MPI.Status()
        while (message := self.mpi.Improbe(MPI.ANY_SOURCE, _TAG, status)) is not None:
            data = bytearray(status.Get_count(MPI.BYTE))
            message.Recv(data)
            self._take(status.Get_source(), json.loads(data))

    def _take(self, rank: int, message: Mapping[str, Any]) -> None:
        inquiry = self._inquiry
        if message["kind"] == "ask":
            purpose = message["purpose"]
            if purpose == "deadline":
                record.write_file(f"rank {rank} has passed the deadline")
            # Whoever asked first goes on; of those that asked at the same time, the lowest.
            mine = inquiry is not None and inquiry.purpose == purpose
            if not mine or rank < self.rank:
                if mine:
                    self._inquiry = None
                pause = _ANSWER_S + 2 * _GRACE_S if purpose == "deadline" else 4 * _CONFIRM_S
                self._quiet_until[purpose] = time.monotonic() + pause
            self._send(rank, {"kind": "answer", "number": message["number"], "state": self._state()})
        elif message["kind"] == "answer":
            if inquiry is not None and inquiry.number == message["number"]:
                inquiry.states[rank] = message["state"]
        elif message["kind"] == "verdict":
            for each in record.open_operations():
                if each.log.comparing:
                    each.log.verdict = message["text"]

    def _state(self) -> State:
        """What this rank says of itself."""
        waiting = record.open_operations()
        # The ring may have overtaken what a thread has been in for long.
        last = {each.log.key: each for each in [*waiting, *record.last_operations()] if each.sequence}
        main = threading.main_thread().ident or 0
        return State(
            waiting=[_waiting(each) for each in waiting],
            standing=stacks.standing(main),
            left=self._left,
            last={key: f"{each.call} ({each.state})" for key, each in last.items()},
            entered={key: each.sequence for key, each in last.items()},
            serving={key: each.thread for key, each in last.items()},
            main=main,
        )


def _waiting(operation: record.Operation) -> Waiting:
    log = operation.log
    return Waiting(
        number=operation.number,
        key=log.key,
        label=str(log),
        awaited=list(log.awaited(operation)),
        sequence=operation.sequence,
        call=operation.call,
        algorithm=operation.algorithm,
        age=time.monotonic() - operation.begun,
        site=stacks.call_site(operation.thread),
        thread=operation.thread,
        comparing=log.comparing,
    )


def _end_job() -> None:
    from mpi4py import MPI

    MPI.COMM_WORLD.Abort(EXIT_CODE)


_monitor: Monitor | None = None


def start(world: Any, *, checked: bool) -> None:
    """Start this process's monitor. Collective over `world`, an mpi4py communicator of all ranks, which it clones."""
    global _monitor
    from mpi4py import MPI

    deadline_s = deadline_from_environment()
    if folder := os.environ.get("MPITRAIN_RECORD_DIR"):
        record.set_record_folder(folder)
    record.Place.rank = world.rank
    talks = world.size > 1 and MPI.Query_thread() == MPI.THREAD_MULTIPLE
    _monitor = Monitor(world.Dup() if talks else None, world.rank, world.size, deadline_s=deadline_s, checked=checked)
    _monitor.start()

"""The monitor: a thread of each rank that answers for the rank while the rank itself is stuck in an operation.

- SIGUSR2: the monitor dumps the flight record. Python's own handlers would wait until the main thread returns from MPI; see bell.py.
- The notice: when an operation of this rank has waited for long, the monitor asks all ranks for their state and prints
  where they are, with one line for ranks in the same place.
- The deadline: when an operation of this rank has waited too long, the monitor asks all ranks for their state, prints one report and
  ends the job. If several ranks ask, only the lowest of them continues.
- An error that ends this rank: if it says so (`show_all_ranks`), the monitor asks all ranks for their state and prints their places.
- The end of a rank: the monitor tells rank 0, which then asks the running ranks whether they wait for a rank that has ended. If one
  does, rank 0 prints a report and ends the job, or the ended rank if the job survives losses (evictions.py).
- The loss of a rank, by its death or the silence of its host (losses.py): a neighbour reports it and ends the job.
- Checked mode: the monitor finds ranks that wait for each other in different communicators.

A rank whose program has ended still answers, until all programs have ended. If MPI lacks THREAD_MULTIPLE, monitors cannot communicate:
at the deadline a rank only writes its own record and ends the job.
"""

import atexit
import os
import threading
import time
from collections.abc import Mapping
from typing import Any

from collectives.diagnosis import dump, loss, oom, record, uncaught
from collectives.diagnosis.ending import Before, LastWords, abort_job, end_together, leave_alone
from collectives.diagnosis.failure import write_failure
from collectives.diagnosis.finalize import leave_out_barrier
from collectives.diagnosis.hangs import answer, deadline, long_wait, notice
from collectives.diagnosis.hangs.answer import State
from collectives.diagnosis.hangs.bell import Bell
from collectives.diagnosis.hangs.channel import MonitorChannel
from collectives.diagnosis.hangs.conclusions import ORDER_S, Conclusions
from collectives.diagnosis.hangs.deadline import Clock, Deadline, Standstill, last_resort
from collectives.diagnosis.hangs.evictions import Evictions, Stuck, endless_recovery
from collectives.diagnosis.hangs.inquiry import ANSWER_S, GRACE_S, Inquiries
from collectives.diagnosis.hangs.losses import Losses
from collectives.diagnosis.hangs.node.board import Board
from collectives.diagnosis.job import Job, keep
from collectives.diagnosis.ring import goodbye, roster

_POLL_S = 0.5  # between two looks at messages, whose time is not measurable
_BUSY_POLL_S = 0.05  # while the monitor waits for answers, in checked mode, and when the program has ended
_STAGGER_S, _MAX_STAGGER_S = 0.25, 4.0  # a rank waits this long for each lower rank to ask first, so that few ranks ask
_ENDED_S = 0.3  # after this time an ended rank tells rank 0, unless all programs have ended


class Monitor:
    """See above. `mpi`: a separate communicator of all ranks. `talks`: whether several threads may use MPI at the same time."""

    def __init__(self, mpi: Any, *, talks: bool, checked: bool) -> None:
        self.checked, self._may_talk = checked, talks
        self._process = os.getpid()
        self._bell = Bell()
        self._turn = threading.Lock()  # of the thread, and of a recovery that changes the ranks
        self._notices = notice.Notices(notice.from_environment())
        self._wants_places = False  # a thread that ends the job waits for `_has_shown`
        self._has_shown = threading.Event()
        self._join(mpi)
        self._thread = threading.Thread(target=self._run, name="collectives-monitor", daemon=True)
        self._stop = threading.Event()
        self._last_resort = threading.Thread(
            target=last_resort, args=(self._stop,), name="collectives-last-resort", daemon=True
        )
        self._ended = ""  # how this rank's program has ended
        self._ended_at = 0.0
        self._told_end = False
        self._clock = Clock()
        self._standstill = Standstill()

    def _join(self, mpi: Any) -> None:
        """Begin to watch the ranks of `mpi`. Collective over them."""
        names = roster.gather(mpi)  # first: a report meanwhile has the old numbers
        oom.begin()
        self.mpi, self.rank, self.size, self._roster = mpi, mpi.rank, mpi.size, names
        self._channel = MonitorChannel(mpi if self._may_talk else None)
        self._board = Board(mpi)
        LastWords.note = self._board.note_last
        self._losses = Losses(mpi, self._roster, self._board, self._bell)
        self._evictions = Evictions(self.rank, self._roster, self._board, self._send)
        self._ended_ranks: dict[int, State] = {}  # on rank 0: the ranks that have told their end
        self._inquiries = Inquiries(self.rank, self._roster, self._board, self._send, self._notices, self._state)
        self._conclusions = Conclusions(
            self.rank,
            self._roster,
            self._board,
            self._send,
            inquiries=self._inquiries,
            notices=self._notices,
            evictions=self._evictions,
            has_shown=self._has_shown,
        )

    def rejoin(self, mpi: Any) -> None:
        """Watch the ranks of `mpi`, which a loss has left, instead of all ranks before. Collective over them."""
        with self._turn:
            if (unsaid := self._losses.unsaid(_gone(self.mpi, mpi))) is not None:
                self._conclusions.lose(unsaid.ranks, unsaid.why)
            self._losses.close()
            self._board.close()
            LastWords.note = None
            self._join(mpi)
            self._losses.start()
            dump.RecordOutput.rank = self.rank
            loss.end_recovery()

    def start(self) -> None:
        """Start the threads. If called from the main thread, also handle SIGUSR2, unless the user's program does."""
        from mpi4py import MPI

        if threading.current_thread() is threading.main_thread():
            self._bell.ring_at_signal()
        self._losses.start()
        # Call `leave` also when the program itself calls MPI.Finalize, which first deletes the attributes of COMM_SELF.
        key = MPI.Comm.Create_keyval(delete_fn=lambda *_: self.leave("the program called MPI.Finalize"))
        MPI.COMM_SELF.Set_attr(key, True)
        uncaught.OtherRanks.show = self.show_places
        atexit.register(lambda: self.leave(uncaught.how_ended()))
        self._thread.start()
        if self.size > 1:
            self._last_resort.start()

    def leave(self, how: str) -> None:
        """After the end of this rank's program: answer until all ranks' programs have ended, for which MPI_Finalize waits too."""
        if os.getpid() != self._process or self._ended:
            return
        self._ended_at = time.monotonic()
        self._ended = how
        self._bell.ring()
        together = True
        try:
            end_together(self.mpi, well=uncaught.ends_well())
        except Exception:  # a rank has died and the job goes on, so this rank waits for no other rank
            if Job.survives and not Job.is_done and uncaught.ends_well():
                leave_alone(f"has ended early: {how}")  # the others recover without it
            together, Job.ends_alone = False, True
            leave_out_barrier()
            if Before.others:
                Before.others.end(well=False)
        goodbye.say()
        self._stop.set()
        self._bell.ring()
        self._thread.join(GRACE_S)
        if self._last_resort.is_alive():
            self._last_resort.join(GRACE_S)
        if not self._thread.is_alive():
            self._losses.close()
            self._board.close()
            if together:
                self.mpi.Free()

    def show_places(self) -> None:
        """Print the places of the other ranks. For the thread that ends the job after an error."""
        if self._thread.is_alive() and self._talks():
            self._wants_places = True
            self._bell.ring()
            self._has_shown.wait(ANSWER_S + GRACE_S)

    def _talks(self) -> bool:
        from mpi4py import MPI

        return self._may_talk and not MPI.Is_finalized()

    # The thread

    def _run(self) -> None:
        while not self._stop.is_set():
            busy = (
                self._inquiries.current is not None
                or self.checked
                or self._ended
                or self._losses.is_pending
                or self._is_near()
            )
            signalled = self._bell.wait(_BUSY_POLL_S if busy else _POLL_S)
            if self._stop.is_set():
                return
            if signalled:
                dump.dump("SIGUSR2")
            if not self._turn.acquire(timeout=_POLL_S):
                loss.interrupt_recovery()  # the main thread waits in `rejoin`
                self._end(endless_recovery())
                continue
            try:
                self._mind(self._clock.look())
            finally:
                self._turn.release()

    def _mind(self, now: float) -> None:
        """Look at all that concerns this rank and the others, and answer their monitors."""
        if (lost := self._losses.look(now)) is not None:
            self._conclusions.lose(lost.ranks, lost.why, may_go_on=not lost.is_silent)
        self._board.note(now, loss.RECOVERING if loss.Known.is_handled else "")
        if loss.is_known():
            if not loss.Known.is_handled:
                loss.revoke_all()  # also what the main thread has made since the last look
            self._end(self._evictions.after_loss())
            return
        if self._talks():
            for rank, message in self._channel.received():
                self._take(rank, message)
        inquiry = self._inquiries.current
        if inquiry is not None and inquiry.purpose == "notice" and self._late() is not None:
            inquiry = self._inquiries.current = None  # the deadline's report replaces the notice
        if inquiry is None:
            self._look(now)
        elif inquiry.purpose == "deadline" or inquiry.is_over(now):
            late = self._late() if inquiry.purpose == "deadline" else None
            self._conclusions.follow(inquiry, now, late)

    def _end(self, stuck: Stuck | None) -> None:
        """End the job if a recovery cannot end."""
        if stuck is not None:
            self._conclusions.lose([], f"{self._roster.name(self.rank)}: {stuck.why}", stuck.code)

    def _look(self, now: float) -> None:
        """Ask all ranks for their state if an operation of this rank has waited too long, or if a rank has ended."""
        if self._wants_places:
            self._wants_places = False
            self._inquiries.ask("places", why=f"an error on rank {self.rank} ends the job")
        elif self._late() is not None:
            if now > self._inquiries.quiet_until["deadline"]:
                self._end_late()
        elif self.size > 1 and (wait := self._notices.due(self._clock, self._stagger())) is not None:
            self._notice(wait, now)
        elif not self._talks():
            return
        elif self._ended and not self._told_end and now - self._ended_at > _ENDED_S:
            self._told_end = True
            self._send(0, {"kind": "end", "state": self._state()})
        elif 0 < len(self._ended_ranks) < self.size and now > self._inquiries.quiet_until["end"]:
            self._inquiries.ask("end", known=self._ended_ranks)
        elif self.checked and now > self._inquiries.quiet_until["order"]:
            stagger = min(self.rank * _STAGGER_S / 10, 0.4)
            begun = record.open_operations(begun_before=now - ORDER_S - stagger)
            if any(each.log.comparing for each in begun):
                self._inquiries.ask("order")

    def _late(self) -> record.Operation | None:
        """The operation that has passed the deadline plus this rank's stagger."""
        if self.size == 1:
            return None
        late = self._clock.late(self._stagger())
        if late is None and Deadline.seconds:
            limit = self._clock.limit(Deadline.seconds + self._stagger())
            late = self._standstill.late(self._clock.now, limit)
        return late

    def _is_near(self) -> bool:
        """Whether an operation passes the deadline within a second. The monitor then looks often, to be on time."""
        return self.size > 1 and self._clock.late(-min(1.0, (Deadline.seconds or 0.0) / 2)) is not None

    def _stagger(self) -> float:
        """The time for which this rank lets lower ranks ask first."""
        return min(self.rank * _STAGGER_S, _MAX_STAGGER_S) if self._may_talk else 0.0

    def _notice(self, wait: notice.Wait, now: float) -> None:
        """Ask all ranks for their state, for a notice about a wait of this rank."""
        age_s = now - wait.begun
        if self._talks():
            self._inquiries.ask("notice", wait=wait, age_s=age_s)
        else:
            dump.say(long_wait.lone_notice(self.rank, wait.number, self._state(), Deadline.seconds or 0.0))
        self._notices.told(age_s)

    def _end_late(self) -> None:
        """Ask all ranks for their state. When they have answered, or the time for answers is over, `Conclusions` ends the job."""
        why = f"the deadline of {Deadline.seconds:g} s has passed"
        dump.write_file(why)
        if self._talks():
            self._inquiries.ask("deadline", why=f"rank {self.rank} has passed the deadline")
        else:
            text = dump.text(why, dump.NUM_SHOWN)
            dump.say(text)
            write_failure(text)
            abort_job(deadline.EXIT_CODE)

    # Messages, each of a "kind"

    def _state(self) -> State:
        return answer.state(self.rank, self._ended)

    def _send(self, rank: int, message: Mapping[str, Any]) -> None:
        if rank == self.rank:
            self._take(rank, message)
        else:
            self._channel.send(rank, message)

    def _take(self, rank: int, message: Mapping[str, Any]) -> None:
        kind = message["kind"]
        if kind == "end":
            self._ended_ranks[rank] = message["state"]
        elif kind in ("end yourself", "end another"):
            self._evictions.take(message)
        elif kind == "verdict":
            for each in record.open_operations():
                if each.log.comparing:
                    each.log.verdict = message["text"]
        else:
            self._inquiries.take(rank, message)


def start(world: Any, *, checked: bool) -> None:
    """Start this process's monitor. Collective over `world`, an mpi4py communicator of all ranks, which it clones."""
    from mpi4py import MPI

    Deadline.seconds = deadline.from_environment()
    if folder := os.environ.get("MPITRAIN_RECORD_DIR"):
        dump.set_record_folder(folder)
    dump.RecordOutput.rank = world.rank
    talks = world.size > 1 and MPI.Query_thread() == MPI.THREAD_MULTIPLE
    _of_process.append(Monitor(keep(world.Dup()), talks=talks, checked=checked))
    _of_process[0].start()


_of_process: list[Monitor] = []


def rejoin(left: Any) -> None:
    """Let this process's monitor watch the ranks of `left`, an mpi4py communicator. Collective over them."""
    _of_process[0].rejoin(keep(left.Dup()))


def _gone(before: Any, left: Any) -> set[int]:
    """The ranks of a communicator whose processes are not in another one. Local."""
    from mpi4py import MPI

    groups = before.Get_group(), left.Get_group()
    ranks = MPI.Group.Translate_ranks(groups[0], range(before.size), groups[1])
    for group in groups:
        group.Free()
    return {rank for rank, other in enumerate(ranks) if other == MPI.UNDEFINED}

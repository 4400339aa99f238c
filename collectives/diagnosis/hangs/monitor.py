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
from collections.abc import Mapping, Sequence
from typing import Any

from collectives.diagnosis import dump, loss, oom, record, uncaught
from collectives.diagnosis.ending import Before, LastWords, abort_job, end_together, leave_alone
from collectives.diagnosis.failure import write_failure
from collectives.diagnosis.finalize import leave_out_barrier
from collectives.diagnosis.hangs import answer, deadline, deadlock, long_wait, notice, report
from collectives.diagnosis.hangs.answer import State, Waiting
from collectives.diagnosis.hangs.bell import Bell
from collectives.diagnosis.hangs.board import Board
from collectives.diagnosis.hangs.channel import MonitorChannel
from collectives.diagnosis.hangs.deadline import Clock, Deadline, Standstill, last_resort
from collectives.diagnosis.hangs.evictions import Evictions, Stuck, endless_recovery
from collectives.diagnosis.hangs.inquiry import ANSWER_S, CONFIRM_S, GRACE_S, LOOK_S, Inquiries, Inquiry
from collectives.diagnosis.hangs.look import last_record
from collectives.diagnosis.hangs.losses import Losses
from collectives.diagnosis.job import Job, keep
from collectives.diagnosis.ring import goodbye, roster

_POLL_S = 0.5  # between two looks at messages, whose time is not measurable
_BUSY_POLL_S = 0.05  # while the monitor waits for answers, in checked mode, and when the program has ended
_LAUNCHER_S = 1.0  # for the launcher to end the job of a dead rank with that rank's exit code
_STAGGER_S, _MAX_STAGGER_S = 0.25, 4.0  # a rank waits this long for each lower rank to ask first, so that few ranks ask
_ORDER_S = 0.6  # checked mode: after this wait in a comparison the monitor asks the other ranks
_ENDED_S = 0.3  # after this time an ended rank tells rank 0, unless all programs have ended
_ROUND_S = 1.0  # between two rounds in which rank 0 asks whether ranks wait for an ended rank
_ROUND_SHARE = 0.05  # of rank 0's time at most, because reading thousands of answers takes long


class Monitor:
    """See above. `mpi`: a separate communicator of all ranks. `talks`: whether several threads may use MPI at the same time."""

    def __init__(self, mpi: Any, *, talks: bool, checked: bool) -> None:
        self.checked, self._may_talk = checked, talks
        self._process = os.getpid()
        self._bell = Bell()
        self._turn = threading.Lock()  # of the thread, and of a recovery that changes the ranks
        self._notices = notice.Notices(notice.from_environment())
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
        self._wants_places = False  # a thread that ends the job waits for `_has_shown`
        self._has_shown = threading.Event()

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
        self._evicted: set[int] = set()  # the ranks that were to be ended at the deadline
        self._ended_ranks: dict[int, State] = {}  # on rank 0: the ranks that have told their end
        self._inquiries = Inquiries(self.rank, self._roster, self._board, self._send, self._notices, self._state)

    def rejoin(self, mpi: Any) -> None:
        """Watch the ranks of `mpi`, which a loss has left, instead of all ranks before. Collective over them."""
        with self._turn:
            if (unsaid := self._losses.unsaid(_gone(self.mpi, mpi))) is not None:
                self._lose(unsaid.ranks, unsaid.why)
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
        uncaught.Others.show = self.show_places
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
            self._lose(lost.ranks, lost.why, may_go_on=not lost.is_silent)
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
            self._follow(inquiry, now)

    def _end(self, stuck: Stuck | None) -> None:
        """End the job if a recovery cannot end."""
        if stuck is not None:
            self._lose([], f"{self._roster.name(self.rank)}: {stuck.why}", stuck.code)

    def _lose(self, ranks: Sequence[int], report: str, code: int = 1, *, may_go_on: bool = True) -> None:
        """Act on the loss of `ranks`: they have died, their host is silent, or they are past the deadline.

        In a job that survives losses, the ranks past the deadline end, and the others go on. Another job ends here, and so does one
        with a silent host: MPI would wait for that host, and its ranks for this one. So does a job of which a rank could not be ended,
        because no other rank of its host can do it. The report comes first, because the launcher may end this rank at any time: MPICH's
        does so within a millisecond.
        """
        if Job.survives and ranks and may_go_on:
            loss.Known.causes.append(report.lstrip().partition("\n")[0])
            if code == deadline.EXIT_CODE:
                dump.say(report)
                self._inquiries.current = None
                self._inquiries.quiet_until["deadline"] = time.monotonic() + GRACE_S
                self._evicted.update(ranks)
                for rank in sorted(ranks, key=lambda rank: rank == self.rank):  # this one last: it ends at once
                    self._evictions.evict(rank, "this rank is past the deadline")
            elif not loss.is_known():  # else another rank has said so, or will
                loss.note()  # first, because the main thread may ask now
                dump.say(f"{report}. The other ranks go on.")
            return
        report += "" if code == deadline.EXIT_CODE else ". The job ends."
        dump.say(report)
        goodbye.say(goodbye.End.ABORT)
        slots = [slot for rank in ranks if (slot := self._board.read(rank)) is not None]
        records = "".join(map(last_record, slots)) if code != deadline.EXIT_CODE else ""
        write_failure(report + records)
        dump.say(records.lstrip("\n"))
        dump.write_file(f"the loss of {self._roster.names(ranks)}")
        if code != deadline.EXIT_CODE:
            time.sleep(_LAUNCHER_S)
        abort_job(code)

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
            begun = record.open_operations(begun_before=now - _ORDER_S - stagger)
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
        """Ask all ranks for their state. When they have answered, or the time for answers is over, `_follow` ends the job."""
        why = f"the deadline of {Deadline.seconds:g} s has passed"
        dump.write_file(why)
        if self._talks():
            self._inquiries.ask("deadline", why=f"rank {self.rank} has passed the deadline")
        else:
            text = dump.text(why, dump.NUM_SHOWN)
            dump.say(text)
            write_failure(text)
            abort_job(deadline.EXIT_CODE)

    def _follow(self, inquiry: Inquiry, now: float) -> None:
        """Act on the answers to an inquiry. One for a deadline is dropped if its operation has ended in the meantime."""
        if inquiry.purpose == "deadline":
            late = self._late()
            if late is None and inquiry.late is None:
                self._inquiries.current = None
                return
            if late is not None and inquiry.late is None and inquiry.missing and now - inquiry.asked > LOOK_S:
                inquiry.late = answer.waiting(late, self.rank)
                self._inquiries.look_at(inquiry.missing, inquiry)
            if inquiry.is_over(now):
                waiting = inquiry.late if late is None else answer.waiting(late, self.rank)
                assert waiting is not None
                self._end_at_deadline(waiting, inquiry)
            return
        self._inquiries.current = None
        if inquiry.purpose == "notice":
            assert inquiry.wait is not None
            if self._notices.goes_on(inquiry.wait):
                dump.say(
                    long_wait.notice(
                        self.rank, inquiry.wait.number, inquiry.states, Deadline.seconds or 0.0, self._roster
                    )
                )
        elif inquiry.purpose == "places":
            dump.say(report.error_report(self.rank, inquiry.states, self._roster))
            self._has_shown.set()
        elif inquiry.purpose == "order":
            self._judge_order(inquiry, now)
        else:
            self._judge_end(inquiry, now)

    def _end_at_deadline(self, late: Waiting, inquiry: Inquiry) -> None:
        looks = {rank: each.words for rank, each in inquiry.looks.items()}
        lost, ends = report.missing_ranks(late, inquiry.states), "The job ends."
        may_go_on = False
        if Job.survives and (lost := report.ranks_to_end(late, inquiry.states)):
            may_go_on = self._evicted.isdisjoint(lost)
            ends = f"The job goes on without {self._roster.names(lost)}."
            if not may_go_on:
                ends = f"{self._roster.names(lost)} could not be ended from another host, so the job ends."
        text = report.deadline_report(
            self.rank, late, inquiry.states, Deadline.seconds or 0.0, self._roster, looks, ends
        )
        self._lose(lost, text, deadline.EXIT_CODE, may_go_on=may_go_on)

    def _judge_order(self, inquiry: Inquiry, now: float) -> None:
        """Send the verdict to ranks that wait for each other in different communicators, if two inquiries find the same ranks."""
        stuck = deadlock.deadlocked({rank: state for rank, state in enumerate(inquiry.states) if state is not None})
        if self._inquiries.confirmed("order", stuck):
            verdict = deadlock.deadlock_report(stuck)
            for rank in stuck:
                self._send(rank, {"kind": "verdict", "text": verdict})
        # The longer a rank waits without a deadlock, the less often the monitor asks.
        longest = max((now - each.begun for each in record.open_operations()), default=0.0)
        self._inquiries.quiet_until["order"] = now + (CONFIRM_S if stuck else max(2 * _ORDER_S, longest))

    def _judge_end(self, inquiry: Inquiry, now: float) -> None:
        """End the job if a rank waits for a rank that has ended, and two inquiries find the same wait.

        A job that survives losses goes on without the ranks that have ended.
        """
        stuck = report.abandoned(inquiry.states)
        if self._inquiries.confirmed("end", stuck):
            gone = report.gone(stuck, inquiry.states)
            ends = f"The job goes on without {self._roster.names(gone)}." if Job.survives else "The job ends."
            text = report.end_report(stuck, inquiry.states, self._roster, ends)
            dump.say(text)
            if Job.survives:
                self._inquiries.quiet_until["end"] = now + GRACE_S
                for rank in sorted(gone, key=lambda rank: rank == self.rank):  # this rank last
                    self._evictions.evict(rank, "the program of this rank has ended before the job")
                return
            write_failure(text)
            abort_job(1)
        elif stuck:
            why = "other ranks wait for a rank that has ended"
            dump.write_file(why)
            self._inquiries.ask("end", why=why)  # all ranks, so that ended ranks write their files too
        else:
            spent_s = time.thread_time() - inquiry.asked_cpu
            self._inquiries.quiet_until["end"] = now + max(_ROUND_S, spent_s / _ROUND_SHARE)

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

"""What follows from a loss, and from the answers to an inquiry: a notice, a report, the end of a rank or of the job."""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from collectives.diagnosis import dump, loss, record
from collectives.diagnosis.ending import abort_job
from collectives.diagnosis.failure import write_failure
from collectives.diagnosis.hangs import answer, deadline, deadlock, hang_report, long_wait
from collectives.diagnosis.hangs.answer import Waiting
from collectives.diagnosis.hangs.deadline import Deadline
from collectives.diagnosis.hangs.evictions import Evictions
from collectives.diagnosis.hangs.inquiry import CONFIRM_S, GRACE_S, LOOK_S, Inquiries, Inquiry
from collectives.diagnosis.hangs.node.board import Board
from collectives.diagnosis.hangs.node.look import last_record
from collectives.diagnosis.hangs.notice import Notices
from collectives.diagnosis.job import Job
from collectives.diagnosis.ring import goodbye
from collectives.diagnosis.ring.roster import Roster

_LAUNCHER_S = 1.0  # for the launcher to end the job of a dead rank with that rank's exit code
ORDER_S = 0.6  # checked mode: after this wait in a comparison the monitor asks the other ranks
_ROUND_S = 1.0  # between two rounds in which rank 0 asks whether ranks wait for an ended rank
_ROUND_SHARE = 0.05  # of rank 0's time at most, because reading thousands of answers takes long


class Conclusions:
    """Acts for the monitor of a rank. Ranks are those of `roster`; `send(rank, message)` sends a message to the monitor of a rank.

    `has_shown` is set when the places of the ranks have been printed.
    """

    def __init__(
        self,
        rank: int,
        roster: Roster,
        board: Board,
        send: Callable[[int, Mapping[str, Any]], None],
        *,
        inquiries: Inquiries,
        notices: Notices,
        evictions: Evictions,
        has_shown: threading.Event,
    ) -> None:
        self._rank, self._roster, self._board, self._send = rank, roster, board, send
        self._inquiries, self._notices, self._evictions, self._has_shown = inquiries, notices, evictions, has_shown
        self._evicted: set[int] = set()  # the ranks that were to be ended at the deadline

    def lose(self, ranks: Sequence[int], report: str, code: int = 1, *, may_go_on: bool = True) -> None:
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
                for rank in sorted(ranks, key=lambda rank: rank == self._rank):  # this one last: it ends at once
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

    def follow(self, inquiry: Inquiry, now: float, late: record.Operation | None) -> None:
        """Act on the answers to an inquiry. One for a deadline is dropped if its operation has ended in the meantime.

        `late`: the operation of this rank that is past the deadline now, for such an inquiry.
        """
        if inquiry.purpose == "deadline":
            if late is None and inquiry.late is None:
                self._inquiries.current = None
                return
            if late is not None and inquiry.late is None and inquiry.missing and now - inquiry.asked > LOOK_S:
                inquiry.late = answer.waiting(late, self._rank)
                self._inquiries.look_at(inquiry.missing, inquiry)
            if inquiry.is_over(now):
                waiting = inquiry.late if late is None else answer.waiting(late, self._rank)
                assert waiting is not None
                self._end_at_deadline(waiting, inquiry)
            return
        self._inquiries.current = None
        if inquiry.purpose == "notice":
            assert inquiry.wait is not None
            if self._notices.goes_on(inquiry.wait):
                dump.say(
                    long_wait.notice(
                        self._rank, inquiry.wait.number, inquiry.states, Deadline.seconds or 0.0, self._roster
                    )
                )
        elif inquiry.purpose == "places":
            dump.say(hang_report.error_report(self._rank, inquiry.states, self._roster))
            self._has_shown.set()
        elif inquiry.purpose == "order":
            self._judge_order(inquiry, now)
        else:
            self._judge_end(inquiry, now)

    def _end_at_deadline(self, late: Waiting, inquiry: Inquiry) -> None:
        looks = {rank: each.words for rank, each in inquiry.looks.items()}
        lost, ends = hang_report.missing_ranks(late, inquiry.states), "The job ends."
        may_go_on = False
        if Job.survives and (lost := hang_report.ranks_to_end(late, inquiry.states)):
            may_go_on = self._evicted.isdisjoint(lost)
            ends = f"The job goes on without {self._roster.names(lost)}."
            if not may_go_on:
                ends = f"{self._roster.names(lost)} could not be ended from another host, so the job ends."
        text = hang_report.deadline_report(
            self._rank, late, inquiry.states, Deadline.seconds or 0.0, self._roster, looks, ends
        )
        self.lose(lost, text, deadline.EXIT_CODE, may_go_on=may_go_on)

    def _judge_order(self, inquiry: Inquiry, now: float) -> None:
        """Send the verdict to ranks that wait for each other in different communicators, if two inquiries find the same ranks."""
        stuck = deadlock.deadlocked({rank: state for rank, state in enumerate(inquiry.states) if state is not None})
        if self._inquiries.confirmed("order", stuck):
            verdict = deadlock.deadlock_report(stuck)
            for rank in stuck:
                self._send(rank, {"kind": "verdict", "text": verdict})
        # The longer a rank waits without a deadlock, the less often the monitor asks.
        longest = max((now - each.begun for each in record.open_operations()), default=0.0)
        self._inquiries.quiet_until["order"] = now + (CONFIRM_S if stuck else max(2 * ORDER_S, longest))

    def _judge_end(self, inquiry: Inquiry, now: float) -> None:
        """End the job if a rank waits for a rank that has ended, and two inquiries find the same wait.

        A job that survives losses goes on without the ranks that have ended.
        """
        stuck = hang_report.abandoned(inquiry.states)
        if self._inquiries.confirmed("end", stuck):
            gone = hang_report.gone(stuck, inquiry.states)
            ends = f"The job goes on without {self._roster.names(gone)}." if Job.survives else "The job ends."
            text = hang_report.end_report(stuck, inquiry.states, self._roster, ends)
            dump.say(text)
            if Job.survives:
                self._inquiries.quiet_until["end"] = now + GRACE_S
                for rank in sorted(gone, key=lambda rank: rank == self._rank):  # this rank last
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

"""The Work of an asynchronous barrier in node memory, for which no operation is queued."""

from functools import partial

from collectives.diagnosis.record import Entry
from collectives.diagnosis.stacks import issued_here
from collectives.progress.progress import Progress
from collectives.progress.work import Work
from collectives.transports.node.meeting import NodeMeeting


class Arrived(Work):
    """A barrier that this rank has entered; the other ranks see this in node memory without further calls by this rank.

    While this rank waits, it carries out operations of its queue that all ranks have issued. A rank that has not come to the barrier
    may wait for one of them.
    """

    def __init__(self, meeting: NodeMeeting, entry: Entry, progress: Progress) -> None:
        super().__init__()
        self._progress = progress
        self._meeting, self._count, self._entry, self._site = meeting, meeting.arrive(), entry, issued_here()
        entry.issued()
        entry.leave()  # the record shows the barrier as unfinished only while the program waits for it

    def done(self) -> bool:
        self._ended = self._ended or self._meeting.is_complete(self._count)
        return self._ended

    def _finish(self) -> None:
        if not self.done():
            self._entry.wait()
            self._site.carry_out(partial(self._meeting.wait, self._count, self._progress.advance))
            self._entry.leave()
            self._ended = True

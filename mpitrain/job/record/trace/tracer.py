"""When a run traces: the steps of `log.trace_steps`, and those that `python -m mpitrain trace RUN` asks for."""

import contextlib
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import collectives
from collectives import Communicator
from mpitrain.job.record.gauges.phases import StepClock
from mpitrain.job.record.trace.request import TraceRequests
from mpitrain.job.record.trace.session import Acting, TraceSession

if TYPE_CHECKING:
    from torch import nn

FOLDER = "traces"


class Traced(NamedTuple):
    """A trace of the steps `first` to `last` that was written."""

    path: Path
    first: int
    last: int


class Tracer:
    """The traces of a run, on each rank. Outside traced steps there are no profiler and no hooks.

    A trainer sums `wanted()` over the ranks in a message that each step has anyway, and passes the sum to `agree`. So all ranks begin
    with the next step. It calls `before_step` and `after_step` with the number of the step, from 1, outside the time that it measures.

    A trace that fails on all ranks alike is a line and an answer to the request, and the training goes on.
    """

    def __init__(
        self,
        folder: Path,
        comm: Communicator,
        *,
        model: "nn.Module",
        clock: StepClock,
        passes: Acting,
        traced: tuple[int, int] | None = None,
        say: Callable[[str], object] = lambda line: None,
        read: Callable[[float], float] | None = None,
        host: Hashable | None = None,
    ) -> None:
        """`folder`: of the run. `clock`: of the steps. `traced`: the first and the last step of `log.trace_steps`.

        `say`: prints a line, on rank 0. `read` and `host`: see `clocks.Clocks`; for tests.
        """
        self._folder, self._comm, self._say = folder, comm, say
        self._begin = lambda: TraceSession(comm, model, clock, passes, read=read, host=host)
        self._of_settings = traced
        self._asked: tuple[int, int] | None = None
        self._requests = TraceRequests(folder) if comm.rank == 0 else None
        self._session: TraceSession | None = None
        self._first = self._step = 0

    @property
    def is_tracing(self) -> bool:
        """Whether a trace is being recorded now."""
        return self._session is not None

    def wanted(self) -> float:
        """On rank 0 the number of steps that are asked for now; -1 if nobody waits for the trace any more. 0 on the other ranks."""
        if self._requests is None:
            return 0.0
        if self._asked is None:
            return float(self._requests.look())
        return -1.0 if self._requests.is_withdrawn() else 0.0

    def agree(self, wanted: float) -> None:
        """Take the sum of `wanted` over all ranks, within a step."""
        if wanted <= -1 and self._asked is not None:
            first, last = self._asked
            self._asked = first, min(last, max(first, self._step))
        elif wanted >= 1:
            self._asked = (self._step + 1, self._step + int(wanted))
            self._answer("taken")

    def before_step(self, step: int) -> None:
        """Begin a trace if it is due. Collective in traced steps."""
        self._step = step
        if self._session is None:
            if self._last_of(step) < step:
                return
            self._first = step
            try:
                self._session = self._begin()
            except Exception as error:
                self._fail(error, f"no trace from step {step}")
                return
        self._session.begin_step()

    def after_step(self, step: int) -> Traced | None:
        """Write the trace after its last step. Returns it, on rank 0. Collective in traced steps."""
        if self._session is None:
            return None
        self._session.end_step(step)
        return self.finish() if self._last_of(step + 1) <= step else None

    def finish(self) -> Traced | None:
        """End a trace now, such as at the end of the run, and write it. Returns it, on rank 0. Collective."""
        session, self._session = self._session, None
        if session is None:
            return None
        if not session.has_steps:
            session.close()
            self._end_request(problem="the run ended within the first traced step")
            return None
        file = self._folder / FOLDER / f"step-{self._first:08d}.json.gz"
        try:
            session.write(file)
        except Exception as error:
            self._fail(error, f"{file} cannot be written")
            return None
        finally:
            session.close()
        self._end_request(path=str(file))
        return Traced(file, self._first, self._step) if self._comm.rank == 0 else None

    def went_back(self) -> None:
        """The run goes on after an earlier step. Collective.

        A trace that is recorded now is dropped, because its steps are void, and one that is asked for is not made. A trace of the
        settings begins again with the next of its steps.
        """
        self.close()
        self._end_request(problem="the run went back to an earlier step within the traced steps; ask for another trace")

    def close(self) -> None:
        """Drop a trace that is not written, on this rank alone, after an error."""
        if self._session is not None:
            self._session.close()
            self._session = None

    def _last_of(self, step: int) -> int:
        """The last step of the trace that contains `step`; 0: none does."""
        found = [each for each in (self._of_settings, self._asked) if each is not None and each[0] <= step <= each[1]]
        return max((last for _, last in found), default=0)

    def _fail(self, error: Exception, what: str) -> None:
        """Tell why there is no trace of the current step, and of those that are due with it. An error of this rank alone is raised."""
        if not collectives.on_all_ranks(error):
            raise error
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error) or type(error).__name__
        self._say(f"trace: {what}: {reason}")
        if self._of_settings is not None and self._of_settings[0] <= self._step <= self._of_settings[1]:
            self._of_settings = None
        self._end_request(problem=f"{what}: {reason}")

    def _end_request(self, path: str = "", problem: str = "") -> None:
        """Answer the request, if there is one."""
        if self._asked is not None:
            self._asked = None
            self._answer("done", path, problem)

    def _answer(self, state: str, path: str = "", problem: str = "") -> None:
        if self._requests is not None:
            with contextlib.suppress(OSError):  # the command ends at its time limit
                self._requests.answer(state, path, problem)

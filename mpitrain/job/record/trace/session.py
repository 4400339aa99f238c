"""One trace on this rank: what it records from its begin to its end, and the file that all ranks then write."""

import socket
import threading
import time
from bisect import bisect
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np

import collectives
from collectives import Communicator
from collectives.diagnosis import record
from mpitrain.files import make_folder, making, partial_of, write_all
from mpitrain.job.record.gauges.phases import StepClock
from mpitrain.job.record.trace import communication, packing
from mpitrain.job.record.trace.clocks import TAG, Clocks
from mpitrain.job.record.trace.events import LAYERS, OPERATORS, PIPELINE, STEPS, RankEvents
from mpitrain.job.record.trace.meetings import Met, corrections
from mpitrain.job.record.trace.profiler import Operator, Profiler
from mpitrain.job.record.trace.spans import Span, Spans

if TYPE_CHECKING:
    from torch import nn


class Acting(Protocol):
    """The passes of a model, which may be those of a pipeline."""

    def actions(self) -> list[tuple[str, float, float]] | None:
        """The name, begin and end of each action of the last step, in seconds of time.perf_counter; None: no pipeline."""


class TraceSession:
    """A trace from its construction to `write` or `close`. All methods but `end_step` and `close` are collective."""

    def __init__(
        self,
        comm: Communicator,
        model: "nn.Module",
        clock: StepClock,
        passes: Acting,
        *,
        read: Callable[[float], float] | None,
        host: Hashable | None,
    ) -> None:
        """`read` and `host`: see `Clocks`. RuntimeError on all ranks if the profiler cannot start on one of them."""
        self._comm, self._passes = comm, passes
        self._steps: list[Span] = []
        self._actions: list[Span] = []
        self._begun = 0.0
        self._began_at = time.time()
        self._clocks = Clocks(comm, read, host)
        self._clocks.measure()
        self._profiler: Profiler | None = None
        self._spans: Spans | None = None
        try:
            with comm.together():
                self._profiler = Profiler()
                self._spans = Spans(model, clock, has_stages=passes.actions() is not None)
            self._kept = record.keep_all()
            comm.barrier()  # the start of the profiler is no wait within the first step
        except BaseException:  # such as a loss of ranks, after which the run goes on
            self.close()
            raise

    @property
    def has_steps(self) -> bool:
        """Whether a step has ended."""
        return bool(self._steps)

    def begin_step(self) -> None:
        """A step begins."""
        self._clocks.measure(always=False)
        if len(set(self._clocks.host_of)) > 1:
            self._comm.barrier()  # a round of messages is no wait within the step
        self._begun = time.monotonic()

    def end_step(self, step: int) -> None:
        """The step has ended."""
        self._steps.append(Span(f"step {step}", self._begun, time.monotonic()))
        self._actions += [Span(*each) for each in self._passes.actions() or ()]

    def close(self) -> None:
        """End all recording on this rank."""
        record.keep_last()
        if self._spans is not None:
            self._spans.close()
        if self._profiler is not None:
            self._profiler.close()
            self._profiler = None

    def write(self, file: Path) -> None:
        """End the trace, and write it. An error on all ranks, such as an OSError if rank 0 cannot write, or a loss of ranks."""
        comm, kept = self._comm, self._kept
        assert self._profiler is not None and self._spans is not None
        record.keep_last()
        self._spans.close()
        self._clocks.measure()
        line = self._clocks.line()
        first, last = self._steps[0].begun, self._steps[-1].ended
        with comm.together():
            operators, residual_s = self._profiler.stop()
            within = [each for each in kept if first <= each.begun <= last]
            mine = communication.operations(
                within, collectives.world().rank, lambda time_s: line(self._clocks.read(time_s))
            )
        self._profiler = None
        about = comm.all_gather_object(
            (communication.meetings(mine), line.error, residual_s, socket.gethostname(), line(self._clocks.read(first)))
        )
        everyone, errors, residuals, hosts, begins = (list(each) for each in zip(*about, strict=True))
        with comm.together():
            fixes = corrections(everyone, self._clocks.host_of)
            everyone = [each.moved(fix) for each, fix in zip(everyone, fixes, strict=True)]
            met = Met(everyone)
            fix = fixes[comm.rank]
            part = RankEvents(
                comm.rank, hosts[comm.rank], min(fix(begin) for begin, fix in zip(begins, fixes, strict=True))
            )
            self._draw(part, self._spans, operators, lambda time_s: fix(line(self._clocks.read(time_s))))
            communication.draw(part, [each.moved(fix) for each in mine], met, comm.rank)
            packed = packing.pack(part.text())
        facts = {
            "ranks": comm.size,
            "steps": [self._steps[0].name, self._steps[-1].name],
            "begun": self._began_at,
            "clock_error_us": round(max(errors) * 1e6, 1),
            "corrected_us": round(max(abs(fix(first) - first) for fix in fixes) * 1e6, 1),
            "profiler_error_us": round(max(residuals) * 1e6, 1),
            "arrows_left_out": met.num_back_in_time,
        }
        self._join(file, packed, facts)

    def _draw(
        self, part: RankEvents, of: Spans, operators: Sequence[Operator], clock: Callable[[float], float]
    ) -> None:
        """Add all but the communication to the part of this rank."""
        first, last = self._steps[0].begun, self._steps[-1].ended
        rows: list[tuple[str, str, Iterable[Span]]] = [
            (STEPS, "step", self._steps),
            (STEPS, "phase", of.phases),
            (PIPELINE, "action", self._actions),
            (LAYERS, "layer", of.layers),
        ]
        for row, category, spans in rows:
            for each in spans:
                if first <= each.begun <= last:
                    part.slice(row, each.name, category, clock(each.begun), clock(each.ended))
        threads = {threading.main_thread().native_id: OPERATORS}
        begins = [each.begun for each in self._steps]
        for operator in operators:
            nth = bisect(begins, operator.begun) - 1
            if nth < 0 or operator.begun > self._steps[nth].ended:
                continue  # between two steps
            if operator.is_on_gpu:
                row, category = f"GPU stream {operator.thread}", "kernel"
            else:
                row, category = threads.setdefault(operator.thread, f"{OPERATORS}, thread {len(threads)}"), "operator"
            part.slice(row, operator.name, category, clock(operator.begun), clock(operator.ended))

    def _join(self, file: Path, mine: packing.Packed, facts: dict[str, object]) -> None:
        """Write the parts of all ranks to the file, on rank 0. OSError on all ranks if that fails."""
        comm = self._comm
        sizes = comm.all_gather_object((len(mine.data), mine.checksum, mine.length))
        if comm.rank:
            comm.send(np.frombuffer(mine.data, np.uint8), 0, TAG)

        def parts() -> Iterator[packing.Packed]:
            yield packing.pack(packing.begin_of_file(facts))
            yield mine
            for rank, (size, checksum, length) in enumerate(sizes[1:], 1):
                data = np.empty(size, np.uint8)
                comm.recv(data, rank, TAG)
                yield packing.pack(packing.BETWEEN)
                yield packing.Packed(data.tobytes(), checksum, length)
            yield packing.pack(packing.END_OF_FILE)

        problem = _write(file, packing.joined(parts())) if comm.rank == 0 else None
        with comm.together():
            if problem is not None:
                raise problem


def _write(file: Path, pieces: Iterable[bytes]) -> OSError | None:
    """Write a file, under another name first. All pieces are taken, also after an error, which is returned: other ranks send them."""
    problem: OSError | None = None
    with ExitStack() as ended:
        try:
            make_folder(file.parent)
            partial = partial_of(file)
            there = ended.enter_context(making(partial))
        except OSError as error:
            problem = error
        for piece in pieces:
            try:
                if problem is None:
                    write_all(there, piece)
            except OSError as error:
                problem = error
    try:
        if problem is None:
            partial.replace(file)
        else:
            partial_of(file)  # removes what is there
    except OSError as error:
        problem = problem or error
    return problem

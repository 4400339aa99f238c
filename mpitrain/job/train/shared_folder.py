"""The folder of a run, as all of its ranks use it together. What rank 0 reads and writes there is in run.py."""

import os
from collections.abc import Callable

import collectives
from collectives import Communicator
from mpitrain.files import check_own
from mpitrain.job.config import Config
from mpitrain.job.record.files.marks import Marks, Phase, Reason, launch_number
from mpitrain.job.train.run import TrainingRun
from mpitrain.placement.rank0 import on_rank0


class SharedFolder:
    """The folder of `run` on the ranks `comm`. All methods but `is_lost`, `is_asked_to_stop` and `alive` are collective, and
    raise an error of rank 0 on all ranks."""

    def __init__(self, config: Config, comm: Communicator, run: TrainingRun) -> None:
        self._config, self._comm, self._run = config, comm, run
        self._marks = Marks(run.folder, active=comm.rank == 0, may_write=lambda: not run.is_lost())
        self._find_start()  # an early check; `take` repeats it, because other jobs can change the folder until then
        if on_rank0(comm, run.is_free):
            self._report_into_it()

    def _find_start(self) -> None:
        """Find the checkpoint from which the run continues, if there is one, and a line about it."""
        self.start, self.beginning = on_rank0(self._comm, lambda: self._run.start(self._config))

    def take(self, say: Callable[[str], object]) -> None:
        """Lock the folder for the training. `say`: see `TrainingRun.lock`; rank 0 calls it."""
        with self._comm.together():
            if self._comm.rank == 0:
                self._run.lock(say)
        self._report_into_it(say)
        self._find_start()

    def prepare(self, say: Callable[[str], object]) -> None:
        """Prepare the folder for training, after all checks: see `TrainingRun.prepare`. `say`: prints a line."""
        with self._comm.together():
            if self._comm.rank == 0:
                aside = self._run.prepare(self._config)
                if aside is not None:
                    say(f"the earlier run is now {aside}")
                self._marks.begin()

    def is_lost(self) -> bool:
        """Whether the folder is another job's now, as far as this rank knows: rank 0 reads it."""
        return self._run.is_lost()

    def is_asked_to_stop(self) -> bool:
        """Whether `python -m mpitrain stop` asks for it, as far as this rank knows: rank 0 looks into the folder."""
        return self._run.is_asked_to_stop()

    def check_lock(self) -> None:
        """RuntimeError if the folder is another job's now."""
        with self._comm.together():
            self._run.check_lock()

    def alive(self, phase: Phase, step: int) -> None:
        """A sign of life for the supervisor, on rank 0."""
        self._marks.alive(phase, step)

    def done(self, reason: Reason, step: int) -> None:
        """The mark of completion."""
        with self._comm.together():
            self._marks.done(reason, step)

    def _report_into_it(self, say: Callable[[str], object] = lambda line: None) -> None:
        """From now on reports of a hang or a failure are written into the folder. A supervisor adds the event by itself."""
        self._run.token = on_rank0(self._comm, lambda: self._run.token)
        if not os.environ.get("MPITRAIN_RECORD_DIR"):
            try:
                check_own(folder := self._run.folder / "flight-record")
                collectives.set_record_folder(folder, self._run.may_report)
            except OSError as error:
                if self._comm.rank == 0:
                    say(f"run: {error}; flight records go to stderr alone")
        tell = None if launch_number() else self._run.write_failure_event
        collectives.set_failure_file(self._run.failure, tell, self._run.may_report)

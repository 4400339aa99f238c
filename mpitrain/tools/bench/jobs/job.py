"""A job of the main command that is harmed: its processes, its output and its files."""

import json
import math
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from ckpt.commit.owner import start_time
from collectives.processes import stat_fields
from collectives.programs import python
from mpitrain.job.elastic.supervisor.mpi_files.sessions import PLACE_PREFIX, VARIABLES
from mpitrain.job.record.parsing.events import read_events

_MARK = "MPITRAIN_CHAOS_JOB"
FAULT, HARM = "MPITRAIN_CHAOS_FAULT", "MPITRAIN_CHAOS_HARM"
"""What mpitrain.tools.bench.jobs.harmed reads."""


class OwnHarm(NamedTuple):
    """The fault that a rank of mpitrain.tools.bench.jobs.harmed brings upon itself before a step."""

    kind: str
    rank: int
    step: int
    seed: int


class BenchJob:
    """A job in the folder `run`, started by `command` (a launcher and its options) with the settings `words` of the main job.

    `harm`: the job harms itself. `module`: another module that takes `--run`.
    """

    def __init__(
        self,
        command: Sequence[str],
        env: Mapping[str, str],
        words: Sequence[str],
        run: Path,
        harm: OwnHarm | None = None,
        module: str = "mpitrain",
    ) -> None:
        self.run, self.harm, self.harm_file = run, harm, run.with_name(f"{run.name}.harmed")
        self.harm_file.unlink(missing_ok=True)
        own = {HARM: str(self.harm_file)}
        if harm is not None:
            own[FAULT] = ":".join(map(str, harm))
            module = "mpitrain.tools.bench.jobs.harmed"
        self._mark = f"{os.getpid()}-{time.monotonic_ns()}"
        # An mpirun that is killed leaves files in a place that is named by its process id.
        self._session = TemporaryDirectory(prefix=PLACE_PREFIX, ignore_cleanup_errors=True)
        its = dict.fromkeys(VARIABLES, self._session.name)
        self.began = time.time()
        self.process = subprocess.Popen(
            [*command, *python(module), "--run", str(run), *words],
            env={**env, **its, **own, "OMP_NUM_THREADS": "1", _MARK: self._mark},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self._output = bytearray()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def output(self) -> str:
        """What the job has printed so far."""
        return self._output.decode(errors="replace")

    def ranks(self) -> dict[int, int]:
        """The process id of each rank of MPI_COMM_WORLD that lives."""
        found = {}
        for pid, environ in self._processes().items():
            rank = environ.get("OMPI_COMM_WORLD_RANK") or environ.get("PMI_RANK")
            if rank is not None and b"python" in _read_bytes(f"/proc/{pid}/cmdline").partition(b"\0")[0]:
                found[int(rank)] = pid
        return found

    def launcher(self) -> int | None:
        """The process id of mpirun: the parent of ranks. None if there is none."""
        parents = {stat_fields(pid)[1] for pid in self.ranks().values()}
        return int(next(iter(parents))) if len(parents) == 1 else None

    def metrics(self) -> list[dict[str, Any]]:
        """The lines of the run's metrics."""
        found = []
        for line in _read_bytes(self.run / "metrics.jsonl").decode(errors="replace").splitlines():
            with suppress(ValueError):
                found.append(json.loads(line))
        return found

    def steps(self) -> dict[int, float]:
        """The loss of each step in the run's metrics; of a repeated step the last one."""
        lines = [line for line in self.metrics() if "loss" in line]
        return {line["step"]: math.nan if line["loss"] is None else line["loss"] for line in lines}

    def events(self, kind: str) -> list[dict[str, Any]]:
        """The run's events of a kind."""
        return [event for event in read_events(self.run) if event["event"] == kind]

    def wait_for_step(self, step: int, timeout_s: float) -> bool:
        """Wait until the metrics have `step`. False if the job ends before, or the time is over."""
        return self.wait_until(lambda: max(self.steps(), default=0) >= step, timeout_s)

    def wait_for_first_step(self, timeout_s: float) -> bool:
        """Wait until the job says that it begins, which it does just before its first step. False as in `wait_until`."""
        return self.wait_until(lambda: "starts at step 0" in self.output, timeout_s)

    def wait_until(self, condition: Callable[[], Any], timeout_s: float, *, every_s: float = 0.02) -> bool:
        """Wait until `condition()` is true, which is asked every `every_s`. False if the job ends before, or the time is over."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            if self.process.poll() is not None:
                return bool(condition())
            if time.monotonic() > deadline:
                return False
            time.sleep(every_s)
        return True

    def end(self, timeout_s: float) -> int | None:
        """Wait for the end; returns the exit code, or None if the job had to be killed: then `output` has the stacks of its ranks."""
        try:
            self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            for pid in self.ranks().values():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGUSR2)
            time.sleep(2.0)
            self.kill()
            return None
        self._close()
        return self.process.returncode

    def kill(self) -> None:
        """End all processes of the job that are left."""
        for pid in [self.process.pid, *self._processes()]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()
        self._close()

    def left(self) -> list[int]:
        """The processes of the job that live, without the launcher."""
        return [pid for pid in self._processes() if pid != self.process.pid]

    def wait_until_left_alone(self, timeout_s: float) -> bool:
        """Wait until no process of the job lives. False if the time is over."""
        deadline = time.monotonic() + timeout_s
        while self.left():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.05)
        return True

    def _processes(self) -> dict[int, dict[str, str]]:
        """The environment of each living process that has the job's mark, by process id."""
        found = {}
        for folder in Path("/proc").glob("[0-9]*"):
            data = _read_bytes(folder / "environ").decode(errors="replace")
            if self._mark in data and start_time(int(folder.name)) is not None:
                pairs = (pair.partition("=") for pair in data.split("\0"))
                environ = {name: value for name, _, value in pairs}
                if environ.get(_MARK) == self._mark:
                    found[int(folder.name)] = environ
        return found

    def _close(self) -> None:
        self._session.cleanup()
        assert self.process.stdout is not None
        self._reader.join(5.0)
        if not self._reader.is_alive():
            self.process.stdout.close()

    def _read(self) -> None:
        assert self.process.stdout is not None
        while chunk := os.read(self.process.stdout.fileno(), 65536):
            self._output += chunk


def _read_bytes(path: str | Path) -> bytes:
    """The contents of a file; empty if it cannot be read."""
    try:
        return Path(path).read_bytes()
    except OSError:
        return b""

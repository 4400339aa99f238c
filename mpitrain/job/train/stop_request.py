"""`python -m mpitrain stop RUN`: the run saves a checkpoint and stops, whatever has launched it, on whatever host it trains.

    RUN/.stop     {"token": of the lock of the job that is asked}     by the command, which removes it

A job with another token, such as a later one, takes no request for its own. Imports neither torch nor MPI.
"""

import argparse
import time
from contextlib import suppress
from pathlib import Path

from mpitrain.files import read_object
from mpitrain.job.record.files.folder_lock import Holder
from mpitrain.job.record.files.marks import last_launch, read_done, write

NAME = ".stop"
EVERY_S = 1.0
"""Seconds between two looks of a job. More looks would burden a file system of many nodes."""
_POLL_S = 0.2


class StopRequests:
    """The requests in a run's folder, as rank 0 of a job sees them."""

    def __init__(self, folder: Path) -> None:
        self._file, self._looked_at = folder / NAME, -float("inf")
        self._asked = False

    def are_for(self, token: str) -> bool:
        """Whether the job whose lock has this token was asked to stop. It stays so. Between two looks: as at the last one."""
        now = time.monotonic()
        if not self._asked and now - self._looked_at >= EVERY_S:
            self._looked_at = now
            with suppress(OSError, ValueError, KeyError):
                self._asked = read_object(self._file)["token"] == token
        return self._asked


def main(words: list[str]) -> int:
    """Returns the exit code. ValueError if no job trains in the folder, RuntimeError if it ends otherwise or at the time limit, OSError
    if the folder cannot be written."""
    parser = argparse.ArgumentParser(
        prog="python -m mpitrain stop",
        description="Ask a run to save a checkpoint and to stop after its step, and wait for its end. The same command goes on later.",
    )
    parser.add_argument("run", metavar="RUN", type=Path, help="the run's folder")
    parser.add_argument(
        "--timeout", type=float, default=600.0, metavar="SECONDS", help="time limit of the wait (default: %(default)s)"
    )
    options = parser.parse_args(words)
    run: Path = options.run
    if options.timeout <= 0:
        raise ValueError(f"stop: --timeout: expected seconds above 0, got {options.timeout}")
    if not run.is_dir():
        raise ValueError(f"stop: there is no run {run}; expected the folder of a run")
    holder = Holder(run)
    if (gone := holder.is_gone()) is not None:
        raise ValueError(f"stop: no job trains in {run}: {gone}")
    if holder.is_old():
        raise ValueError(f"stop: no job trains in {run}: {holder} gives no sign of life")
    try:
        gone = _wait(run, holder, options.timeout)
    finally:
        (run / NAME).unlink(missing_ok=True)
    done = read_done(run, last_launch(run))
    if done is None:
        raise RuntimeError(f"stop: the job in {run} has ended before it could stop as asked: {gone}")
    print(f"{run} has {done.reason} after step {done.step}")
    return 0


def _wait(run: Path, holder: Holder, timeout_s: float) -> str:
    """Ask whoever trains in the folder, which after a loss of ranks is another process, until nobody does. Returns why."""
    asked, until = "", time.monotonic() + timeout_s
    while (gone := holder.is_gone()) is None:
        if (token := holder.token) != asked:
            write(run / NAME, {"token": token})
            print(f"{holder} is asked to save a checkpoint and to stop", flush=True)
            asked = token
        if time.monotonic() > until:
            raise RuntimeError(
                f"stop: {run} has not stopped within {timeout_s:g} s; a longer --timeout waits for slower steps and saves"
            )
        time.sleep(_POLL_S)
    return gone

"""`python -m mpitrain trace RUN`: traces the next steps of a run that trains, or draws a trace. Imports neither torch nor MPI."""

import argparse
import time
from collections.abc import Callable
from pathlib import Path

from collectives.texts import shown
from mpitrain.job.record.files.folder_lock import Holder
from mpitrain.job.record.trace import request
from mpitrain.job.record.trace.request import MOST_TRACED

_POLL_S = 0.2


def main(words: list[str]) -> int:
    """Returns the exit code. ValueError or OSError for the user otherwise."""
    parser = argparse.ArgumentParser(
        prog="python -m mpitrain trace",
        description="Trace the next steps of a run while it trains, in one file of all ranks for ui.perfetto.dev. With --draw alone, "
        "draw the newest trace of the run.",
    )
    parser.add_argument("run", metavar="RUN", type=Path, help="the run's folder")
    parser.add_argument("--steps", type=int, metavar="N", help="steps to trace (default without --draw: 3)")
    parser.add_argument(
        "--timeout", type=float, default=600.0, metavar="SECONDS", help="time limit of the wait (default: %(default)s)"
    )
    parser.add_argument(
        "--draw", type=Path, metavar="FILE", help="draw the trace, or the newest one, to FILE.svg or FILE.png"
    )
    options = parser.parse_args(words)
    if options.steps is not None and not 1 <= options.steps <= MOST_TRACED:
        raise ValueError(
            f"trace: --steps: expected 1 to {MOST_TRACED}, because a trace grows by some MB of memory a step, got {options.steps}"
        )
    if options.timeout <= 0:
        raise ValueError(f"trace: --timeout: expected seconds above 0, got {options.timeout}")
    if not options.run.is_dir():
        raise ValueError(f"trace: there is no run {options.run}; expected the folder of a run")
    if options.draw is not None:
        from mpitrain.view.trace import picture

        picture.check(options.draw)
    if options.draw is not None and options.steps is None:
        file = newest(options.run)
    else:
        try:
            file = traced(options.run, options.steps or 3, timeout_s=options.timeout)
        except KeyboardInterrupt:
            print("trace: interrupted; if the run traces, it ends the trace within seconds")
            return 130
        print(
            f"{shown(str(file))}\nOpen it at https://ui.perfetto.dev (the page reads it in the browser and sends it nowhere), or "
            f"without a network in chrome://tracing; python -m mpitrain trace {shown(str(options.run))} --draw FILE.svg draws it"
        )
    if options.draw is not None:
        picture.draw(file, options.draw)
        print(f"{options.draw} shows {shown(str(file))}")
    return 0


def newest(run: Path) -> Path:
    """The newest trace of a run. ValueError without one."""
    files = sorted((run / "traces").glob("step-*.json.gz"), key=lambda file: file.lstat().st_mtime)
    if not files:
        raise ValueError(
            f"trace: {run} has no trace; --steps N traces a run that trains, and --log.trace-steps 100:103 its steps"
        )
    return files[-1]


def traced(run: Path, steps: int, *, timeout_s: float, say: Callable[[str], object] = print) -> Path:
    """Ask a run for a trace of its next steps, and wait for it.

    Raises ValueError if no job trains in the folder or another trace is asked for, RuntimeError if the run ends first or at the time
    limit, OSError if the folder cannot be written.
    """
    holder = Holder(run)
    if (gone := holder.is_gone()) is not None:
        raise ValueError(
            f"trace: no job trains in {run}: {gone}; --log.trace-steps FIRST:LAST traces steps of a run from its start"
        )
    if holder.is_old():
        raise ValueError(f"trace: no job trains in {run}: {holder} gives no sign of life")
    there = request.read(run)
    if there is not None and there.is_open:
        raise ValueError(
            f"trace: a trace of {run} is asked for already; wait for its end, or remove {run / request.NAME}"
        )
    asked = request.ask(run, steps, timeout_s=timeout_s)
    until, seen = time.monotonic() + timeout_s, "asked"
    try:
        while True:
            gone = holder.is_gone()  # before the look at the answer, which a run gives before its end
            found = request.read(run)
            if found is not None and found.id == asked.id and found.state == "done":
                if found.problem:
                    raise RuntimeError(f"trace: {shown(found.problem)}")
                return run / "traces" / Path(found.path).name
            if gone is not None:
                raise RuntimeError(f"trace: the run ended before the end of the trace: {gone}")
            if found is not None and found.state != seen:
                seen = found.state
                say(f"{holder} traces {steps} step{'s' * (steps > 1)}")
            if time.monotonic() > until:
                what = "has not begun to trace" if seen == "asked" else "has not ended the trace"
                raise RuntimeError(
                    f"trace: {run} {what} within {timeout_s:g} s; a longer --timeout waits for slower steps"
                )
            time.sleep(_POLL_S)
    finally:
        request.withdraw(run, asked)

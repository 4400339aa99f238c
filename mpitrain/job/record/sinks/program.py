"""The program of a sink outside the rank: python -m mpitrain.job.record.sinks.program wandb|trackio.

A rank starts it (outside.py). It reads lines of JSON from its standard input: `About`, then ["figures", STEP, FIGURES],
["event", EVENT] and, as the last one, ["end"]. Without that the rank has died; the program then passes on what it has, and ends.
"""

import fcntl
import json
import math
import os
import re
import signal
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from collectives.texts import shown
from mpitrain.files import read_text, replace
from mpitrain.job.record.sinks.sink import About, tag

_EARLIER_S = 90.0  # for the end of an earlier program of this run
_END_S = 60
_NO_ID = ":;,#?/'"
_ID = re.compile(f"[^{_NO_ID}]{{1,128}}")
"""What W&B takes for an id: see `validate_run_id` of its settings, and the limit of its server."""
_ALARMING = {"failure", "spike", "straggler", "rewind", "desync", "flipped_bit", "shrink"}


class Tool(Protocol):
    """The run in the tool."""

    def log(self, step: int, figures: dict[str, float]) -> None:
        """Add figures of a step, by tag; NaN for what is not finite."""

    def alert(self, title: str, text: str) -> None:
        """Show an alert, and send it if the user has asked the tool to."""

    def finish(self, *, is_ok: bool) -> None:
        """Write or upload what is left. `is_ok`: the run has ended without a failure."""


def main(name: str) -> None:
    """Pass on what comes from standard input."""
    os.nice(5)  # the ranks compute on the same cores
    lines = os.fdopen(os.dup(0), "rb")
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)  # a tool that asks for a password gets none
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(signum, signal.SIG_IGN)  # the end of the input ends the program
    about = json.loads(next(lines))
    about = About(**{**about, "folder": Path(about["folder"])})
    _wait_for_earlier()
    print(f"{time.strftime('%F %T')}: {name} goes on after step {about.steps_done}", flush=True)
    tool = _open(name, about)
    has_ended = has_failed = False
    for line in lines:
        if not line.endswith(b"\n"):  # the rank was killed while it wrote
            break
        kind, *words = json.loads(line)
        if kind == "figures":
            step, figures = words
            tool.log(step, _tagged(figures))
        elif kind == "event":
            event = words[0]
            has_failed = event.get("event") == "failure"
            if event.get("event") in _ALARMING:
                tool.alert(f"{about.folder.name}: {event['event']}", json.dumps(event))
        else:
            has_ended = True
    signal.alarm(_END_S)  # kills the program
    tool.finish(is_ok=has_ended and not has_failed)


def _tagged(figures: Mapping[str, float | None]) -> dict[str, float]:
    # The tools have their own times.
    return {tag(name): math.nan if value is None else value for name, value in figures.items() if name != "time"}


def _open(name: str, about: About) -> Tool:
    run_id = _kept_id(about.folder / f"{name}.id")
    if name == "wandb":
        from mpitrain.job.record.sinks.wandb_run import WandbRun

        return WandbRun(about, run_id)
    from mpitrain.job.record.sinks.trackio_run import TrackioRun

    return TrackioRun(about, run_id)


def _kept_id(path: Path) -> str:
    """The id in a file, which is made with a new id if it has none. Users may have written one that the tool knows."""
    new = os.urandom(4).hex()
    with suppress(FileNotFoundError):
        kept = read_text(path).strip()
        if _ID.fullmatch(kept) and kept.isprintable():
            return kept
        print(
            f"{shown(str(path))}: expected an id of 1 to 128 characters without {_NO_ID}, got {kept!r:.200}; takes {new}",
            flush=True,
        )
    replace(path, f"{new}\n".encode())
    return new


def _wait_for_earlier() -> None:
    """Wait until no other program of this run's sink lives: after a loss of ranks, the one of the last rank 0 may still write.

    The programs, and those that they start, hold the lock of the log, which is their output.
    """
    until = time.monotonic() + _EARLIER_S
    while True:
        try:
            fcntl.flock(sys.stdout, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > until:
                raise TimeoutError(f"an earlier program of this run still writes after {_EARLIER_S:g} s") from None
            time.sleep(0.05)
        except OSError:  # a file system without locks
            return


if __name__ == "__main__":
    main(sys.argv[1])

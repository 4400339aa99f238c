"""`[mpirun -np N] python -m mpitrain doctor`: reads the words, watches the process that checks, and prints the report.

This process never starts MPI. Its child, worker.py, is the rank. If the child hangs or crashes, this process ends it, reports where,
and lets another child do the checks that are left, on this host and without MPI.
"""

import argparse
import json
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import collectives
from collectives.environment import checked_seconds
from collectives.launcher import launched_size
from collectives.shared.terminal import console, or_usage_error
from collectives.shared.units import parse_size
from mpitrain.job.config import Config
from mpitrain.job.elastic.copies.orphans import KEPT_S
from mpitrain.tools.doctor.beforehand import LIMIT_S, Beforehand
from mpitrain.tools.doctor.checks import CHECKS, DoctorOptions
from mpitrain.tools.doctor.findings import Finding, Level, exit_code, show, to_json
from mpitrain.tools.doctor.watch import SIGNALS, CheckWatch, EndedBySignal, end
from mpitrain.tools.doctor.worker import Failed, bounded

_CLEANING = "old files"


def main(words: Sequence[str]) -> int:
    """Check, print the report on rank 0, and return the exit code. SystemExit with code 2 for wrong words."""
    options = _parse(words)
    rank = collectives.launched_rank()
    names = [_CLEANING] if options.clean else options.only or [check.name for check in CHECKS]
    asked = DoctorOptions(options.run, options.clean, options.older_than, options.disk_bytes, options.limit)
    watch = CheckWatch(asked, names, speaks=rank <= 0)
    for number in SIGNALS:
        signal.signal(number, end)
    beforehand = Beforehand(Path(options.run), max(rank, 0), launched_size())
    try:
        differs = None if options.clean or rank < 0 else bounded(beforehand.compare, LIMIT_S)
        if isinstance(differs, Failed):  # the check of the folder says why
            differs = None
        if differs is not None and rank > 0:
            if _is_reported(beforehand):
                return 0  # rank 0's exit code counts
            differs = None
        if differs is not None:
            watch.add(differs)
        watch.check(with_mpi=differs is None and (rank >= 0 or not options.clean))
    except EndedBySignal as error:
        if not watch.has_failed:
            watch.add(
                Finding(Level.ERROR, watch.phase, f"ended by {error} from outside", "an end by itself", _LAUNCHER)
            )
    watch.say_what_is_left()
    if rank > 0:
        beforehand.close()
        return watch.speak_for_rank(rank)
    code = exit_code(watch.findings, strict=options.strict)
    head = f"mpitrain doctor: {_where(watch)}"
    if options.as_json:
        print(
            json.dumps(to_json(watch.findings, head={"doctor": 1}, facts=watch.facts, strict=options.strict), indent=1)
        )
    else:
        show(console(), watch.findings, head=head, strict=options.strict)
    sys.stdout.flush()
    beforehand.close()
    watch.end_children()
    return code


def _is_reported(beforehand: Beforehand) -> bool:
    try:
        return beforehand.is_reported()
    except EndedBySignal:  # rank 0 has ended
        return True


_LAUNCHER = "see the text above: another rank has crashed, or a time limit of the launcher or of the batch system has ended the job"


def _parse(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="[mpirun -np N] python -m mpitrain doctor",
        description="Check the installation and the cluster: under mpirun all ranks and hosts, else this process. Exit code: 0 without "
        "an error, 1 with one, 2 for wrong arguments.",
    )
    parser.add_argument("--json", action="store_true", dest="as_json", help="print findings and facts as JSON")
    parser.add_argument("--strict", action="store_true", help="a warning counts as an error in the exit code")
    parser.add_argument(
        "--run", default=Config().run, metavar="DIR", help="a run's folder: its disk is tried (default: %(default)s)"
    )
    parser.add_argument(
        "--disk-bytes",
        type=or_usage_error(parse_size),
        default=64 << 20,
        metavar="SIZE",
        help="the largest file that is written to try the disk (default: 64MiB)",
    )
    parser.add_argument(
        "--only",
        type=or_usage_error(_checks),
        metavar="CHECK,...",
        help=f"only these checks, of: {', '.join(check.name for check in CHECKS)}",
    )
    parser.add_argument(
        "--limit",
        type=or_usage_error(_seconds),
        default=float("inf"),
        metavar="SECONDS",
        help="the most seconds of a check (default: 10 to 70, as the check needs)",
    )
    parser.add_argument(
        "--clean",
        action="store_true",
        help="only remove the copies of dead elastic runs from node memory, on each host (--older-than)",
    )
    parser.add_argument(
        "--older-than",
        type=or_usage_error(_seconds),
        default=KEPT_S,
        metavar="SECONDS",
        help="the age of copies that are removed: until then a relaunch may use them (default: %(default)g)",
    )
    if collectives.launched_rank() > 0:  # rank 0 says what is wrong
        parser.print_help = lambda file=None: None  # type: ignore[method-assign]
        parser.print_usage = lambda file=None: None  # type: ignore[method-assign]
        parser.exit = lambda status=0, message=None: sys.exit(0)  # type: ignore[method-assign]
    return parser.parse_args(words)


def _seconds(text: str) -> float:
    with suppress(ValueError):
        return checked_seconds(float(text))
    raise ValueError(f"{text!r}; expected seconds of at least 0, such as 60")


def _checks(text: str) -> list[str]:
    known = {check.name.lower(): check.name for check in CHECKS}
    words = [word.strip().lower() for word in text.split(",")]
    if unknown := [word for word in words if word not in known]:
        raise ValueError(f"{unknown[0]!r}; expected some of {', '.join(known.values())}, joined by commas")
    return [known[word] for word in words]


def _where(watch: CheckWatch) -> str:
    if watch.job is None:
        return f"this process on {os.uname().nodename}"
    size, nodes = watch.job
    return f"{size} rank{'s' * (size > 1)} on {nodes} host{'s' * (nodes > 1)}"

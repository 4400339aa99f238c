"""`python -m mpitrain bench calls`: the calls to the file system with which the ranks of a job start, by strace.

Each of them is a question to the servers of a parallel file system, and all ranks ask at the same time.
"""

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import collectives
from collectives.shared.tables import markdown_table
from collectives.shared.terminal import positive
from mpitrain.tools.bench.jobs import checkout

_EPILOG = """\
python -m mpitrain bench calls --np 4 -- python -P -m mpitrain --run /tmp/run --train.steps 1
python -m mpitrain bench calls --np 4 --most 2000 -- bash env.pack python -m mpitrain --run /tmp/run --train.steps 1"""
_TRACED = "trace=%file,%desc"
_CALL = re.compile(r"([\d.]+) (\w+)\(")
_NAMED = re.compile(r'"((?:[^"\\]|\\.)*)"')
_OPENED = re.compile(r"<(/[^>]*)>")
_FD_CALLS = ("read", "write", "pread64", "pwrite64", "readv", "writev", "preadv2", "pwritev2")
"""Calls whose text in quotes is data."""


class SystemCall(NamedTuple):
    """One call: when, its name, and the path that it names or that its descriptor has."""

    time_s: float
    name: str
    path: str
    line: str


def main(words: Sequence[str]) -> int:
    """Run the job and print a table; returns the exit code: 1 if there are more calls than asked for."""
    given = parser().parse_args(words)
    if (strace := shutil.which(given.strace)) is None:
        raise ValueError("strace is missing: install it (on Debian and Ubuntu: apt install strace)")
    launcher, environment = of_checkout(given.np) if given.launcher is None else (shlex.split(given.launcher), None)
    folders = folders_of(given.command) | {os.path.realpath(path): str(path) for path in given.below}
    with tempfile.TemporaryDirectory(prefix="mpitrain-calls.") as room:
        # -ff: a file for each process, so that the calls of one do not cut those of another in two. --seccomp-bpf: the calls that do
        # not count are as fast as without strace
        traced = [strace, "-ff", "--seccomp-bpf", "-y", "-ttt", "-s", "200", "-e", _TRACED, "-e", "signal=none"]
        done = subprocess.run([*launcher, *traced, "-o", f"{room}/rank", *given.command], env=environment, check=False)
        calls = sorted(call for path in Path(room).glob("rank.*") for call in read(path))
    if done.returncode != 0:
        print(f"mpitrain: error: the job has ended with exit code {done.returncode}", file=sys.stderr)
        return 1
    counted = before(calls, given.until)
    if counted is None:
        raise ValueError(f"no rank has printed a line that begins with {given.until!r}: name another with --until")
    return report(counted, folders, given)


def parser() -> argparse.ArgumentParser:
    """The options."""
    words = argparse.ArgumentParser(
        prog="python -m mpitrain bench calls",
        description="Run a command on ranks of this host under strace, and count the calls on files below the environment, the "
        "packages, home, the run's folder and --below, summed over the ranks. Run it without mpirun.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    words.add_argument(
        "--np",
        type=positive,
        default=4,
        metavar="N",
        help="the ranks (default: %(default)s); those of --launcher are its own",
    )
    words.add_argument("--below", type=Path, action="append", default=[], metavar="FOLDER", help="count here, too")
    words.add_argument(
        "--until",
        default="step 1/",
        metavar="TEXT",
        help="count up to the first line of output that begins so (default: %(default)r); '': all",
    )
    words.add_argument("--most", type=int, metavar="N", help="exit code 1 if there are more calls")
    words.add_argument("--launcher", metavar="WORDS", help='such as "srun -n 4" (default: the mpirun of this checkout)')
    words.add_argument("--strace", default="strace", metavar="PROGRAM", help="(default: %(default)s)")
    words.add_argument("--show", type=int, default=0, metavar="N", help="the N paths with most calls, too")
    words.add_argument("command", nargs="+", metavar="COMMAND", help="after --: what each rank runs")
    return words


def of_checkout(num_ranks: int) -> tuple[Sequence[str], dict[str, str]]:
    """The words and the environment of mpirun as ./mpirun/train has them."""
    checkout.check("bench calls")
    return checkout.mpirun(num_ranks, elastic=False)


def folders_of(command: Sequence[str]) -> dict[str, str]:
    """The folders that lie on a parallel file system: real path -> what it is."""
    found = {
        os.path.realpath(sys.prefix): "environment",
        os.path.realpath(Path(collectives.__file__).parents[1]): "packages",
        os.path.realpath(Path.home()): "home",
        os.path.realpath("."): "current folder",
        os.path.realpath(run_of(command)): "run",
    }
    if not sys.base_prefix.startswith("/usr"):
        found[os.path.realpath(sys.base_prefix)] = "Python"
    found.pop("/", None)
    return found


def run_of(command: Sequence[str]) -> str:
    """The run's folder, as the words of the main job name it."""
    for word, following in zip(command, [*command[1:], ""], strict=True):
        if word == "--run":
            return following
        if word.startswith("--run="):
            return word.partition("=")[2]
    return "runs/default"


def read(path: Path) -> Iterator[SystemCall]:
    """The calls that strace has written to a file, those without a path left out."""
    with path.open(errors="replace") as file:
        for line in file:
            if not (call := _CALL.match(line)):
                continue
            name = call[2]
            opened = _OPENED.search(line)
            named = None if name in _FD_CALLS else _NAMED.search(line)
            folder = opened[1] if opened else ""
            target = os.path.join(folder, named[1]) if named and named[1] else folder
            yield SystemCall(float(call[1]), name, os.path.normpath(target) if target else "", line)


def before(calls: Sequence[SystemCall], text: str) -> list[SystemCall] | None:
    """The calls up to the first line of output that begins with the text; None: there is none."""
    if not text:
        return list(calls)
    ends = (
        i
        for i, call in enumerate(calls)
        if call.name == "write" and re.search(rf'"(.*\\n)?{re.escape(text)}', call.line)
    )
    end = next(ends, None)
    return None if end is None else list(calls[:end])


def report(calls: Sequence[SystemCall], folders: dict[str, str], given: argparse.Namespace) -> int:
    """Print how many calls each folder has; returns the exit code."""
    counts: Counter[str] = Counter()
    paths: Counter[tuple[str, str]] = Counter()
    kinds: dict[str, Counter[str]] = {}
    innermost = sorted(folders, key=len, reverse=True)
    for call in calls:
        for folder in innermost:
            if call.path == folder or call.path.startswith(f"{folder}/"):
                counts[folder] += 1
                paths[call.name, call.path] += 1
                kinds.setdefault(folder, Counter())[call.name] += 1
                break
    rows = [
        [folders[folder], folder, f"{count:,}", ", ".join(f"{n:,} {name}" for name, n in kinds[folder].most_common(4))]
        for folder, count in counts.most_common()
    ]
    print(markdown_table(["what", "folder", "calls", "mostly"], rows))
    for (name, path), count in paths.most_common(given.show):
        print(f"{count:7,} {name} {path}")
    total = sum(counts.values())
    ranks = f" of {given.np} ranks" if given.launcher is None else ""  # it has its own number
    print(f"{total:,} calls{ranks}" + ("" if given.most is None else f"; expected at most {given.most:,}"))
    return int(given.most is not None and total > given.most)

"""A program that reads folders of hostile_runs.py with all commands: python hostile_readers.py FOLDER [NAME ...]. It prints JSON."""

import contextlib
import io
import json
import re
import sys
import time
import traceback
from pathlib import Path

from hostile_runs import HARMS, READ_BY, usual

from mpitrain.cli import main

COMMANDS = ("watch", "report", "diff", "profile", "trace")


def words_of(command: str, run: Path, other: Path) -> list[str]:
    """The words of a command that reads `run`."""
    return [command, str(run)] + {
        "watch": ["--once"],
        "report": ["--out", str(run.parent / "x.html")],
        "diff": [str(other)],
        "profile": [],
        "trace": ["--draw", str(run.parent / "x.svg")],
    }[command]


def read(words: list[str]) -> dict[str, object]:
    """What a command did, and the peak of the memory since its beginning."""
    Path("/proc/self/clear_refs").write_text("5")
    out, err = io.StringIO(), io.StringIO()
    began, cpu_s = time.perf_counter(), time.process_time()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main(words)
        except SystemExit as end:
            code = end.code
        except BaseException:
            code = traceback.format_exc()
    mb = int(re.findall(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())[0]) / 1e3
    return {
        "code": code,
        "s": time.perf_counter() - began,
        "cpu_s": time.process_time() - cpu_s,
        "mb": mb,
        "out": out.getvalue(),
        "err": err.getvalue(),
    }


def run(base: Path, names: list[str]) -> None:
    """Read each folder with each command."""
    other = base / "other"
    usual(other)
    for command in COMMANDS:  # imports are no part of the time
        read(words_of(command, other, other))
    for number, name in enumerate(names):
        folder = base / f"run-{number}" / "run"
        usual(folder)
        HARMS[name](folder)
        for command in READ_BY.get(name, COMMANDS):
            print(json.dumps({"name": name, "command": command} | read(words_of(command, folder, other))), flush=True)


if __name__ == "__main__":
    run(Path(sys.argv[1]), sys.argv[2:] or list(HARMS))

"""The process that makes and reads inputs, one after another, and says what came of each. `harness.py` starts it and watches it.

A line of JSON on stdin asks, {"module": that has the TARGET, "seed": N, "case": N or null}, and one on the original stdout answers. The
inputs without a number are sound ones: they warm the reader up, and what the process needs after them is its memory at rest. What the
readers print goes to stderr. A hang prints the stacks of all threads, and ends the process.
"""

import faulthandler
import gc
import importlib
import json
import os
import shutil
import sys
import time
from pathlib import Path
from random import Random
from typing import Any

from fuzzing import memory, verdict
from fuzzing.target import Target, fuzzed, write_files

UNTOUCHED = "untouched"
"""The folder with the files of an input once more, because a reader may change those that it gets."""
NUM_SOUND = 5  # inputs, so that all kinds have been read before the memory at rest is taken


def main() -> None:
    """Answer until stdin ends."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    work = Path.cwd()
    for line in sys.stdin:
        asked = json.loads(line)
        target = importlib.import_module(asked["module"]).TARGET
        if asked["case"] is None:
            answer = _warmed_up(target, asked, work)
        else:
            answer = _answer(target, generator(asked["module"], asked["seed"], asked["case"]), work)
        answers.write(json.dumps(answer) + "\n")


def generator(module: str, seed: int, case: int | str) -> Random:
    """What decides all about an input."""
    return Random(f"{seed} {module} {case}")


def _warmed_up(target: Target, asked: dict[str, Any], work: Path) -> dict[str, Any]:
    """Read sound inputs, each of which is to be read, and to pass the outer check."""
    if reason := target.missing():
        return {"outcome": "missing", "message": reason}
    for number in range(NUM_SOUND):
        found = _answer(target, generator(asked["module"], asked["seed"], f"sound {number}"), work, sound=True)
        if found["outcome"] != "read" or not found["passes"]:
            return {**found, "outcome": "failed", "message": f"number {number}, {found}"}
    gc.collect()
    return {"outcome": "read", "rest_bytes": sum(memory.now(os.getpid())), "limit_s": target.limit_s}


def _answer(target: Target, rng: Random, work: Path, *, sound: bool = False) -> dict[str, Any]:
    folder, untouched = work / "input", work / UNTOUCHED
    for used in (folder, untouched, work / "output"):
        shutil.rmtree(used, ignore_errors=True)
    expected = None
    if sound or (target.share_sound and rng.random() < target.share_sound):
        parts, expected = target.sound(rng)
        files = dict(target.wrap(rng, parts))
        del parts
    else:
        files = fuzzed(target, rng)
    for place in (folder, untouched):
        place.mkdir()
        write_files(files, place)
    passes = target.passes(files)
    del files
    faulthandler.dump_traceback_later(target.limit_s, exit=True)
    memory.forget_peaks(os.getpid())
    start = time.monotonic()
    outcome, message = "read", ""
    try:
        check_documents(target.read(folder), expected)
    except BaseException as error:
        problem = verdict.fault(error, target.errors)
        outcome = "failed" if problem else "refused"
        message = f"{problem}\n{verdict.described(error)}" if problem else str(error)
    seconds = time.monotonic() - start
    faulthandler.cancel_dump_traceback_later()
    own, children = memory.peak(os.getpid())
    peaks = {"own_bytes": own, "children_bytes": children}
    return {"outcome": outcome, "message": message, "passes": passes, "seconds": seconds, **peaks}


def check_documents(found: object, expected: object) -> None:
    """AssertionError if other documents are read of a sound input than it was made from."""
    assert expected is None or found == expected, f"{found!r:.500} is read of {expected!r:.500}"


if __name__ == "__main__":
    main()

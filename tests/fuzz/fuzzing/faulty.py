"""A target whose reader has each kind of fault, for the test of the harness."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from random import Random

from fuzzing.harness import MAX_GROWN_BYTES
from fuzzing.target import Files, Parts, RefusedError, Target
from mpitrain.files import toml_of

_kept: list[bytearray] = []


def refuse_in_lines() -> None:
    raise RefusedError("one line\nand another")


def grow() -> None:
    bytearray(b"\1") * (MAX_GROWN_BYTES + (64 << 20))


def grow_slowly() -> None:
    while True:
        _kept.append(bytearray(b"\1") * (8 << 20))
        time.sleep(0.002)


def grow_in_a_child() -> None:
    """Half of it here, half of it in a process, until this one is ended, and its standard input with it."""
    half = bytearray(b"\1") * (MAX_GROWN_BYTES // 2 + (32 << 20))
    code = f"import signal, sys; signal.alarm(30); x = bytes([1]) * {len(half)}; sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-S", "-c", code], stdin=subprocess.PIPE) as child:
        child.wait()


KINDS: dict[str, tuple[Callable[[], object], str]] = {
    "sound": (lambda: None, ""),
    "refused by a command": (lambda: (_ for _ in ()).throw(RefusedError("no such file")), ""),
    "refused by the project": (lambda: toml_of("a = " + "[" * 5000), ""),
    "refused by the system": (lambda: os.open("missing", os.O_RDONLY), ""),
    "a number of Python": (lambda: int("x"), "raises ValueError, which something else"),
    "another error": (lambda: {}["x"], "raises KeyError, which is none of"),
    "lines": (refuse_in_lines, "raises a message that is not one line"),
    "a signal": (lambda: os.kill(os.getpid(), signal.SIGSEGV), "ends by SIGSEGV"),
    "an exit": (lambda: os._exit(3), "ends with exit code 3"),
    "a hang": (lambda: time.sleep(60), "hangs; it said:\nTimeout"),
    "memory": (grow, "grows"),
    "memory by and by": (grow_slowly, "grows: "),
    "memory of a child": (grow_in_a_child, "grows: "),
}
"""What the reader does, and the beginning of the fault that is to be found; "" if there is none."""


class Faulty(Target):
    errors = (OSError, ValueError)
    limit_s = 1.5
    share_damaged = 0.0

    def make(self, rng: Random) -> Parts:
        return {"kind": b"sound"}

    def mutate(self, rng: Random, parts: Parts) -> Parts:
        return {"kind": rng.choice(list(KINDS)).encode()}

    def passes(self, files: Files) -> bool:
        return True

    def read(self, folder: Path) -> object:
        kind = folder / "kind"
        act, _ = KINDS[kind.read_text()]
        kind.write_text("changed by the reader")
        return act()


TARGET = Faulty()

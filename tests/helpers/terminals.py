"""A program in a real pseudo-terminal, as a user runs it."""

import codecs
import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
# Ctrl-C is a signal only in a controlling terminal. The program takes it itself: code between fork and exec is unsafe with threads.
_TAKES_TERMINAL = (
    "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execvp(sys.argv[1], sys.argv[1:])"
)
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b(\[[0-9;?]*)?$")


class InTerminal:
    """A running program. All that it writes is in `output`."""

    def __init__(self, command: Sequence[str], *, columns: int, rows: int = 24, env: Mapping[str, str] = {}) -> None:
        self._main, self._other = pty.openpty()
        self.resize(columns, rows)
        self.modes = termios.tcgetattr(self._other)
        names = ("COLUMNS", "LINES", "NO_COLOR", "MPITRAIN_TTY", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK")
        inherited = {name: value for name, value in os.environ.items() if name not in names}
        self.process = subprocess.Popen(
            [sys.executable, "-c", _TAKES_TERMINAL, *command],
            stdin=self._other,
            stdout=self._other,
            stderr=self._other,
            cwd=ROOT,
            env={**inherited, "TERM": "xterm-256color", **env},
            start_new_session=True,
        )
        self.output = ""
        self._decode = codecs.getincrementaldecoder("utf-8")().decode  # a read may end within a character

    def resize(self, columns: int, rows: int) -> None:
        fcntl.ioctl(self._main, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def send(self, keys: str) -> None:
        os.write(self._main, keys.encode())

    def until(self, pattern: str, *, timeout_s: float = 20.0) -> str:
        """Read until the new output matches; returns the new output, without escapes."""
        begin, until = len(shown(self.output)), time.monotonic() + timeout_s
        while not re.search(pattern, new := shown(self.output)[begin:]):
            assert time.monotonic() < until, f"no {pattern!r} within {timeout_s} s in {new!r}"
            self._read(0.1)
        return new

    def end(self, *, timeout_s: float = 20.0) -> int:
        """Read to the end of the program; returns its exit code."""
        until = time.monotonic() + timeout_s
        while self.process.poll() is None:
            assert time.monotonic() < until, f"it goes on: {shown(self.output)[-500:]!r}"
            self._read(0.05)
        while self._read(0.0):
            pass
        return self.process.returncode

    def has_first_modes(self) -> bool:
        """Whether the terminal echoes, and waits for whole lines, as before the program."""
        return termios.tcgetattr(self._other) == self.modes

    def _read(self, seconds: float) -> bool:
        if not select.select([self._main], [], [], seconds)[0]:
            return False
        self.output += self._decode(os.read(self._main, 65536))
        return True

    def __enter__(self) -> "InTerminal":
        return self

    def __exit__(self, *args: object) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait()
        os.close(self._main)
        os.close(self._other)


def shown(output: str) -> str:
    """Output without escapes, also without one that is not complete at the end. Each screen begins in a new line."""
    return _ESCAPES.sub("", output.replace("\x1b[H", "\r\n"))

"""Keys that a user presses, without waiting for Enter."""

import os
import select
import sys
import termios
import time
import tty
from collections.abc import Iterator
from typing import Any

_ARROWS = {b"A": "up", b"B": "down", b"C": "right", b"D": "left"}


class Keys:
    """The keys of standard input, in a `with` block; none if it is no terminal. After the block the terminal is as before."""

    def __init__(self) -> None:
        self._file = sys.stdin.fileno() if sys.stdin is not None and sys.stdin.isatty() else None
        self._before: list[Any] = []

    def __enter__(self) -> "Keys":
        if self._file is not None:
            self._before = termios.tcgetattr(self._file)
            tty.setcbreak(self._file)
        return self

    def __exit__(self, *args: object) -> None:
        if self._file is not None:
            termios.tcsetattr(self._file, termios.TCSADRAIN, self._before)

    def wait(self, seconds: float) -> list[str]:
        """The keys that are pressed within a time: characters, or up, down, left and right. It returns at the first, or empty.

        EOFError if the terminal is gone.
        """
        if self._file is None:
            time.sleep(seconds)
            return []
        if not select.select([self._file], [], [], seconds)[0]:
            return []
        if not (pressed := os.read(self._file, 1024)):
            raise EOFError
        return list(_keys(pressed))


def _keys(pressed: bytes) -> Iterator[str]:
    while pressed:
        if pressed[:2] in (b"\x1b[", b"\x1bO") and (arrow := _ARROWS.get(pressed[2:3])) is not None:
            yield arrow
            pressed = pressed[3:]
        else:
            yield chr(pressed[0])
            pressed = pressed[1:]

"""Sinks whose tool runs in a program of its own, so that it can neither hold up nor change the training."""

import copy
import fcntl
import numbers
import os
import select
import subprocess
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from mpitrain.files import adding, reading
from mpitrain.job.record.sinks.sink import About, Figures, Sink

_MOST_BYTES = 64 * 2**20  # of messages that the program has not taken; W&B may need a minute to start
_MOST_SAID_BYTES = 1 << 16  # of the end of the program's log
_EVERY_S = 0.5  # between writes: each wakes the program, which takes a core from a rank
_END_S = 20.0
_LEFT_S = 180.0  # more than the times of program.py for an earlier program and for its own end
_leaving: dict[Path, threading.Thread] = {}
"""What ends the last program that was left, by its log."""


class Outside(Sink):
    """The sinks `wandb` and `trackio`: figures go through a pipe to the program of program.py.

    The program is no fork of the rank, which MPI libraries do not survive. It has none of the launcher's variables, which would make it
    a rank, and not the rank's output, for whose end a launcher waits: it writes to RUN/wandb.log or RUN/trackio.log. It ends after the
    rank, also if the rank is killed. After `leave` it goes on, and the program of the next sink gets its first message after that.
    """

    _folder: Path
    _log: Path

    def __init__(self, name: str) -> None:
        self._name = name
        self._log_begin = 0
        self._program: subprocess.Popen[bytes] | None = None
        self._pipe = -1  # no longer the pipe's number after its close, because another file may have it
        self._unsent = bytearray()
        self._passed_on = 0.0  # when
        self._has_failed = False
        self._earlier: threading.Thread | None = None

    def open(self, about: About) -> None:
        from collectives.launcher import environment_of_program
        from collectives.processes import helpers_start
        from collectives.programs import python

        self._folder, self._log = about.folder, about.folder / f"{self._name}.log"
        self._unsent, self._has_failed = bytearray(), False
        self._earlier = _leaving.get(self._log)
        with adding(self._log) as log:
            self._log_begin = log.seek(0, os.SEEK_END)
            # The program inherits the lock. So it comes before the program of a later start, and after that of an earlier one.
            with suppress(OSError):
                fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with helpers_start():  # a signal that asks the ranks to stop is not for it
                self._program = subprocess.Popen(
                    [*python("mpitrain.job.record.sinks.program"), self._name],
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                    env=environment_of_program(),
                )
        assert self._program.stdin is not None
        self._pipe = self._program.stdin.fileno()
        os.set_blocking(self._pipe, False)
        self._send(about._replace(folder=about.folder.resolve())._asdict())

    def step(self, step: int, figures: Figures) -> None:
        self._send(("figures", step, figures))

    def evaluation(self, step: int, figures: Figures) -> None:
        self._send(("figures", step, figures))

    def event(self, event: Mapping[str, Any]) -> None:
        self._send(("event", event))
        self._pass_on()

    def leave(self) -> None:
        """Let a thread end the program. Its errors stand in its log alone."""
        if self._program is None:
            return
        left = copy.copy(self)
        self._program, self._pipe, self._unsent = None, -1, bytearray()

        def end() -> None:
            with suppress(Exception):
                left._end(_LEFT_S)

        _leaving[self._log] = thread = threading.Thread(target=end, name=f"mpitrain-{self._name}", daemon=True)
        thread.start()

    def close(self) -> None:
        """Wait for at most 20 s until the program has passed on what it got; after that it is killed.

        RuntimeError if it has failed or is killed, unless an error has been raised before.
        """
        if self._program is not None:
            try:
                self._end(_END_S)
            finally:
                self._program = None

    def _end(self, most_s: float) -> None:
        assert self._program is not None and self._program.stdin is not None
        until = time.monotonic() + most_s
        try:
            if not self._has_failed:
                if self._earlier is not None:
                    self._earlier.join(most_s)
                self._send(("end",))
                self._pass_on()
                while self._unsent and (left_s := until - time.monotonic()) > 0:
                    select.select([], [self._pipe], [], left_s)
                    self._pass_on()
        finally:
            self._pipe = -1
            self._program.stdin.close()
            code = self._wait(0.0 if self._unsent else until - time.monotonic())
        if code and not self._has_failed:
            remedy = f"; wandb sync {self._folder}/wandb/*run-* uploads what its files have"
            late = f"its program was ended, because it needed more than {most_s:g} s for the last figures"
            self._fail(late + remedy * (self._name == "wandb") if time.monotonic() >= until else self._problem())

    def _send(self, message: object) -> None:
        if self._pipe < 0:
            return
        self._unsent += msgspec.json.encode(message, enc_hook=_plain) + b"\n"
        if time.monotonic() - self._passed_on > _EVERY_S:
            self._pass_on()

    def _pass_on(self) -> None:
        """Write what the pipe takes, if an earlier program has ended."""
        if self._pipe < 0:
            return
        self._passed_on = time.monotonic()
        try:
            while self._unsent and not (self._earlier is not None and self._earlier.is_alive()):
                del self._unsent[: os.write(self._pipe, self._unsent)]
        except BlockingIOError:
            pass
        except BrokenPipeError:
            self._wait(1.0)
            self._fail(self._problem())
        if len(self._unsent) > _MOST_BYTES:
            self._fail(f"it takes figures more slowly than the run makes them; {_MOST_BYTES >> 20} MB wait")

    def _wait(self, timeout_s: float) -> int:
        """The exit code of the program, which is killed after the time. W&B's own program ends with it."""
        assert self._program is not None
        try:
            return self._program.wait(max(timeout_s, 0.0))
        except subprocess.TimeoutExpired:
            self._program.kill()
            return self._program.wait()

    def _problem(self) -> str:
        """What the program has said at its end."""
        assert self._program is not None
        with reading(self._log) as log:
            log.seek(max(self._log_begin, log.seek(0, os.SEEK_END) - _MOST_SAID_BYTES))
            lines = log.read(_MOST_SAID_BYTES).decode(errors="replace").split("\n")
        said = next((line.strip() for line in reversed(lines) if line.strip()), "")
        return f"its program has ended with code {self._program.returncode}: {said}; {self._log} says more"

    def _fail(self, problem: str) -> None:
        self._has_failed = True
        raise RuntimeError(f"{self._name}: {problem}")


def _plain(value: Any) -> float | str:
    """A value of a type that JSON lacks: a number of NumPy, or a path."""
    return float(value) if isinstance(value, numbers.Real) else str(value)

"""Alerts: the command of `log.on_event`, which gets each event. Standard library only, for a supervisor on hosts without packages."""

import json
import os
import subprocess
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from mpitrain.files import adding

NAME = "alerts.log"
COMMAND_S = 60
"""A command that takes longer is ended."""
AT_ONCE = 4
"""More events wait until a command has ended."""
MOST_WAITING = 100
"""More events are dropped."""
CLOSE_S = 10.0
_START = """
trap '' TERM USR1 USR2
exec timeout -s KILL "$1" sh -c "trap '' TERM
$2"
"""
"""Signals that are ignored stay so in what is started; `timeout` alone passes SIGTERM on. Blocked ones do not: Debian's sh begins with
none."""
_KILLED = (-9, 128 + 9)
"""The exit codes of `timeout`, which has killed itself as well, or only the command."""
_LAST = ("failure", "end")  # after them the process may end at any time


class Alerts:
    """Runs a shell command for each event of a run, in order, with the event as one line of JSON on its standard input.

    A command runs in a session of its own, and goes on if this process ends. It and what it starts ignore SIGTERM, SIGUSR1 and SIGUSR2,
    which Slurm sends to all processes of a step that it ends. A program that handles SIGTERM itself, such as `timeout`, does not.
    Output goes to RUN/alerts.log: mpirun would wait for a command that had its ranks' output. A command that fails stops nothing.

    Args:
        command: for `sh -c`.
        folder: of the run.
        say: gets a line about the first command that fails, and about dropped events. Other threads may call it.
        environment: of the commands. A rank gives `collectives.launcher.environment_of_program()`.
    """

    def __init__(
        self, command: str, folder: Path, say: Callable[[str], object], *, environment: Mapping[str, str]
    ) -> None:
        self._command, self._folder, self._say, self._environment = command, folder, say, environment
        self._changed = threading.Condition()
        self._num_running = 0
        self._waiting: deque[str] = deque()
        self._num_dropped = 0
        self._has_failed = False

    def tell(self, event: Mapping[str, Any]) -> None:
        """Start the command. It waits if others run, unless the event is one of the end of a job. This raises nothing."""
        line = json.dumps(event, default=str)
        with self._changed:
            if self._num_running < AT_ONCE or event.get("event") in _LAST:
                self._start(line)
                return
            if len(self._waiting) < MOST_WAITING:
                self._waiting.append(line)
                return
            self._num_dropped += 1
            is_first = self._num_dropped == 1
        if is_first:
            self._say(f"log.on_event: {MOST_WAITING} events wait for the command; further ones are dropped")

    def close(self) -> None:
        """Wait at most 10 s for the commands. Those that still run after that go on, and events that still wait are dropped."""
        with self._changed:
            soon_s = min(1.0, CLOSE_S)
            if (
                not self._changed.wait_for(lambda: not self._num_running and not self._waiting, soon_s)
                and soon_s < CLOSE_S
            ):
                num = self._num_running + len(self._waiting)
                self._say(f"log.on_event: waiting at most {CLOSE_S:g} s for {num} command{'s' * (num > 1)}")
            self._changed.wait_for(lambda: not self._num_running and not self._waiting, CLOSE_S)
            self._num_dropped += len(self._waiting)
            self._waiting.clear()
            num_dropped = self._num_dropped
        if num_dropped:
            self._say(f"log.on_event: {num_dropped} events were dropped, because the command takes too long")

    def _start(self, line: str) -> None:
        """Start a command. The caller holds the lock."""
        try:
            with tempfile.TemporaryFile() as event, self._open_log() as log:
                # A file and no pipe: the command has the whole event, even if this process ends at once.
                event.write(line.encode() + b"\n")
                event.seek(0)
                process = subprocess.Popen(
                    ["sh", "-c", _START, "sh", str(COMMAND_S), self._command],
                    stdin=event,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                    env=dict(self._environment),
                )
        except OSError as error:
            self._fail(f"cannot be run: {error.strerror or error}")
            return
        self._num_running += 1
        with suppress(RuntimeError):  # while the interpreter ends
            threading.Thread(target=self._wait, args=(process,), daemon=True).start()

    def _open_log(self) -> IO[bytes]:
        try:
            file = adding(self._folder / NAME, 0o600)  # a command may print its own secrets
            with suppress(PermissionError):  # another user's
                os.fchmod(file.fileno(), 0o600)
            return file
        except OSError:
            return open("/dev/null", "ab")

    def _wait(self, process: "subprocess.Popen[bytes]") -> None:
        began = time.monotonic()
        code = process.wait()
        with self._changed:
            self._num_running -= 1
            if code:
                is_late = code in _KILLED and time.monotonic() - began > COMMAND_S - 1
                self._fail(f"did not end in {COMMAND_S} s" if is_late else f"ended with code {code}")
            while self._waiting and self._num_running < AT_ONCE:
                self._start(self._waiting.popleft())
            self._changed.notify_all()

    def _fail(self, what: str) -> None:
        if not self._has_failed:
            self._has_failed = True
            self._say(f"log.on_event: the command {what}; {self._folder / NAME} has its output")

"""Tokenizing processes: lanes that programs of a rank read ahead, while the rank trains.

The programs are no forks of the rank, which MPI libraries do not survive, and have none of the launcher's variables: see worker.py.
They pass rows through memory that they share with the rank.
"""

import os
import socket
import subprocess
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection

import numpy as np

from collectives.launcher import environment_of_program
from collectives.processes import helpers_start
from collectives.programs import python
from mpitrain.job.data.remarks import Remark, say_remark
from mpitrain.job.data.streaming import worker
from mpitrain.job.data.streaming.lanes import Lane, OpenLanes, Recipe
from mpitrain.job.data.streaming.packing import PackedRow
from mpitrain.job.data.streaming.ring import Ring

_BATCHES_AHEAD = 4
_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "RAYON_NUM_THREADS"), "1")


class Processes:
    """The tokenizing processes of a rank. They start at once, and wait for an order.

    Args:
        num: of processes, at least 1. Each has a part of the rank's lanes.
        say: gets a line about each damaged document, before the row that follows it.
    """

    def __init__(self, num: int, say: Callable[[str], object]) -> None:
        self._num, self._say = num, say
        self._running: list[_Process] = []
        self._have_orders = False
        self._start()

    def open_lanes(self, recipe: Recipe) -> OpenLanes:
        """Lanes that the processes read. Lanes that they have read before are no longer of use."""

        def opened(numbers: Sequence[int], first: int, states: np.ndarray) -> Mapping[int, Lane]:
            if self._have_orders:
                self._start()
            self._have_orders = True
            lanes: dict[int, Lane] = {}
            for index, process in enumerate(self._running):
                dealt = numbers[index :: self._num]
                if dealt:
                    num_slots = _BATCHES_AHEAD * recipe.per_lane * len(dealt)
                    lanes |= process.begin(worker.Order(recipe, dealt, first, states, num_slots), self._say)
            return lanes

        return opened

    def running(self) -> list[int]:
        """The ids of the processes."""
        return [process.id for process in self._running]

    def close(self) -> None:
        """End the processes."""
        for process in self._running:
            process.close()
        self._running = []

    def _start(self) -> None:
        self.close()
        self._running = [_Process() for _ in range(self._num)]
        self._have_orders = False


class _Process:
    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        self._memory = os.memfd_create("rows")
        files = (theirs.fileno(), self._memory)
        # A session of its own: a signal to the ranks that asks them to stop is not for it.
        with helpers_start():
            self._program = subprocess.Popen(
                [*python(worker.__name__), *map(str, files)],
                pass_fds=files,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                start_new_session=True,
                env=environment_of_program() | _ONE_THREAD,
            )
        self.id = self._program.pid
        theirs.close()
        self._connection = Connection(ours.detach())
        self.close = weakref.finalize(self, _end, self._connection, self._memory, self._program)
        """Ends the process. It also runs when nobody uses this object."""
        self._num_taken = 0
        self._error: BaseException | None = None  # with which the process has ended

    def begin(self, order: worker.Order, say: Callable[[str], object]) -> "dict[int, _LaneAhead]":
        """Read lanes; returns them."""
        self._say, self._num_told = say, order.num_slots // _BATCHES_AHEAD
        self._ring = Ring(self._memory, order.num_slots, order.recipe)
        self._lanes = [_LaneAhead(self, order.first, order.states[number].copy()) for number in order.numbers]
        self._send(order)
        return dict(zip(order.numbers, self._lanes, strict=True))

    def receive(self) -> None:
        """Wait for rows, and give them to their lanes. An error of the process is raised."""
        if self._error is not None:
            raise self._error
        message = self._next()
        if isinstance(message, BaseException):
            self._error = message
            raise message
        if isinstance(message, str):
            self._say(message)
        elif isinstance(message, Remark):
            say_remark(message)
        elif isinstance(message, int):
            for _ in range(message):
                self._lanes[self._num_taken % len(self._lanes)].rows.append(self._ring.take(self._num_taken))
                self._num_taken += 1
                if self._num_taken % self._num_told == 0:
                    self._send(self._num_told)

    def _send(self, message: object) -> None:
        """Send a message. A process that has ended has said why, or `_next` finds out."""
        with suppress(BrokenPipeError, ConnectionResetError):
            self._connection.send(message)

    def _next(self) -> object:
        try:
            return self._connection.recv()
        except (EOFError, ConnectionResetError):
            code = self._program.wait()
            return RuntimeError(
                f"data: the tokenizing process {self.id} of this rank ended with code {code} before the run; expected it to "
                "go on: if nobody has killed it, stderr or the kernel's log (dmesg) says why; --data.processes 0 does without"
            )


def _end(connection: Connection, memory: int, program: "subprocess.Popen[bytes]") -> None:
    """End a process."""
    connection.close()
    os.close(memory)
    program.kill()  # at once: it leaves nothing behind that the cache does not clean up
    program.wait()


class _LaneAhead:
    """A lane that a process reads. `rows`: those that have arrived, each with the states after it."""

    def __init__(self, process: _Process, num_rows: int, states: np.ndarray) -> None:
        self.num_rows = num_rows
        self.rows: deque[tuple[PackedRow, np.ndarray]] = deque()
        self._process, self._states = process, states

    def next(self) -> PackedRow:
        while not self.rows:
            self._process.receive()
        row, self._states = self.rows.popleft()
        self.num_rows += 1
        return row

    def states(self) -> np.ndarray:
        return self._states

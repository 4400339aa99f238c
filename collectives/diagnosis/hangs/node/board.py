"""The board: a small file in node memory in which each rank notes its state, for reports about a rank that gives no answer.

Each rank of the node has a slot. Its monitor writes the newest operations of the flight record there, twice a second. Another rank
reads them if the rank is stopped or holds the GIL. The file is unlinked at once, so that nothing remains however the job ends.

Stacks: faulthandler's handler of a real-time signal, which is C code that needs no GIL, writes the stacks of all threads to the rank's
part of the file. Another rank sends the signal. This costs nothing while all is well. A timer (`faulthandler.dump_traceback_later`)
exists only once in a process, and the program may use it.
"""

import faulthandler
import math
import os
import signal
import struct
import threading
import time
from contextlib import suppress
from typing import Any, NamedTuple
from uuid import uuid4

from collectives import cgroup
from collectives.diagnosis import dump
from collectives.diagnosis.hangs.node import process
from collectives.diagnosis.job import keep
from collectives.environment import memory_folder
from collectives.files import open_new

_PAGE = 4096
_STACKS_BYTES = 1 << 20  # for each rank; memory is used only where stacks were written
_HEAD = struct.Struct("<qqqq")  # process id, its start time, space of ids, signal for stacks
_NOTE = struct.Struct(
    "<dq"
)  # time on `time.monotonic`, which all processes of a node share; number of bytes that follow
_EVERY_S = 0.5
_LAST = "its last words: "


class Slot(NamedTuple):
    """What a rank has written."""

    pid: int
    started: int
    space: int
    signum: int  # at which it writes its stacks; 0: never
    noted: float
    note: str
    cgroup: str  # the folder of its cgroup; "" if it sees none


class Board:
    """The board of this rank's node. `mpi`: the communicator of all ranks, whose numbers count here. Collective.

    Without room for the file there are no slots. A job of one rank has none.
    """

    def __init__(self, mpi: Any) -> None:
        from mpi4py import MPI

        self._noted = -_EVERY_S
        self._fd = self._stacks_fd = -1
        self._ranks: list[int] = []
        if mpi.size == 1:
            return  # no other rank looks at this one
        node = keep(mpi.Split_type(MPI.COMM_TYPE_SHARED, key=mpi.rank))
        self._ranks = node.allgather(mpi.rank)
        self._mine = node.rank
        path = node.bcast(str(memory_folder() / f"mpitrain-{os.getpid()}-{uuid4().hex}"))
        with suppress(OSError):
            if node.rank == 0:
                self._fd = open_new(path, 0o600)
        try:
            node.Barrier()
            with suppress(OSError):
                self._fd = os.open(path, os.O_RDWR) if self._fd < 0 else self._fd
                # Of its own, because its position in the file is that of the stacks.
                self._stacks_fd = os.open(path, os.O_RDWR)
                self._register()
            node.Barrier()
        except BaseException:  # a rank was lost
            self.close()
            raise
        finally:
            if node.rank == 0:
                with suppress(OSError):
                    os.unlink(path)
        node.Free()

    def _register(self) -> None:
        """Fill this rank's slot, and write stacks at a signal."""
        pid, signum = os.getpid(), 0
        if threading.current_thread() is threading.main_thread() and (signum := process.free_signal()):
            os.lseek(self._stacks_fd, self._stacks_at(self._mine), os.SEEK_SET)
            faulthandler.register(signum, file=self._stacks_fd, all_threads=True, chain=False)
        head = _HEAD.pack(pid, process.start_time(pid), process.pid_space(), signum)
        head += os.fsencode(cgroup.group_of() or "")[: _PAGE - _HEAD.size]
        os.pwrite(self._fd, head, 2 * _PAGE * self._mine)

    def _stacks_at(self, index: int) -> int:
        return 2 * _PAGE * len(self._ranks) + _STACKS_BYTES * index

    def note(self, now: float, first: str = "") -> None:
        """Write `first` and the newest operations of the flight record, if this rank has not done so in the last half second."""
        if self._fd < 0 or now - self._noted < _EVERY_S:
            return
        self._noted = now
        self._write(now, first + dump.brief(now))

    def note_last(self, why: str) -> None:
        """Write why this process ends now. There is no later note."""
        if self._fd >= 0:
            self._noted = math.inf
            self._write(time.monotonic(), f"{_LAST}{why}\n")

    def last(self, rank: int) -> str:
        """Why the process of a rank has ended, as it has written itself; "" if it has not."""
        slot = self.read(rank)
        return slot.note.removeprefix(_LAST).rstrip() if slot is not None and slot.note.startswith(_LAST) else ""

    def _write(self, now: float, note: str) -> None:
        text = note.encode()[: _PAGE - _NOTE.size]
        with suppress(OSError):  # the memory is full
            os.pwrite(self._fd, _NOTE.pack(now, len(text)) + text, 2 * _PAGE * self._mine + _PAGE)

    def read(self, rank: int) -> Slot | None:
        """The slot of a rank; None if it is on another node, or has none."""
        if self._fd < 0 or rank not in self._ranks:
            return None
        data = os.pread(self._fd, 2 * _PAGE, 2 * _PAGE * self._ranks.index(rank)).ljust(2 * _PAGE, b"\0")
        head = _HEAD.unpack_from(data)
        noted, num_bytes = _NOTE.unpack_from(data, _PAGE)
        text = data[_PAGE + _NOTE.size : _PAGE + _NOTE.size + num_bytes].decode(errors="replace")
        pid, started, space, signum = head
        group = os.fsdecode(data[_HEAD.size : _PAGE].rstrip(b"\0"))
        return Slot(pid, started, space, signum, noted, text, group) if pid else None

    def stacks(self, rank: int, after: int = 0) -> bytes:
        """The stacks that a rank has written, without the first `after` bytes."""
        at = self._stacks_at(self._ranks.index(rank))
        return os.pread(self._fd, _STACKS_BYTES - after, at + after).rstrip(b"\0")

    def ask_for_stacks(self, rank: int) -> int | None:
        """Send a rank its signal. Returns after how many bytes its new stacks begin; None if it has no handler, or no room."""
        slot = self.read(rank)
        if slot is None or not slot.signum or not self.is_current(slot) or not process.catches(slot.pid, slot.signum):
            return None
        before = len(self.stacks(rank))
        if before > _STACKS_BYTES // 2:
            return None
        with suppress(OSError):
            os.kill(slot.pid, slot.signum)
            return before
        return None

    @staticmethod
    def is_current(slot: Slot) -> bool:
        """Whether the process of a slot still exists, in this space of process ids."""
        return bool(slot.started) and slot.space == process.pid_space() and process.start_time(slot.pid) == slot.started

    def end(self, slot: Slot) -> None:
        """Kill the process of a slot, if it still exists."""
        if self.is_current(slot):
            with suppress(OSError):
                os.kill(slot.pid, signal.SIGKILL)

    def close(self) -> None:
        """Close the files. Idempotent."""
        slot = self.read(self._ranks[self._mine]) if self._ranks else None
        if slot is not None and slot.signum:
            faulthandler.unregister(slot.signum)
        for fd in {self._fd, self._stacks_fd} - {-1}:
            os.close(fd)
        self._fd = self._stacks_fd = -1


def age(slot: Slot) -> float:
    """Seconds since the rank's last note."""
    return max(time.monotonic() - slot.noted, 0.0)

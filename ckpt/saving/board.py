"""Messages between ranks by files. A background save uses them, because its thread must not call MPI beside the training.

Each rank posts its part of a message as a file in a folder that all ranks see. Rank 0 combines the parts, and all ranks read the
result. Messages are JSON.
"""

import json
import os
import threading
import time
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any

from ckpt.commit.atomic import end_board
from ckpt.storage.local import patient, write_file
from collectives.diagnosis.together import joined

_QUIET_S = 3600.0  # a rank without a message for so long counts as lost
_LEAVING_S = 10.0
_RESERVE_BYTES = 64 << 10
_POLL_S = (0.005, 0.25)  # the first pause between two looks, and the longest


class Board:
    """`Ranks` over a folder, which exists on all nodes now or soon. Messages are JSON-like."""

    def __init__(self, folder: Path, rank: int, size: int) -> None:
        self.folder, self.rank, self.size = folder, rank, size
        self._round = 0
        self._reserve: Path | None = None  # reserves room on the disk for an error message
        self._given_up = threading.Event()

    def give_up(self) -> None:
        """Let a thread that waits for a missing message raise an error, because the message will not come."""
        self._given_up.set()

    def all_gather_object(self, obj: Any) -> list[Any]:
        """Each rank's `obj`, in the order of ranks."""
        self._round += 1
        if self.size == 1:
            return [obj]
        self._post(f"{self._round}.{self.rank}", obj)
        if self.rank == 0:
            self._post(f"{self._round}", [self._take(f"{self._round}.{rank}") for rank in range(self.size)])
        gathered: list[Any] = self._take(f"{self._round}")
        return gathered

    def broadcast_object(self, obj: Any, root: int = 0) -> Any:
        """Rank `root`'s `obj`."""
        return self.all_gather_object(obj if self.rank == root else None)[root]

    def barrier(self) -> None:
        """Wait until all ranks have called this."""
        self.all_gather_object(None)

    def together(self, doing: str = "") -> AbstractContextManager[None]:
        """See `Communicator.together`."""
        return joined(self.all_gather_object, doing)

    def leave(self) -> None:
        """The last call of each rank. Rank 0 removes the folder after the calls of all ranks, or after ten seconds. Never raises."""
        with suppress(OSError):
            (self.folder / f"left.{self.rank}").touch()
        deadline = time.monotonic() + _LEAVING_S
        while self.rank == 0 and time.monotonic() < deadline:
            if all((self.folder / f"left.{rank}").exists() for rank in range(self.size)):
                break
            time.sleep(_POLL_S[0])
        if self.rank == 0:
            end_board(self.folder)

    def _post(self, name: str, obj: Any) -> None:
        if self._reserve is None:
            reserve = self.folder / f"reserve.{self.rank}"
            patient(lambda: write_file(reserve, bytes(_RESERVE_BYTES), durable=False))
            self._reserve = reserve
        hidden = self.folder / f"{name}.part"
        data = json.dumps(obj).encode()
        try:
            write_file(hidden, data, durable=False)
        except OSError:  # the message may be that the disk is full
            hidden.unlink(missing_ok=True)
            self._reserve.unlink(missing_ok=True)
            write_file(hidden, data, durable=False)
        os.rename(hidden, self.folder / name)  # a reader finds the whole file or none

    def _take(self, name: str) -> Any:
        deadline, pause = time.monotonic() + _QUIET_S, _POLL_S[0]
        while True:
            with suppress(FileNotFoundError):
                os.listdir(self.folder)  # makes NFS ask the server again
                return json.loads((self.folder / name).read_text())
            if self._given_up.wait(pause):
                raise RuntimeError("another rank failed, and could not write the reason to the checkpoint's folder")
            if time.monotonic() > deadline:
                raise TimeoutError(f"{self.folder / name} did not come within {_QUIET_S:.0f} s")
            pause = min(2 * pause, _POLL_S[1])

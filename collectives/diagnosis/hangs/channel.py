"""Messages between the monitors of all ranks: small JSON objects, on a separate communicator."""

import json
from collections.abc import Iterator, Mapping
from contextlib import nullcontext, suppress
from typing import Any

from collectives.diagnosis.job import Job

_TAG = 1


class MonitorChannel:
    """`mpi`: the communicator. No method waits, because a receiver may be stopped."""

    def __init__(self, mpi: Any) -> None:
        self._mpi = mpi
        self._sending: list[tuple[Any, bytes]] = []

    def send(self, rank: int, message: Mapping[str, Any]) -> None:
        """Send a message to another rank."""
        from mpi4py import MPI

        data = json.dumps(message).encode()
        self._sending = [each for each in self._sending if not _has_ended(each[0])]
        with suppress(MPI.Exception) if Job.survives else nullcontext():  # the receiver is lost
            self._sending.append((self._mpi.Isend(data, rank, _TAG), data))

    def received(self) -> Iterator[tuple[int, Mapping[str, Any]]]:
        """The messages that have arrived, each with its sender."""
        from mpi4py import MPI

        status = MPI.Status()

        def look() -> Any:
            try:
                return self._mpi.Improbe(MPI.ANY_SOURCE, _TAG, status)
            except MPI.Exception:
                if not Job.survives:
                    raise
                # A rank was lost. MPI refuses to receive from any rank until the loss is acknowledged.
                self._mpi.Ack_failed()
                return None

        # The first look makes MPI progress, which may receive a message that only the second look finds.
        while (message := look() or look()) is not None:
            data = bytearray(status.Get_count(MPI.BYTE))
            try:
                message.Recv(data)
            except MPI.Exception:
                if not Job.survives:
                    raise
                continue  # its sender was lost meanwhile
            yield status.Get_source(), json.loads(data)


def _has_ended(request: Any) -> bool:
    """Whether a message was sent, or its receiver was lost in a job that goes on."""
    from mpi4py import MPI

    try:
        return bool(request.Test())
    except MPI.Exception:
        if not Job.survives:
            raise
        return True

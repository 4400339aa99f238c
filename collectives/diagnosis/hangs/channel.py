"""Messages between the monitors of all ranks: small JSON objects, on a communicator of their own."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

_TAG = 1


class MonitorChannel:
    """`mpi`: the communicator. Nothing here waits: a receiver may be stopped."""

    def __init__(self, mpi: Any) -> None:
        self._mpi = mpi
        self._sending: list[tuple[Any, bytes]] = []

    def send(self, rank: int, message: Mapping[str, Any]) -> None:
        """To another rank."""
        data = json.dumps(message).encode()
        self._sending = [each for each in self._sending if not each[0].Test()]
        self._sending.append((self._mpi.Isend(data, rank, _TAG), data))

    def received(self) -> Iterator[tuple[int, Mapping[str, Any]]]:
        """The messages that have come, each with the rank that sent it."""
        from mpi4py import MPI

        status = MPI.Status()

        def look() -> Any:
            return self._mpi.Improbe(MPI.ANY_SOURCE, _TAG, status)

        # A look makes MPI progress, and only the next look finds a message that came by it: so look twice in each turn of the monitor.
        while (message := look() or look()) is not None:
            data = bytearray(status.Get_count(MPI.BYTE))
            message.Recv(data)
            yield status.Get_source(), json.loads(data)

"""Messages between the monitors of all ranks: small JSON objects, on a separate communicator."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

_TAG = 1


class MonitorChannel:
    """`mpi`: the communicator. No method waits, because a receiver may be stopped."""

    def __init__(self, mpi: Any) -> None:
        self._mpi = mpi
        self._sending: list[tuple[Any, bytes]] = []

    def send(self, rank: int, message: Mapping[str, Any]) -> None:
        """Send a message to another rank."""
        data = json.dumps(message).encode()
        self._sending = [each for each in self._sending if not each[0].Test()]
        self._sending.append((self._mpi.Isend(data, rank, _TAG), data))

    def received(self) -> Iterator[tuple[int, Mapping[str, Any]]]:
        """The messages that have arrived, each with its sender."""
        from mpi4py import MPI

        status = MPI.Status()

        def look() -> Any:
            return self._mpi.Improbe(MPI.ANY_SOURCE, _TAG, status)

        # The first look makes MPI progress, which may receive a message that only the second look finds.
        while (message := look() or look()) is not None:
            data = bytearray(status.Get_count(MPI.BYTE))
            message.Recv(data)
            yield status.Get_source(), json.loads(data)

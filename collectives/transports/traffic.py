"""The count of the bytes that this process has sent to other nodes in collectives."""

from threading import Lock


class Traffic:
    """A count of bytes to which several threads may add."""

    def __init__(self) -> None:
        self._lock = Lock()
        self.nbytes = 0

    def add(self, nbytes: int) -> None:
        with self._lock:
            self.nbytes += nbytes


to_other_nodes = Traffic()


def network_bytes() -> int:
    """Bytes that this process has sent to other nodes in collectives, so far, on all communicators: the contents of its messages.

    The algorithms of the MPI library and of NCCL ("mpi", "nccl") send messages that are not counted, because neither library tells
    which messages an operation sends. "auto" takes "mpi" for short arrays.
    """
    return to_other_nodes.nbytes

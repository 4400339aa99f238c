"""Reads the private memory of another process of the node, if the kernel allows it, by Linux's process_vm_readv.

The kernel copies directly from the peer's pages to ours: one copy instead of two through shared memory. It allows this between
processes of the same user, unless a container's rules or Yama forbid it (Yama's ptrace_scope 1, the default of some distributions,
does). MPITRAIN_PEER_READS=0 turns peer reads off. With 1 the job's processes allow reads by all processes of the user, despite Yama.
"""

import ctypes
import errno
import os
import secrets
from typing import Any

import numpy as np

from collectives.diagnosis import loss
from collectives.environment import switch

_PR_SET_PTRACER, _PR_SET_PTRACER_ANY = 0x59616D61, ctypes.c_ulong(-1)
_TOKEN_BYTES = 16
_libc = ctypes.CDLL(None, use_errno=True)


class _IoVec(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


class PeerReader:
    """Reads the memory of one other process. Only one thread may use it at a time."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._local, self._remote = _IoVec(), _IoVec()
        self._pointers = ctypes.addressof(self._local), ctypes.addressof(self._remote)

    def read(self, target: int, source: int, nbytes: int) -> None:
        """Copy `nbytes` from the peer's address `source` to our address `target`. OSError if the kernel refuses or the peer died."""
        local, remote = self._local, self._remote
        while nbytes:
            local.base, local.length, remote.base, remote.length = target, nbytes, source, nbytes
            copied = _readv(self._pid, self._pointers[0], 1, self._pointers[1], 1, 0)
            if copied <= 0:
                error = ctypes.get_errno()
                if error == errno.ESRCH:
                    loss.peer_is_dead()
                raise OSError(error, f"cannot read {nbytes} bytes of process {self._pid}: {os.strerror(error)}")
            # One call copies at most 2 GiB, and stops at the end of a mapping.
            target, source, nbytes = target + copied, source + copied, nbytes - copied


def peer_readers(mpi: Any) -> list[PeerReader] | None:
    """A reader for each rank of `mpi`, all on one node; None on all ranks if one of them cannot read another. Collective."""
    chosen = switch("MPITRAIN_PEER_READS")
    if chosen and _libc is not None:
        _libc.prctl(_PR_SET_PTRACER, _PR_SET_PTRACER_ANY, 0, 0, 0)
    # In containers the same process id may name different processes, so each rank reads a random token to find out.
    token = np.frombuffer(secrets.token_bytes(_TOKEN_BYTES), np.uint8)
    ranks = mpi.allgather((os.getpid(), token.ctypes.data, token.tobytes()))
    readers = [PeerReader(pid) for pid, _, _ in ranks]
    seen = np.empty(_TOKEN_BYTES, np.uint8)
    works = _readv is not None and chosen is not False
    if works:
        try:
            for rank, (_, address, expected) in enumerate(ranks):
                if rank != mpi.rank:
                    readers[rank].read(seen.ctypes.data, address, _TOKEN_BYTES)
                    works = works and seen.tobytes() == expected
        except OSError:
            works = False
    # This collective call also keeps every rank's token alive until all ranks have read it.
    return readers if all(mpi.allgather(works)) else None


_readv: Any = getattr(_libc, "process_vm_readv", None)
if _readv is not None:
    _readv.restype = ctypes.c_ssize_t
    _readv.argtypes = (
        ctypes.c_int,
        ctypes.c_void_p,
        ctypes.c_ulong,
        ctypes.c_void_p,
        ctypes.c_ulong,
        ctypes.c_ulong,
    )

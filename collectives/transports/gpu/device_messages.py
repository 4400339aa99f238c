"""Messages between two ranks of which one or both have the array in GPU memory.

[Note: messages] Both ranks must choose the same library, but neither knows the kind of memory of the other rank's array:
- NCCL has no tags, matches messages in order of issue, and blocks its stream until both ranks have called. Two ranks that send before
  they receive would wait for each other forever, unless their calls start as one. So NCCL carries only messages of tag 0 within
  `group()`, after a collective on arrays in GPU memory has connected the communicator's GPUs. An array in host memory is copied to the
  device for this, so that the two arrays may be in different kinds of memory.
- MPI carries all other messages: directly from GPU memory if MPI accepts device addresses and this process cannot use NCCL, else
  through pinned host memory. Each rank decides this for its own array.
So for a message of tag 0 either both ranks use a group or neither, and both groups are between the same collectives.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from collectives.arrays.buffer import Buffer
from collectives.diagnosis.record import Log
from collectives.transports.gpu import cuda
from collectives.transports.gpu.nccl import Nccl
from collectives.transports.message import Message


def exchange(nccl: Nccl, messages: Sequence[Message], log: Log) -> list[Callable[[], Any]]:
    """Start messages by NCCL, as one. Returns the functions to call at the end of their group."""
    ends: list[Callable[[], Any]] = []
    copies: list[Any] = []  # kept alive until the messages are issued: then their streams wait for NCCL
    with nccl.group():
        for operation, b, peer, tag in messages:
            sends = operation == "isend"
            with log.enter_pair(operation, peer, tag, b.size, b.dtype.name) as entry:
                entry.by("nccl")
                there, copy = b.device, None
                if there is None or there.index is None:
                    copy, there = nccl.upload(b.flat)
                    copies.append(copy)
                (nccl.send if sends else nccl.recv)(there, peer, b.dtype)
            if copy is not None and not sends:
                ends += [partial(nccl.download, copy, b.flat), b.result]
    return ends


def reach(b: Buffer) -> np.ndarray:
    """The array that MPI reads or writes for `b`: in GPU memory, or a copy in host memory, which `b.result()` copies back."""
    if b.device is None or b.device.index is None or not cuda.takes_messages(b.device.index):
        return b.flat
    cuda.wait_for(b.device)
    return cuda.view(b.device, b.dtype)

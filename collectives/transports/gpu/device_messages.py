"""Messages between two ranks of which one or both have the array in GPU memory.

[Note: messages] Both ranks must come to the same way by what both know, and neither knows where the other's array lies:
- NCCL has no tags, matches in order of issue, and holds its stream until both sides have come. Two ranks that send before they
  receive would wait for each other for ever, were their calls not started as one. So within `group()`, and there alone, messages of tag
  0 go by NCCL, once a collective on arrays in GPU memory has connected the communicator's GPUs. An array in host memory goes the
  same way, over a copy on the device: the two sides need not be of the same kind.
- All other messages go by MPI: from where the array lies if MPI takes device addresses and NCCL never comes to this process, else
  through pinned host memory. Only the one side's array counts for that, too.
So both sides of a message of tag 0 stand in a group, or neither, and between the same collectives: a group is ordered with them.
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
    """Start messages by NCCL, as one; what is left to do at the end of their group."""
    ends: list[Callable[[], Any]] = []
    copies: list[Any] = []  # which live until the messages are issued: only then do their streams wait for NCCL
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
    """The array that MPI reads or writes for `b`: on the device, or a copy in host memory, which `b.result()` copies back."""
    if b.device is None or b.device.index is None or not cuda.takes_messages(b.device.index):
        return b.flat
    cuda.wait_for(b.device)
    return cuda.view(b.device, b.dtype)

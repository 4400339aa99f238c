"""A message between two ranks, as the transports take it."""

from typing import NamedTuple

from collectives.arrays.buffer import Buffer


class Message(NamedTuple):
    """A message that is to be sent or received."""

    operation: str  # isend or irecv
    array: Buffer
    peer: int
    tag: int

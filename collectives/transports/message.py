"""A message between two ranks, as the transports use it."""

from typing import NamedTuple

from collectives.arrays.buffer import Buffer


class Message(NamedTuple):
    """A message to send or to receive."""

    operation: str  # isend or irecv
    array: Buffer
    peer: int
    tag: int

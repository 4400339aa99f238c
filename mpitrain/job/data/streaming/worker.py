"""The program of a tokenizing process: python -m mpitrain.job.data.streaming.worker SOCKET MEMORY, two file descriptors.

A rank starts it (processes.py), and it ends with the rank: then the socket is closed. The messages:

    to the process: an Order; then the number of slots that are free again
    from it: the number of further slots that have rows, of its lanes in turn; a text about a damaged document; a Remark; an
        exception, the last message
"""

import itertools
import pickle
import sys
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import NamedTuple

import numpy as np

from collectives.processes import end_with_parent
from mpitrain.job.data.streaming.lanes import Recipe, open_lanes
from mpitrain.job.data.streaming.ring import Ring

_RANK_IS_GONE = (EOFError, BrokenPipeError, ConnectionResetError)


class Order(NamedTuple):
    """What the process is to read: the arguments of `open_lanes` and of the lanes that it opens, and the slots of the ring."""

    recipe: Recipe
    numbers: Sequence[int]
    first: int
    states: np.ndarray
    num_slots: int


def main(words: Sequence[str]) -> None:
    """Read rows until the rank is gone."""
    socket, memory = map(int, words)
    end_with_parent()  # also while it fetches a shard
    rank = Connection(socket)
    try:
        _read(rank, memory)
    except _RANK_IS_GONE:
        return


def _read(rank: Connection, memory: int) -> None:
    num_new = 0

    def send(message: object = None) -> None:
        """Tell the rank about new rows, and then something else."""
        nonlocal num_new
        for each in (num_new, message):
            if each:
                rank.send(each)
        num_new = 0

    try:
        order: Order = rank.recv()
        ring, num_free = Ring(memory, order.num_slots, order.recipe), order.num_slots
        lanes = list(open_lanes(order.recipe, send, remark=send)(order.numbers, order.first, order.states).values())
        for slot in itertools.count():
            while not num_free or rank.poll():
                num_free += rank.recv()
            lane = lanes[slot % len(lanes)]
            ring.put(slot, lane.next(), lane.states())
            num_free, num_new = num_free - 1, num_new + 1
            if num_new == len(lanes):  # a message wakes the rank, so that one for each row costs more than the row
                send()
    except _RANK_IS_GONE:
        raise
    except Exception as error:
        send(_portable(error))


def _portable(error: Exception) -> Exception:
    """The error, or one with its text if it cannot be sent."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


if __name__ == "__main__":
    main(sys.argv[1:])

"""The answer of a rank to the monitor of another rank, as a JSON object."""

import threading
import time
from typing import TypedDict

from collectives.diagnosis import record, stacks
from collectives.diagnosis.hangs import notice


class Waiting(TypedDict):
    """An operation in which a thread of a rank is."""

    number: int  # on that rank
    key: str  # of the communicator
    label: str  # of the communicator, for readers
    awaited: list[int]  # the ranks of the job that take part
    sequence: int  # its number on the communicator; for a message among those with the same peer, tag and direction
    counter: str  # its key in the `counts` of the awaited ranks
    call: str  # with its number on the communicator; equal on ranks that make the same call
    algorithm: str
    age: float  # seconds
    site: str
    doing: str  # the named call of its thread, such as "the forward of blocks.3"; "" without a name
    thread: int
    dispensable: bool  # the program can end before this operation ends
    comparing: bool  # checked mode: waits for the other ranks' fingerprints


class State(TypedDict):
    """The state of a rank."""

    waiting: list[Waiting]  # oldest first
    standing: str  # the place of its main thread
    doing: str  # the named call of its main thread
    device: str  # NCCL's oldest unfinished operation on its device; "" if there is none
    device_age: float  # the age of that operation in seconds
    ended: str  # how its program has ended; "" while it runs
    last: dict[str, str]  # its last operation on each communicator in the record
    serving: dict[str, int]  # the thread that has entered this last operation
    counts: dict[str, int]  # how many collectives it has entered on each communicator, and messages by peer and tag
    issued: dict[str, list[int]]  # the collectives of each communicator that it has issued but not carried out
    main: int  # the main thread


def state(rank: int, ended: str) -> State:
    """The state of this rank."""
    now, recorded = record.open_operations(), record.last_operations()
    # An operation in which a thread has been for long may have lost its slot in the ring.
    last = {each.log.key: each for each in [*now, *recorded] if not each.is_pair}
    main = stacks.main_thread()
    device = notice.on_device()
    issued: dict[str, list[int]] = {}
    for each in recorded:
        if each.state == record.ISSUED and not each.is_pair:
            issued.setdefault(each.log.key, []).append(each.sequence)
    return State(
        waiting=[waiting(each, rank) for each in now],
        standing=stacks.standing(main) + stacks.handling(main),
        doing=stacks.doing(main),
        device="" if device is None else device.what,
        device_age=0.0 if device is None else time.monotonic() - device.since,
        ended=ended,
        last={key: f"{each.call} ({each.state})" for key, each in last.items()},
        serving={key: each.thread for key, each in last.items()},
        counts=record.counts(),
        issued=issued,
        main=main,
    )


def waiting(operation: record.Operation, rank: int) -> Waiting:
    """The description of an operation in which this rank is."""
    log = operation.log
    return Waiting(
        number=operation.number,
        key=log.key,
        label=str(log),
        awaited=list(log.awaited(operation)),
        sequence=operation.sequence,
        counter=log.counter(operation, rank),
        call=operation.call,
        algorithm=operation.algorithm,
        age=time.monotonic() - operation.begun,
        site=stacks.call_site(operation.thread) + stacks.handling(operation.thread),
        doing=stacks.doing(operation.thread),
        thread=operation.thread,
        dispensable=_ends_with_main(operation.thread),
        comparing=log.comparing,
    )


def _ends_with_main(ident: int) -> bool:
    """Whether a thread is a daemon of the user's program, which may wait forever because it ends with the main thread.

    False for threads of this package and of libraries such as JAX, because the main thread may wait for their work.
    """
    return any(
        thread.ident == ident and thread.daemon and not thread.name.startswith(("collectives-", "Dummy-"))
        for thread in threading.enumerate()
    )

"""The answer of a rank to the monitor of another rank, as a JSON object."""

import threading
import time
from typing import TypedDict

from collectives.diagnosis import record, stacks
from collectives.diagnosis.hangs import notice


class Waiting(TypedDict):
    """An operation that a thread of a rank is in."""

    number: int  # on that rank
    key: str  # of the communicator
    label: str  # of the communicator, for readers
    awaited: list[int]  # the ranks of the job that take part
    sequence: int  # its number on that communicator; of a message, among those to that peer or from it by that tag
    counter: str  # under what name the awaited ranks count it
    call: str  # with its number on that communicator; the same on ranks that make the same call
    algorithm: str
    age: float  # seconds
    site: str
    doing: str  # what its thread is in, such as "the forward of blocks.3"; "" without a name
    thread: int
    dispensable: bool  # the program can end although it never ends
    comparing: bool  # still waits for the others' fingerprints


class State(TypedDict):
    """A rank."""

    waiting: list[Waiting]  # oldest first
    standing: str  # where its main thread is
    doing: str  # what that is in
    device: str  # what NCCL has on its device that has not ended for long; "" for nothing
    device_age: float  # for how many seconds
    ended: str  # how its program has ended; "" while it runs
    last: dict[str, str]  # its last operation on each communicator that the record knows
    serving: dict[str, int]  # the thread that entered it
    counts: dict[str, int]  # how many operations it has entered on each communicator, and messages by peer and tag
    issued: dict[str, list[int]]  # collectives of each communicator that it has issued and not yet done its part of
    main: int  # the main thread


def state(rank: int, ended: str) -> State:
    """This one."""
    now, recorded = record.open_operations(), record.last_operations()
    # The ring may have overtaken what a thread has been in for long.
    last = {each.log.key: each for each in [*now, *recorded] if not each.is_pair}
    main = stacks.main_thread()
    device = notice.on_device()
    issued: dict[str, list[int]] = {}
    for each in recorded:
        if each.state == record.ISSUED and not each.is_pair:
            issued.setdefault(each.log.key, []).append(each.sequence)
    return State(
        waiting=[waiting(each, rank) for each in now],
        standing=stacks.standing(main),
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
    """An operation that this rank is in."""
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
        site=stacks.call_site(operation.thread),
        doing=stacks.doing(operation.thread),
        thread=operation.thread,
        dispensable=_ends_with_main(operation.thread),
        comparing=log.comparing,
    )


def _ends_with_main(ident: int) -> bool:
    """Whether a thread is a daemon of the user's program, which may wait for ever and yet ends with the main thread.

    Not one that another library runs, such as JAX: the main thread may wait for what it does, as it may for our own.
    """
    return any(
        thread.ident == ident and thread.daemon and not thread.name.startswith(("collectives-", "Dummy-"))
        for thread in threading.enumerate()
    )

"""The room of a node for resident storage, noted before several groups of ranks take some of it: the stages of a pipeline.

[Note: room of stages] The stages of a pipeline are sharded in calls of their own, in any order. A call must not see the room that
others have left by chance. So the room is noted before a stage takes some of it. Each call compares the note with the need of all
stages, as if each needed as much as its own, and takes what they have got from it. A later call for other units of a stage sees the
rest. The notes are kept by the communicator of the ranks that have the stages.
"""

from typing import NamedTuple
from weakref import WeakKeyDictionary

from collectives.transports.node import anonymous
from collectives.transports.node.memory import free_in_folder


class Room(NamedTuple):
    """The bytes that are left in the folder of node memory, and within the limits of memory of this process's cgroups.

    What the machine has free does not count: from one run of a command to the next it changes, and the storage decides on roundings.
    """

    in_folder: int
    in_limit: int


_left: "WeakKeyDictionary[object, Room]" = WeakKeyDictionary()


def room_now() -> Room:
    """The room of this node."""
    return Room(free_in_folder(), anonymous.within_limits())


def note_room(stages: object) -> None:
    """Note the room of this node before the model is sharded whose stages the ranks of `stages` have."""
    _left[stages] = room_now()


def noted_room(stages: object | None) -> Room | None:
    """What is left of the noted room; None without a note, or for a model that is not in stages (None)."""
    return None if stages is None else _left.get(stages)


def take_noted(stages: object | None, nbytes: int) -> None:
    """Take what all stages have got from the noted room, if there is one."""
    if stages is not None and stages in _left:
        _left[stages] = Room(*(left - nbytes for left in _left[stages]))

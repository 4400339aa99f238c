"""The room for node memory, noted before several groups of ranks take some of it: the stages of a pipeline.

[Note: room of stages] The stages of a pipeline are sharded in calls of their own, in any order. A call must not see the room that
others have left by chance. So the room is noted before a stage takes some of it, and each call takes the needs of all stages from the
note. The notes are kept by the communicator of the ranks that have the stages.
"""

from weakref import WeakKeyDictionary

from collectives.transports.node.memory import room

_left: "WeakKeyDictionary[object, int]" = WeakKeyDictionary()


def note_room(stages: object) -> None:
    """Note the room of this node before the model is sharded whose stages the ranks of `stages` have."""
    _left[stages] = room()


def noted_room(stages: object | None) -> int | None:
    """What is left of the noted room; None without a note, or for a model that is not in stages (None)."""
    return None if stages is None else _left.get(stages)


def take_noted(stages: object | None, nbytes: int) -> None:
    """Take what all stages have got from the noted room, if there is one."""
    if stages is not None and stages in _left:
        _left[stages] -= nbytes

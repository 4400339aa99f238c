"""The saves in the background of this process: who reads a checkpoint waits until the save of it has ended."""

import threading
from collections.abc import Collection
from typing import Protocol

from ckpt.storage.local_path import LocalPath
from ckpt.storage.places import Place


class Underway(Protocol):
    """A save: its thread, the places that it writes (the checkpoint and its copies), and its error once it has failed."""

    thread: threading.Thread
    places: Collection[Place]
    error: Exception | None


saves: "list[Underway]" = []
"""Those that run, or whose end was not reported yet."""


def known(place: Place) -> Place:
    """A name for a checkpoint's place that all paths to it give. The checkpoint itself may be a link, or missing."""
    if isinstance(place, LocalPath):
        place = place.abspath()
        return place.parent.real() / place.name
    return place


def wait_for(place: Place) -> Exception | None:
    """Wait until no save of this process writes `place`. Not collective. The error of the last one, if it failed.

    The other ranks of such a save need not call anything: their threads write on. A thread that saves waits for no other save.
    """
    current = threading.current_thread()
    if not saves or any(save.thread is current for save in saves):
        return None
    mine = [save for save in list(saves) if known(place) in save.places]
    for save in mine:
        save.thread.join()
    return mine[-1].error if mine else None

"""Python's search for cyclic garbage, and when it is out of place."""

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_counting = threading.Lock()
_inside = 0  # threads: the last of them turns the search on again
_was_enabled = False


@contextmanager
def no_collections() -> Iterator[None]:
    """Search for no cyclic garbage meanwhile; also as a decorator.

    What thousands of tensors are described by is many small objects and no garbage. Their number alone would start a search through
    all objects of the process, which with torch are a million: 0.15 s, in which no byte is moved.
    """
    global _inside, _was_enabled
    with _counting:
        if not _inside:
            _was_enabled = gc.isenabled()
            gc.disable()
        _inside += 1
    try:
        yield
    finally:
        with _counting:
            _inside -= 1
            if not _inside and _was_enabled:
                gc.enable()

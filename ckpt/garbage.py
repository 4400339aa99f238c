"""Python's search for cyclic garbage, and when it is out of place."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_collections() -> Iterator[None]:
    """Search for no cyclic garbage meanwhile; also as a decorator.

    What thousands of tensors are described by is many small objects and no garbage. Their number alone would start a search through
    all objects of the process, which with torch are a million: 0.15 s, in which no byte is moved.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()

"""The choice between the implementations of the codec, which all give the same bits. MPITRAIN_CODEC names the best one allowed."""

import functools
import threading
from typing import NamedTuple

from collectives.codec import fallback, native
from collectives.codec.formats import Codec
from collectives.environment import choice

VARIABLE = "MPITRAIN_CODEC"
_lock = threading.Lock()  # of two threads that call at once, each would compile


class Chosen(NamedTuple):
    """An implementation, its name, and the reason for the choice in a few words."""

    name: str
    why: str
    codec: Codec


class Found(NamedTuple):
    """The implementations that run here by name, the slowest first, and the reason why there is no better one."""

    codecs: dict[str, Codec]
    why: str


_found: Found | None = None


def available(*, compile_s: float = native.COMPILE_S) -> Found:
    """The implementations that run here. The first call finds them. `compile_s`: the most seconds of a compiler, 0: none."""
    global _found
    with _lock:
        if _found is None:
            _found = _find(compile_s)
        return _found


def _find(compile_s: float) -> Found:
    codecs: dict[str, Codec] = {"numpy": fallback}
    try:
        codecs |= {native.LEVELS[each.level]: each for each in native.load(compile_s)}
        return Found(codecs, "the best for this CPU")
    except native.Unavailable as reason:
        return Found(codecs, str(reason))


@functools.cache
def chosen(*, compile_s: float = native.COMPILE_S) -> Chosen:
    """The implementation for this process. `compile_s`: as for `available`. ValueError for an unknown name in MPITRAIN_CODEC."""
    limit = choice(VARIABLE)
    if limit == "numpy":  # then no compiler is started
        return Chosen("numpy", f"{VARIABLE}=numpy", fallback)
    codecs, why = available(compile_s=compile_s)
    allowed = ["numpy", *native.LEVELS]
    if limit:
        allowed = allowed[: allowed.index(limit) + 1]
    name = [name for name in codecs if name in allowed][-1]
    return Chosen(name, f"{VARIABLE}={limit}" if name == limit else why, codecs[name])

"""Making the contestants, and the reasons of those that cannot take part."""

from collections.abc import Callable, Hashable, Mapping
from typing import TypeVar

K = TypeVar("K", bound=Hashable)
C = TypeVar("C")


class CannotTakePart(Exception):  # noqa: N818  (it is no error of the job)
    """A contestant cannot be made on these ranks; the text is the reason. Raised on all ranks."""


def make_each(makers: Mapping[K, Callable[[], C]]) -> tuple[dict[K, C], dict[K, str]]:
    """Each contestant by its maker, and the reasons of those that cannot take part. Collective."""
    made: dict[K, C] = {}
    skipped: dict[K, str] = {}
    for name, make in makers.items():
        try:
            made[name] = make()
        except CannotTakePart as reason:
            skipped[name] = str(reason)
    return made, skipped

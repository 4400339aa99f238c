"""Communicators that cannot be used any more: freed ones, and all communicators in a child process that a rank has forked."""

import os
from collections.abc import Callable
from typing import Any

from collectives.progress.issued import Issues
from collectives.progress.progress import Progress, of_this_process
from collectives.progress.work import Queued


class Freed(Progress):
    """The Progress of a freed communicator. Every operation of a communicator calls its Progress first, so all of them raise."""

    on_thread = False

    def pending(self) -> bool:
        raise ValueError("this communicator was freed; create another by world(), split() or Mesh")

    def issue(self, operation: Callable[[], Any], name: str, issues: Issues | None) -> Queued:
        raise ValueError(f"{name} on a communicator that was freed")

    def flush(self) -> None:
        self.pending()

    def drain(self) -> None:
        self.pending()

    def close(self) -> None:
        self.pending()


class Forked(Freed):
    """The Progress of all communicators in a forked child, where each call would wait forever or disturb the parent's calls."""

    def pending(self) -> bool:
        raise RuntimeError(
            "a forked child cannot use its parent's communicator; start a new process (multiprocessing's spawn, subprocess), or leave "
            "communication to the parent"
        )

    def issue(self, operation: Callable[[], Any], name: str, issues: Issues | None) -> Queued:
        self.pending()
        raise AssertionError

    def advance(self) -> None:
        self.pending()

    def close(self) -> None:
        """Do nothing: a forked child has no operations to carry out at its end."""


def _forked() -> None:
    """Runs in a forked child. Each call, also one with a plan, calls its Progress first, so no other object need change."""
    for progress in of_this_process:
        progress.__class__ = Forked


os.register_at_fork(after_in_child=_forked)

"""What a sink is: an object that gets the figures of a run, beside the record of the run itself."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

Figures = Mapping[str, float | None]
"""Figures by name; None for what is not finite."""

_TIMES = ("step_s", "data_s", "forward_s", "backward_s", "optimizer_s", "comm_s", "comm_hidden_s", "check_s")
_SPEEDS = ("tokens_per_s", "mfu", "mfu_vendor")


class About(NamedTuple):
    """What a sink knows of its run."""

    folder: Path
    """Of the run."""
    steps_done: int
    """The step from which the run goes on. What a sink has of later steps, from before a crash, is void."""
    settings: dict[str, Any]
    """All settings by their full names, without secrets: see `config.flat` and `config.public`."""
    project: str
    """The name under which other tools keep the run together with others: `log.project`."""


class Sink:
    """A sink that ignores all it gets. Sinks override what they need.

    Only rank 0 has sinks, and calls them from one thread. Any method may raise: the run reports the error once, closes the sink, and
    goes on without it. Methods must not wait for a network, draw random numbers from a generator of the process, or start MPI.
    """

    def open(self, about: About) -> None:
        """Begin, or go on after the step `About.steps_done`. It is called before all others but `close`.

        It may be called again after `leave` or `close`: the run has gone back to an earlier step, or goes on after a loss of ranks.
        """

    def step(self, step: int, figures: Figures) -> None:
        """The figures of a step, by their names in metrics.jsonl. `step`: the number of steps done, from 1."""

    def evaluation(self, step: int, figures: Figures) -> None:
        """The figures of an evaluation after `step` steps, which comes after the figures of that step."""

    def event(self, event: Mapping[str, Any]) -> None:
        """A line of events.jsonl."""

    def leave(self) -> None:
        """Close without waiting for another tool: the run goes on, with this sink or with another one of its kind."""
        self.close()

    def close(self) -> None:
        """Write what is left, within seconds. It is also called after an error, without `open`, and after `leave`."""


def tag(name: str) -> str:
    """The name of a figure for tools that make a group of charts of the names with the same text before a slash."""
    group = "time/" if name in _TIMES else "speed/" if name in _SPEEDS else ""
    return group + name
